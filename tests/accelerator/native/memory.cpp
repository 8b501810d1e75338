#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/TensorBody.h>
#include <ATen/ops/clone.h>

#include <cstring>

namespace sim {
namespace {

struct Block {
  std::atomic<int> references{1};
  void* start;
  size_t bytes;
};

void release_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block->references.fetch_sub(1) != 1) return;
  counters().allocated_bytes -= int64_t(block->bytes);
  free(block->start);
  delete block;
}

Block* block_of(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &release_block ? static_cast<Block*>(pointer.get_context()) : nullptr;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return sim::allocate(bytes, current_device()); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    simStreamSynchronize(&current_queue(current_device()));
    default_copy_data(to, from, bytes);
  }
  bool initialized() override { return sim::initialized(); }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* figure : {&stats.allocated_bytes[0], &stats.active_bytes[0], &stats.reserved_bytes[0]}) {
      figure->current = counters().allocated_bytes;
      figure->peak = counters().peak_bytes;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { counters().peak_bytes = counters().allocated_bytes.load(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    constexpr size_t total = size_t(8) << 30;
    return {total - std::min(total, size_t(counters().allocated_bytes)), total};
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return c10::DataPtr(nullptr, c10::Device(c10::kCPU));
    void* start = nullptr;
    TORCH_CHECK(posix_memalign(&start, 64, bytes) == 0, "sim: out of memory");
    const std::lock_guard<std::mutex> hold(mutex);
    blocks[static_cast<char*>(start)] = bytes;
    return c10::DataPtr(start, start, &release, c10::Device(c10::kCPU));
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  static void release(void* start);

  std::mutex mutex;
  std::map<char*, size_t> blocks;
};
PinnedAllocator& pinned() {
  static PinnedAllocator* const p = new PinnedAllocator;
  return *p;
}
void PinnedAllocator::release(void* start) {
  {
    const std::lock_guard<std::mutex> hold(pinned().mutex);
    pinned().blocks.erase(static_cast<char*>(start));
  }
  free(start);
}

at::Tensor alias(const at::Tensor& t, c10::DataPtr data, c10::DeviceType type, c10::DispatchKey key) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), int64_t(t.storage().nbytes()), std::move(data),
                       c10::GetAllocator(type), true);
  at::Tensor made =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

}  // namespace

c10::Allocator& device_allocator() {
  static DeviceAllocator* const a = new DeviceAllocator;
  return *a;
}
c10::Allocator& pinned_allocator() { return pinned(); }

bool is_pinned(const void* pointer) {
  const std::lock_guard<std::mutex> hold(pinned().mutex);
  auto* at = static_cast<char*>(const_cast<void*>(pointer));
  auto after = pinned().blocks.upper_bound(at);
  if (after == pinned().blocks.begin()) return false;
  --after;
  return at < after->first + after->second;
}

c10::DataPtr allocate(size_t bytes, c10::DeviceIndex index) {
  ensure_initialized();
  const c10::Device device(kSim, index);
  if (bytes == 0) return c10::DataPtr(nullptr, nullptr, &c10::detail::deleteNothing, device);
  auto* block = new Block;
  block->bytes = bytes;
  TORCH_CHECK(posix_memalign(&block->start, 64, bytes) == 0, "sim: out of memory");
  raise_to(counters().peak_bytes, counters().allocated_bytes += int64_t(bytes));
  return c10::DataPtr(block->start, block, &release_block, device);
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  const size_t before = storage->nbytes();
  if (bytes == before) return;
  const auto device = storage->device().index();
  c10::DataPtr fresh = allocate(bytes, device);
  if (const size_t common = std::min(before, bytes)) {
    Block *from = block_of(storage->data_ptr()), *to = block_of(fresh);
    from->references++;
    to->references++;
    current_queue(device).push([from, to, common](Queue&) {
      memcpy(to->start, from->start, common);
      release_block(from);
      release_block(to);
    });
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

at::Tensor cpu_alias(const at::Tensor& t) {
  c10::DataPtr data(nullptr, c10::Device(c10::kCPU));
  if (Block* block = block_of(t.storage().data_ptr())) {
    block->references++;
    data = c10::DataPtr(block->start, block, &release_block, c10::Device(c10::kCPU));
  }
  return alias(t, std::move(data), c10::kCPU, c10::DispatchKey::CPU);
}

at::Tensor flat_cpu_alias(const at::Tensor& t) {
  at::Tensor made = cpu_alias(t);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef({t.numel()}), c10::IntArrayRef({int64_t(1)}),
                                                    t.storage_offset());
  return made;
}

at::Tensor meta_alias(const at::Tensor& t) {
  return alias(t, c10::DataPtr(nullptr, c10::Device(c10::kMeta)), c10::kMeta, c10::DispatchKey::Meta);
}

at::Tensor host_copy(const at::Tensor& t) {
  at::Tensor made = t.clone();
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

}  // namespace sim
