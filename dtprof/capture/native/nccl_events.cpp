// The events that NCCL's back end records around its kernels, on its own stream: the exact begin and end of an operation.
//
// A library of its own, which needs the headers of CUDA and NCCL; without it the hook asks the handles for completion.
// Begins are recorded where TORCH_NCCL_ENABLE_TIMING is set, as `dtprof run` does.
#define USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <utility>

#include "kernel_events.h"

namespace {

using Work = c10d::ProcessGroupNCCL::WorkNCCL;

// The events are protected; a pointer to a member, named by a derived class, is not.
struct Peek : Work {
  static auto begin() { return &Peek::ncclStartEvent_; }
  static auto end() { return &Peek::ncclEndEvent_; }
};

}  // namespace

extern "C" __attribute__((visibility("default"))) bool dtprof_find_kernel_events(c10d::Work* work,
                                                                                 dtprof::KernelEvents* found) {
  auto* nccl = dynamic_cast<Work*>(work);
  if (!nccl) return false;
  auto begin = nccl->*Peek::begin(), end = nccl->*Peek::end();
  if (!begin || !end || !begin->isCreated() || !end->isCreated()) return false;
  found->begin = begin->event();
  found->end = end->event();
  found->keep = std::make_shared<std::pair<decltype(begin), decltype(end)>>(std::move(begin), std::move(end));
  return true;
}
