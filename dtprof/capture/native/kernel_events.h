// What a back end says of the kernel of a work: the events around it. Shared with libraries that read them.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>

namespace dtprof {

struct KernelEvents {
  void* begin = nullptr;
  void* end = nullptr;
  std::shared_ptr<void> keep;  // while either is used
};

// Return whether it is a work of this back end that has both.
using FindKernelEvents = bool (*)(c10d::Work*, KernelEvents*);

}  // namespace dtprof
