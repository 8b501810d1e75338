// Memory of the device: host memory in blocks that live on while a queued task still needs them. That makes freed
// activations and FSDP's `storage.resize_(0)` safe, where a real allocator needs `record_stream`.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "streams.h"

namespace sim {

c10::Allocator& device_allocator();
c10::Allocator& pinned_allocator();
bool is_pinned(const void* pointer);
c10::DataPtr allocate(size_t bytes, c10::DeviceIndex device);
void resize_storage(c10::StorageImpl* storage, size_t bytes);  // on the current stream, as the kernels that use it

inline bool on_sim(const at::Tensor& t) { return t.defined() && t.device().type() == kSim; }

// A CPU tensor over the same bytes, for the stream's thread. It holds the block and not the device's tensor: no Python
// object travels to that thread.
at::Tensor cpu_alias(const at::Tensor& tensor);
at::Tensor flat_cpu_alias(const at::Tensor& tensor);  // all its elements in one dimension
at::Tensor meta_alias(const at::Tensor& tensor);      // geometry alone
at::Tensor host_copy(const at::Tensor& tensor);       // of an operand that lives on the host: it may change meanwhile

}  // namespace sim
