#include "device_hooks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>

#include <cstring>

#include "memory.h"

namespace sim {
namespace {

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t given) override {
    seed_ = given;
    offset_ = 0;
  }
  void set_offset(uint64_t given) override { offset_ = given; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({16}, at::kByte);
    memcpy(state.data_ptr(), &seed_, 8);
    memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "sim: wrong generator state");
    memcpy(&seed_, state.data(), 8);
    memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->seed_ = seed_;
    made->offset_ = offset_;
    return made;
  }
  at::Generator next() {  // SplitMix64 of seed and count
    uint64_t z = seed_ + 0x9E3779B97F4A7C15ULL * ++offset_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return at::detail::createCPUGenerator(z ^ (z >> 31));
  }

 private:
  uint64_t seed_ = 0, offset_ = 0;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return initialized(); }
  void init() const override { ensure_initialized(); }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(device_count()); }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    TORCH_CHECK(device < device_count(), "sim: no such device ", int(device));
    set_current_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    if (device >= 0) setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  at::Device getDeviceFromPtr(void*) const override { return c10::Device(kSim, current_device()); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* const generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kMaxDevices; i++) made->push_back(at::make_generator<Generator>(c10::DeviceIndex(i)));
    return made;
  }();
  return generators->at(size_t(device));
}

at::Generator take_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device) {
  at::Generator used = given.has_value() && given->defined() ? *given : default_generator(device);
  if (used.device().type() != kSim) return used;
  const std::lock_guard<std::mutex> hold(used.mutex());
  return static_cast<Generator*>(used.unsafeGetGeneratorImpl())->next();
}

void register_device() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::SetAllocator(kSim, &device_allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  });
}

}  // namespace sim
