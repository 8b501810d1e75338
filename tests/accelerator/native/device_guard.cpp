// Streams and events as torch sees them: c10's interface of devices, the one a profiler may use on any accelerator.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "streams.h"

namespace sim {
namespace {

MarkPtr latest_of(void* event) { return event ? static_cast<Event*>(event)->latest() : nullptr; }
c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }

  c10::Device getDevice() const override { return c10::Device(kSim, current_device()); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.is_privateuseone() && index_of(device) < device_count(), "sim: no such device ", device);
    set_current_device(index_of(device));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) set_current_device(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(device_count()); }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    simDeviceSynchronize(device < 0 ? current_device() : device);
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(index_of(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return stream_from_pool(index_of(device), high);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return stream_from_pool(index_of(device), priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    set_current_stream(stream);
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &queue_of(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    raise_error();
    return queue_of(stream).query();
  }
  void synchronizeStream(const c10::Stream& stream) const override { simStreamSynchronize(&queue_of(stream)); }
  bool isStreamCapturing(const c10::Stream& stream) const override { return queue_of(stream).capturing; }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag) const override {
    raise_if_lost();
    TORCH_CHECK(!queue_of(stream).capturing, "sim: event recorded while the stream captures a graph");
    if (!*event) *event = new Event(flag == c10::EventFlag::BACKEND_DEFAULT);
    counters().events++;
    queue_of(stream).mark(static_cast<Event*>(*event)->record());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (auto mark = latest_of(event)) queue_of(stream).wait_for(mark);
  }
  bool queryEvent(void* event) const override {
    raise_if_lost();
    const auto mark = latest_of(event);
    return !mark || mark->ready();
  }
  void synchronizeEvent(void* event) const override {
    if (auto mark = latest_of(event)) simEventSynchronize(mark.get());
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    TORCH_CHECK(from && to, "sim: both events must be recorded");
    auto *first = static_cast<Event*>(from), *second = static_cast<Event*>(to);
    TORCH_CHECK(first->timing && second->timing, "sim: both events must be created with enable_timing");
    const auto a = first->latest(), b = second->latest();
    TORCH_CHECK(a && b && a->ready() && b->ready(), "sim: both events must be completed");
    return double(b->shown() - a->shown()) * 1e-6 * (1 + settings().drift_ppm * 1e-6);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace sim
