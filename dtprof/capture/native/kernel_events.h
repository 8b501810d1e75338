// The events that a back end records around the kernel of a Work. Shared with libraries that read them.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>

namespace dtprof {

struct KernelEvents {
  void* begin = nullptr;
  void* end = nullptr;
  std::shared_ptr<void> keep;  // while either is used
};

// Return whether a Work is of this back end and has both events.
using FindKernelEvents = bool (*)(c10d::Work*, KernelEvents*);

}  // namespace dtprof
