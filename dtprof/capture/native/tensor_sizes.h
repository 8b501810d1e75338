// Sizes of the arguments of an operation: elements, element type, device, and sizes that differ between peers.
#pragma once

#include <ATen/core/ivalue.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "names.h"

namespace dtprof {
namespace {

class SizesTable {
 public:
  std::mutex& mutex() { return mutex_; }
  void forget() { ids_.clear(); }  // mutex held

  // Id of the pair of lists, declared at first sight; a negative number from their hash once the table is full.
  int32_t id(Log* log, const std::vector<int64_t>& inputs, const std::vector<int64_t>& outputs) {
    const std::string text = "\"inputs\":" + list(inputs) + ",\"outputs\":" + list(outputs);
    int32_t id;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto known = ids_.find(text);
      if (known != ids_.end()) return known->second;
      if (ids_.size() >= MAX_TABLE_ENTRIES) return -1 - static_cast<int32_t>(std::hash<std::string>()(text) & 0x3fffffff);
      id = static_cast<int32_t>(ids_.size() + 1);
      ids_[text] = id;
    }
    log->write_line("{\"k\":\"sizes\",\"id\":" + std::to_string(id) + "," + text + "}");
    return id;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, int32_t> ids_;
};
SizesTable& sizes() {
  static auto* table = new SizesTable;
  return *table;
}

[[gnu::cold, noreturn]] void refuse_class() { throw std::runtime_error("an argument of another class than the schema says"); }

// The object that an argument of a custom class holds, or null. The operator's schema has fixed its class, so that the
// checks of IValue::toCustomClass, which cost more than all the rest, are skipped, and no reference is counted.
template <class T>
T* unwrap(const c10::IValue& value) {
  if (!value.isObject()) [[unlikely]] refuse_class();
  const c10::IValue& capsule = value.toObjectRef().getSlot(0);
  if (!capsule.isCapsule()) [[unlikely]] refuse_class();
  const auto* target = static_cast<const c10::intrusive_ptr_target*>(capsule.internalToPointer());
  return static_cast<T*>(const_cast<c10::intrusive_ptr_target*>(target));
}

int64_t count_of(const at::Tensor& tensor) {
  const auto count = tensor.is_sparse() ? c10::SymInt(tensor._nnz()) : tensor.unsafeGetTensorImpl()->sym_numel();
  return count.maybe_as_int().value_or(0);
}

// Elements, type and device of one tensor argument (a tensor, a list, a list of lists).
struct Elements {
  uint64_t total = 0;
  int64_t first = -1;
  int dtype = -1;
  bool meta = false, uneven = false;
  c10::Device device{c10::DeviceType::CPU};

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const int64_t n = count_of(tensor);
    total += n;
    if (dtype < 0) {
      device = tensor.device();
      dtype = static_cast<int>(tensor.scalar_type());
      meta = device.is_meta();
    }
    if (first < 0) first = n;
    else uneven |= n != first;
  }
  void add(const c10::IValue& value) {
    if (value.isTensor()) add_tensor(value);
    else if (value.isList()) add_list(value);
  }

 private:
  void add_tensor(const c10::IValue& value) {
    const at::Tensor& tensor = value.toTensor();
    add(tensor);
  }
  void add_list(const c10::IValue& list) {
    if (!list.isList()) __builtin_unreachable();
    for (const c10::IValue& item : list.toListRef()) {
      if (item.isTensor()) [[likely]]
        add_tensor(item);
      else if (item.isList())
        add_list(item);
    }
  }
};

// Append the elements of each tensor of an argument.
void list_counts(const c10::IValue& value, std::vector<int64_t>& counts) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined()) counts.push_back(count_of(tensor));
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) list_counts(item, counts);
  }
}

}  // namespace
}  // namespace dtprof
