// The process group "simccl": collectives as tasks of a stream.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

// A back end that carries its data over `carrier`, a private gloo group of the same ranks.
c10::intrusive_ptr<c10d::Backend> make_backend(int rank, int size, c10::intrusive_ptr<c10d::Backend> carrier);

// The next `after` collectives that this process issues still end; from then on they start and never end.
void stall_network(int64_t after);

}  // namespace sim
