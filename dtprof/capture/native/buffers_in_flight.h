// The check of handles (`dtprof run --check handles`): which tensors the operations in flight read and fill, and which
// operator of the program touches one of them before its wait.
//
// A callback of torch's own RecordFunction sees every operator with its arguments before it runs, on all threads; while
// nothing is in flight it looks at none. Nothing here keeps memory alive, and none of it is installed without the check.
#pragma once

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "call_sites.h"
#include "tensor_sizes.h"

namespace dtprof {
namespace {

// What an operator does with the memory of an argument.
enum class Use : uint8_t { kNone, kRead, kWrite };

// A part of a storage, in bytes. The storage is compared, never read: held weakly, its address is not used again.
struct Buffer {
  c10::StorageImpl* address;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  uint64_t first, end;
  bool filled;  // else only read
};

// Bytes that a tensor reaches in its storage, from its first to behind its last.
bool extent(const at::Tensor& tensor, uint64_t& first, uint64_t& end) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage() || impl->has_symbolic_sizes_strides() || tensor.numel() == 0) return false;
  uint64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  first = tensor.storage_offset() * tensor.element_size();
  end = (last + 1) * tensor.element_size();
  return true;
}

// Say whether a tensor has an element within these bytes of its storage: of one with gaps the gaps may lie there.
bool reaches(const at::Tensor& tensor, uint64_t first, uint64_t end, int64_t dim = 0, uint64_t at = 0) {
  const uint64_t bytes = tensor.element_size();
  if (dim == 0) at = tensor.storage_offset() * bytes;
  uint64_t rest = bytes;
  for (int64_t i = dim; i < tensor.dim(); i++) rest += (tensor.size(i) - 1) * tensor.stride(i) * bytes;
  if (at >= end || at + rest <= first) return false;
  if (dim == tensor.dim() || (dim == 0 && tensor.is_non_overlapping_and_dense())) return true;
  for (int64_t i = 0; i < tensor.size(dim); i++)
    if (reaches(tensor, first, end, dim + 1, at + i * tensor.stride(dim) * bytes)) return true;
  return false;
}

template <class F>
void each_tensor(const c10::IValue& value, F&& f) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined()) f(tensor);
  } else if (value.isTensorList() || value.isList()) {
    for (const c10::IValue& item : value.toListRef()) each_tensor(item, f);
  }
}

// Arguments of operators that look at a tensor's form, not at its elements.
class FormOnly {
 public:
  static bool contains(const std::string& name) {
    static const auto* names = new std::unordered_set<std::string>{
        "aten::expand_as", "aten::view_as", "aten::type_as", "aten::reshape_as", "aten::is_same_size",
        "aten::size", "aten::stride", "aten::sym_size", "aten::sym_stride", "aten::sym_numel", "aten::numel",
        "aten::dim", "aten::sym_storage_offset", "aten::storage_offset", "aten::result_type", "aten::can_cast",
        "aten::is_pinned", "aten::is_leaf", "aten::output_nr", "aten::_version", "aten::requires_grad_",
        "aten::retain_grad", "aten::retains_grad", "aten::set_data", "aten::data", "aten::record_stream",
        "aten::resize_", "aten::resize_as_", "aten::set_", "aten::detach_", "aten::squeeze_", "aten::unsqueeze_",
        "aten::t_", "aten::transpose_", "aten::as_strided_", "aten::swapaxes_", "aten::swapdims_", "aten::rename_",
        "aten::_debug_has_internal_overlap", "aten::_has_compatible_shallow_copy_type", "aten::sum_to_size",
        "aten::is_floating_point", "aten::is_complex", "aten::is_signed", "aten::is_inference", "aten::is_neg",
        "aten::is_conj", "aten::get_device", "aten::_is_zerotensor"};
    const auto ends = [&](const char* end) {
      const size_t n = std::strlen(end);
      return name.size() >= n && name.compare(name.size() - n, n, end) == 0;
    };
    return ends("_like") || name.compare(0, 10, "aten::new_") == 0 || names->count(name) > 0;
  }
};

class BuffersInFlight {
 public:
  // An operation of the program, from its call until its wait.
  struct Operation {
    uint64_t id = 0;
    uint16_t op = 0, group = 0;
    uint32_t seq = 0, site = 0;
    bool p2p = false, gloo = false, dropped = false;
    uint32_t reported = 0;  // id of the newest entry about it
    std::vector<Buffer> buffers;
  };

  bool on() const { return on_.load(std::memory_order_relaxed); }

  void begin() {
    if (on_.exchange(true)) return;
    at::addGlobalCallback(at::RecordFunctionCallback(&BuffersInFlight::before_operator)
                              .needsInputs(true)
                              .scopes({at::RecordScope::FUNCTION}));
  }

  // Add what an argument of an operation reaches.
  static void collect(Operation& operation, const c10::IValue& value, bool filled) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      uint64_t first, end;
      if (!extent(tensor, first, end)) return;
      const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
      operation.buffers.push_back({storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl(), first, end, filled});
    });
  }

  // An operation is about to begin: report what it shares with those in flight.
  void check(Log* log, const Operation& mine, const std::string& name) {
    if (!any()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Buffer& own : mine.buffers) {
      const auto [from, to] = by_storage_.equal_range(own.address);
      for (auto found = from; found != to; ++found) {
        Operation& other = operations_.at(found->second.operation);
        const Buffer& buffer = other.buffers[found->second.buffer];
        if (own.first >= buffer.end || own.end <= buffer.first || !(own.filled || buffer.filled)) continue;
        if (!other.gloo && other.group == mine.group) continue;  // in the order of its stream
        report(log, other, own.filled ? Use::kWrite : Use::kRead, name, mine.site);
      }
    }
  }

  // It has begun, and its handle goes to the program; return the number that the handle keeps.
  uint64_t add(Operation&& operation) {
    if (operation.buffers.empty()) return 0;
    std::lock_guard<std::mutex> lock(mutex_);
    if (operations_.size() >= kMost) forget_freed();
    if (operations_.size() >= kMost) return 0;
    const uint64_t id = operation.id = ++last_id_;
    for (size_t i = 0; i < operation.buffers.size(); i++) by_storage_.emplace(operation.buffers[i].address, Place{id, i});
    operations_.emplace(id, std::move(operation));
    count_.store(operations_.size(), std::memory_order_relaxed);
    return id;
  }

  // The program waited for an operation, or will learn in another way when it is complete.
  void waited(uint64_t id) {
    if (!id || !any()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = operations_.find(id);
    if (found == operations_.end()) return;
    const Operation& operation = found->second;
    if (operation.reported) late(operation);
    if (operation.gloo) return remove(id);
    forget_if([&, group = operation.group, seq = operation.seq, p2p = operation.p2p](const Operation& o) {
      return o.id == id || (o.group == group && o.p2p == p2p && o.seq <= seq);  // in the order of its stream
    });
  }

  // The handle is gone without a wait: what touches the buffer comes too early for good.
  void dropped(uint64_t id) {
    if (!id || !any()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = operations_.find(id);
    if (found != operations_.end()) found->second.dropped = true;
  }

  // A barrier of the group has passed: what was issued before it is complete.
  void passed(uint16_t group) {
    if (!any()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    forget_if([group](const Operation& o) { return o.group == group; });
  }

  // The host has waited for its devices.
  void synchronized() {
    if (!any()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    forget_if([](const Operation& o) { return !o.gloo; });
  }

  std::mutex& mutex() { return mutex_; }
  void forget() {  // mutex held
    operations_.clear();
    by_storage_.clear();
    count_.store(0);
  }

  // A wait found that a tensor had been written to since the operation was issued; which line did it is not known.
  void written_before(Log* log, const Operation& operation) {
    std::lock_guard<std::mutex> lock(mutex_);
    Operation copy = operation;
    report(log, copy, Use::kWrite, "", 0);
    if (copy.reported) late(copy);
  }

 private:
  struct Place {
    uint64_t operation;
    size_t buffer;
  };
  struct Uses {
    bool skipped = true;
    std::vector<Use> of;  // by argument
  };

  bool any() const { return count_.load(std::memory_order_relaxed) > 0; }

  static std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& function);

  void touch(const at::RecordFunction& function) {
    Log* log = g_log.load(std::memory_order_acquire);
    // Threads of back ends have no Python state: what they do with a buffer is the operation itself.
    if (!log || !PyGILState_GetThisThreadState()) return;
    const Uses& uses = uses_of(function);
    if (uses.skipped) return;
    const auto inputs = function.inputs();
    const size_t n = std::min(inputs.size(), uses.of.size());
    for (size_t i = 0; i < n; i++) {
      if (uses.of[i] == Use::kNone) continue;
      each_tensor(inputs[i], [&](const at::Tensor& tensor) { touch(log, function, tensor, uses.of[i]); });
    }
  }

  void touch(Log* log, const at::RecordFunction& function, const at::Tensor& tensor, Use use) {
    uint64_t first, end;
    if (!extent(tensor, first, end)) return;
    auto* address = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    std::vector<std::pair<uint64_t, size_t>> found;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto [from, to] = by_storage_.equal_range(address);
      for (auto place = from; place != to; ++place) {
        const Buffer& buffer = operations_.at(place->second.operation).buffers[place->second.buffer];
        if (use == Use::kRead && !buffer.filled) continue;
        if (first >= buffer.end || end <= buffer.first || !reaches(tensor, buffer.first, buffer.end)) continue;
        found.emplace_back(place->second.operation, place->second.buffer);
      }
    }
    if (found.empty()) return;
    Thread& thread = this_thread();
    uint32_t site = sites().here(log, thread);  // may ask for the GIL: without the lock
    if (site == 0) site = g_backward_site.load(std::memory_order_relaxed);
    site = labelled_sites().id(log, thread, site, thread.label);
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [id, buffer] : found)
      if (const auto known = operations_.find(id); known != operations_.end())
        report(log, known->second, use, function.name(), site);
  }

  // Write an entry for each pair of lines. Lock held.
  void report(Log* log, Operation& operation, Use use, const std::string& by, uint32_t site) {
    const auto slot = entries_.emplace(Key{operation.site, site, use}, static_cast<uint32_t>(entries_.size() + 1));
    operation.reported = slot.first->second;
    if (!slot.second || entries_.size() > kMostEntries) return;
    log->write_line("{\"k\":\"early_use\",\"t_ns\":" + std::to_string(now()) + ",\"id\":" +
                    std::to_string(operation.reported) + ",\"use\":\"" + (use == Use::kWrite ? "written" : "read") +
                    "\",\"by\":" + quoted(by) + ",\"used\":" + std::to_string(site) + ",\"op\":" +
                    std::to_string(operation.op) + ",\"group\":" + std::to_string(operation.group) + ",\"seq\":" +
                    std::to_string(operation.seq) + ",\"site\":" + std::to_string(operation.site) + ",\"step\":" +
                    std::to_string(g_step.load(std::memory_order_relaxed)) + ",\"dropped\":" +
                    (operation.dropped ? "true}" : "false}"));
  }

  // The wait came after the use. Lock held.
  void late(const Operation& operation) {
    Log* log = g_log.load(std::memory_order_acquire);
    if (log && late_.insert(operation.reported).second && operation.reported <= kMostEntries)
      log->write_line("{\"k\":\"early_use\",\"id\":" + std::to_string(operation.reported) + ",\"waited\":true}");
  }

  void remove(uint64_t id) {
    const auto found = operations_.find(id);
    if (found == operations_.end()) return;
    for (const Buffer& buffer : found->second.buffers) {
      auto [from, to] = by_storage_.equal_range(buffer.address);
      while (from != to) from = from->second.operation == id ? by_storage_.erase(from) : std::next(from);
    }
    operations_.erase(found);
    count_.store(operations_.size(), std::memory_order_relaxed);
  }

  template <class F>
  void forget_if(F&& gone) {
    std::vector<uint64_t> ids;
    for (const auto& [id, operation] : operations_)
      if (gone(operation)) ids.push_back(id);
    for (const uint64_t id : ids) remove(id);
  }
  void forget_freed() {
    forget_if([](const Operation& o) {
      return std::all_of(o.buffers.begin(), o.buffers.end(), [](const Buffer& b) { return b.storage.expired(); });
    });
  }

  static const Uses& uses_of(const at::RecordFunction& function) {
    // The name is that of the registered operator, and stays where it is.
    thread_local std::unordered_map<const char*, Uses> known;
    const auto slot = known.try_emplace(function.name());
    if (slot.second) look_up(function, slot.first->second);
    return slot.first->second;
  }
  [[gnu::cold]] static void look_up(const at::RecordFunction& function, Uses& uses) {
    const auto schema = function.operator_schema();
    if (!schema) return;
    const std::string& name = schema->name();
    for (const char* start : {"c10d", "_c10d", "_dtensor", "profiler", "symm_mem", "dtprof"})
      if (name.compare(0, std::strlen(start), start) == 0) return;
    if (FormOnly::contains(name)) return;
    for (const auto& argument : schema->arguments()) {
      const auto* alias = argument.alias_info();
      uses.of.push_back(!alias ? Use::kRead : alias->isWrite() ? Use::kWrite : Use::kNone);
      uses.skipped = uses.skipped && uses.of.back() == Use::kNone;
    }
  }

  struct Key {
    uint32_t issued, used;
    Use use;
    bool operator==(const Key& other) const {
      return issued == other.issued && used == other.used && use == other.use;
    }
  };
  struct KeyHash {
    size_t operator()(const Key& key) const {
      return std::hash<uint64_t>()(static_cast<uint64_t>(key.issued) << 32 | key.used) * 3 + static_cast<size_t>(key.use);
    }
  };

  static constexpr size_t kMost = 16384, kMostEntries = 256;
  std::atomic<bool> on_{false};
  std::atomic<size_t> count_{0};
  std::mutex mutex_;  // never held while waiting for the GIL
  uint64_t last_id_ = 0;
  std::unordered_map<uint64_t, Operation> operations_;
  std::unordered_multimap<c10::StorageImpl*, Place> by_storage_;
  std::unordered_map<Key, uint32_t, KeyHash> entries_;
  std::unordered_set<uint32_t> late_;
};
BuffersInFlight& g_buffers_in_flight = *new BuffersInFlight;  // never deleted, as the other tables
BuffersInFlight& buffers_in_flight() { return g_buffers_in_flight; }

std::unique_ptr<at::ObserverContext> BuffersInFlight::before_operator(const at::RecordFunction& function) {
  if (!g_buffers_in_flight.any()) return nullptr;
  try {
    g_buffers_in_flight.touch(function);
  } catch (...) {  // the program goes on
  }
  return nullptr;
}

}  // namespace
}  // namespace dtprof
