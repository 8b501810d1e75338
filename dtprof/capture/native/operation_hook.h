// The dispatcher hook: one boxed kernel per c10d operator that records the operation and redispatches it unchanged.
#pragma once

#include <cxxabi.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <typeinfo>

#include "buffers_in_flight.h"
#include "call_sites.h"
#include "process_groups.h"
#include "tensor_sizes.h"
#include "watched_work.h"

namespace dtprof {
namespace {

// The cost of recording operations, metered on one in sixteen: reading the clock is a good part of it.
struct Meter {
  static constexpr uint32_t kEvery = 16;
  static bool due(Thread& thread) { return ++thread.operations % kEvery == 0; }
  static void add(Segment* segment, uint64_t ns) {
    segment->capture_ns().fetch_add(ns * kEvery, std::memory_order_relaxed);
  }
};

[[gnu::cold]] void count_error() {
  if (Log* log = g_log.load()) log->current()->errors().fetch_add(1, std::memory_order_relaxed);
}

class OperationHook final : public c10::OperatorKernel {
 public:
  OperationHook(uint16_t op, const std::string& name, const c10::FunctionSchema& schema)
      : op_(op),
        arguments_(static_cast<int>(schema.arguments().size())),
        returns_(static_cast<int>(schema.returns().size())),
        p2p_(name == "send" || name.compare(0, 4, "recv") == 0),
        receives_(p2p_ && name != "send"),
        in_place_(name == "allreduce_" || name == "broadcast_" || name == "reduce_" || p2p_),
        name_("c10d::" + name),
        empty_(name.find("barrier") != std::string::npos) {
    for (int i = 0; i < arguments_; i++) {
      const std::string& argument = schema.arguments()[i].name();
      if (argument.compare(0, 5, "input") == 0 || name == "send") read_ |= uint64_t{1} << i;
      if (argument == "process_group") group_ = i;
      else if (argument == "reduce_op") reduce_op_ = i;
      else if (argument == "root_rank" || argument == "dst" || argument == "src") peer_ = i;
      else if (argument == "tag") tag_ = i;
      else if (argument == "async_op" || argument == "asyncOp") async_ = i;
      else if (argument == "output_split_sizes") output_splits_ = i;
      else if (argument == "input_split_sizes") input_splits_ = i;
      else if (argument.compare(0, 6, "output") == 0 && outputs_ < 0) outputs_ = i;
      else if (argument.compare(0, 5, "input") == 0 && inputs_ < 0) inputs_ = i;
    }
    if (inputs_ < 0) inputs_ = 0;
  }

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    constexpr c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    Log* log = g_log.load(std::memory_order_acquire);
    Thread* thread = nullptr;
    Event event;
    bool gloo = false, metered = false;
    Group* group = nullptr;
    FollowedDevice* device = nullptr;
    BuffersInFlight::Operation buffers;
    c10::VariableVersion version(c10::VariableVersion::DISABLED);
    IntervalRef on_device;
    uint64_t recorded = 0;
    if (log) {
      const uint64_t entered = now();
      thread = &this_thread();
      try {
        event = issue(log, *thread, *stack, entered, gloo, group, device);
        if (event && buffers_in_flight().on()) [[unlikely]] buffers = check_buffers(log, event, *stack, gloo);
        else if (event && gloo && in_place_ && is_open_ended(event)) version = version_of_only_tensor(*stack);
        if (device) on_device = device->begin(KIND_DEVICE_OPERATION, op_, event.record->site, entered, event);
        if (on_device) t_last_operation = {event, op_, device};
      } catch (const py::error_already_set&) {
        throw;  // the job's own
      } catch (const abi::__forced_unwind&) {
        throw;  // the interpreter ends, and with it this thread, which asked for the GIL
      } catch (...) {
        count_error();
      }
      metered = event && Meter::due(*thread);
      if (metered) recorded = now() - entered;
    }
    try {
      handle.redispatchBoxed(keys & below, stack);
    } catch (...) {
      on_device.lose();
      if (event) {
        event.record->returned_after = static_cast<float>(now() - event.record->issued_ns);
        event.complete(STATE_FAILED);
      }
      throw;
    }
    if (!event) return;
    const uint64_t returned = now();
    try {
      follow(*thread, event, *stack, gloo, group, buffers, version, returned, device, on_device);
    } catch (...) {
      count_error();
    }
    if (metered) Meter::add(event.segment, recorded + now() - returned);
  }

 private:
  Event issue(Log* log, Thread& thread, const torch::jit::Stack& stack, uint64_t entered, bool& gloo, Group*& group,
              FollowedDevice*& followed_device) const {
    const c10::IValue* arguments = stack.data() + (stack.size() - arguments_);
    if (group_ < 0) return {};
    Elements in, out;
    in.add(arguments[inputs_]);
    if (outputs_ >= 0) out.add(arguments[outputs_]);
    if (in.meta || out.meta) return {};  // fake tensors: nothing is communicated
    group = group_of(log, thread, unwrap<c10d::ProcessGroup>(arguments[group_]));
    const uint16_t thread_number = thread_id(log, thread);
    uint32_t site = sites().here(log, thread);
    uint8_t flags = 0;
    if (async_ >= 0 && arguments[async_].isBool() && arguments[async_].toBool()) flags |= FLAG_ASYNC;
    const c10::Device device = in.dtype >= 0 ? in.device : out.device;
    if (!device.is_cpu()) [[unlikely]] {
      flags |= FLAG_DEVICE;
      followed_device = followed(device);
    }
    gloo = group->gloo && device.is_cpu();
    if (gloo) flags |= FLAG_COMPLETION;
    if (site == 0 && (site = g_backward_site.load(std::memory_order_relaxed)) != 0) flags |= FLAG_INFERRED_SITE;
    uint32_t label = thread.label;
    if (p2p_ && thread.p2p_labels) {
      thread.p2p_labels--;
      label = t_p2p_labels.front();
      t_p2p_labels.pop_front();
    }
    site = labelled_sites().id(log, thread, site, label);
    int32_t tag = 0;
    if (tag_ >= 0) tag = static_cast<int32_t>(arguments[tag_].toInt());
    else if (const bool differ = in.uneven || out.uneven; differ || input_splits_ >= 0 || output_splits_ >= 0)
      tag = uneven(log, arguments, differ);

    // Counted before the record is touched: a locked operation waits for the stores before it.
    const uint32_t seq = p2p_ ? group->p2ps.fetch_add(1) : group->collectives.fetch_add(1);
    Event event = log->claim();
    if (!event) {
      followed_device = nullptr;
      return event;
    }
    Record* r = event.record;
    r->kind = p2p_ ? KIND_P2P : KIND_COLLECTIVE;
    const int dtype = in.dtype >= 0 ? in.dtype : out.dtype;
    r->dtype = empty_ || dtype < 0 ? NO_CODE : static_cast<uint8_t>(dtype);
    r->reduce_op = reduce_op_ >= 0 ? static_cast<uint8_t>(unwrap<c10d::ReduceOp>(arguments[reduce_op_])->op_) : NO_CODE;
    r->op = op_;
    r->thread = thread_number;
    r->group = group->id;
    r->flags = flags;
    r->waits = 0;
    r->seq = seq;
    r->peer = peer_ >= 0 ? static_cast<int32_t>(arguments[peer_].toInt()) : -1;
    r->tag = tag;
    r->site = site;
    r->step = g_step.load(std::memory_order_relaxed);
    r->issued_ns = entered;
    r->numel = empty_ ? 0 : in.total ? in.total : out.total;
    r->returned_after = r->waited_from = r->waited_for = r->done_after = 0;
    r->state.store(STATE_ISSUED, std::memory_order_release);
    return event;
  }

  // Id of the sizes when they differ between peers or tensors, else 0.
  [[gnu::noinline]] int32_t uneven(Log* log, const c10::IValue* arguments, bool differ) const {
    const auto given = [&](int splits) {
      return splits >= 0 && arguments[splits].isIntList() ? arguments[splits].toIntVector() : std::vector<int64_t>();
    };
    std::vector<int64_t> in = given(input_splits_), out = given(output_splits_);
    for (const auto* splits : {&in, &out})
      for (const int64_t n : *splits) differ |= n != splits->front();
    if (!differ) return 0;
    if (in.empty()) list_counts(arguments[inputs_], in);
    if (out.empty() && outputs_ >= 0) list_counts(arguments[outputs_], out);
    return sizes().id(log, in, out);
  }

  // Say whether the program itself gets a handle that it has to wait for.
  bool is_open_ended(const Event& event) const {
    const Record* r = event.record;
    const bool own = r->site != 0 && r->site < FIRST_LABELLED_SITE && !(r->flags & FLAG_INFERRED_SITE);
    return own && (r->flags & FLAG_ASYNC || async_ < 0);
  }

  // The version of the only tensor that an operation works on in place, which every write through torch moves. Views share
  // it: it tells where that tensor has all of the memory that it stands on; disabled where it does not.
  c10::VariableVersion version_of_only_tensor(const torch::jit::Stack& stack) const {
    const c10::IValue& value = stack[stack.size() - arguments_ + inputs_];
    if (value.isTensorList() && value.toListRef().size() == 1) {
      auto* impl = value.toListRef()[0].toTensor().unsafeGetTensorImpl();
      if (!impl->is_inference() && impl->has_storage() && !impl->has_symbolic_sizes_strides() &&
          impl->unsafe_storage().nbytes() == impl->numel() * impl->itemsize())
        return impl->version_counter();
    }
    return c10::VariableVersion::DISABLED;
  }

  // Report what this operation shares with those in flight; return what it has itself, nothing where nobody has to wait.
  [[gnu::cold]] BuffersInFlight::Operation check_buffers(Log* log, const Event& event, const torch::jit::Stack& stack,
                                                         bool gloo) const {
    const Record* r = event.record;
    BuffersInFlight::Operation operation;
    operation.op = op_;
    operation.group = r->group;
    operation.seq = r->seq;
    operation.site = r->site;
    operation.p2p = p2p_;
    operation.gloo = gloo;
    if (empty_) return operation;
    const c10::IValue* arguments = stack.data() + (stack.size() - arguments_);
    const bool sends_only =
        name_ == "c10d::broadcast_" && r->peer == unwrap<c10d::ProcessGroup>(arguments[group_])->getRank();
    for (int i = 0; i < arguments_; i++)
      if (arguments[i].isTensor() || arguments[i].isList())
        BuffersInFlight::collect(operation, arguments[i], !(read_ >> i & 1) && !sends_only);
    buffers_in_flight().check(log, operation, name_);
    if (!is_open_ended(event)) operation.buffers.clear();
    return operation;
  }

  // After the call returned: arrange to learn when the operation completes.
  void follow(Thread& thread, const Event& event, torch::jit::Stack& stack, bool gloo, Group* group,
              BuffersInFlight::Operation& buffers, const c10::VariableVersion& version, uint64_t returned,
              FollowedDevice* device, IntervalRef& on_device) const {
    Record* r = event.record;
    r->returned_after = static_cast<float>(returned - r->issued_ns);
    r->state.store(STATE_RETURNED, std::memory_order_release);
    c10d::Work* work = returns_ > 0 && stack.back().isObject() ? unwrap<c10d::Work>(stack.back()) : nullptr;
    if (!work) {
      // monitored_barrier returns nothing and is complete; NCCL's synchronous calls return a null Work and are not.
      if (returns_ == 0) {
        group->barriers.fetch_add(1, std::memory_order_relaxed);
        buffers_in_flight().passed(group->id);
        return event.complete(STATE_DONE);
      }
      r->flags |= FLAG_NO_WORK;
    }
    const uint64_t in_flight = work && !t_batch.open ? buffers_in_flight().add(std::move(buffers)) : 0;
    if (on_device) return follow_on_device(thread, event, stack, group, in_flight, work, *device, on_device);
    if (!work || !gloo) {
      event.segment->closed.fetch_add(1, std::memory_order_acq_rel);
      return;
    }
    bool has_future = false;
    if (!p2p_ && futureless_.load(std::memory_order_relaxed) != &typeid(*work)) {
      try {
        if (auto future = work->getFuture()) {
          // Two pointers: a callable of this size needs no memory of its own, which the back end's thread would free.
          // It does not use the value, so that no device or stream need be set for it.
          future->addCallback(
              [r, segment = event.segment](c10::ivalue::Future& completed) {
                if (!g_log.load(std::memory_order_acquire) || !Event::is_ours(segment)) return;
                Event::complete(r, segment, completed.hasError() ? STATE_FAILED : STATE_DONE);
              },
              /*uses_future=*/false);
          has_future = true;
        }
      } catch (const std::exception&) {  // gloo's reduce_scatter has no future: the wait tells
        futureless_.store(&typeid(*work), std::memory_order_relaxed);  // an exception costs more than all the rest
      }
    }
    auto& boxed = const_cast<c10::IValue&>(stack.back().toObjectRef().getSlot(0));
    WatchedWork::replace(thread, boxed, work->retrieveOpType(), event, group, in_flight, version, has_future);
  }

  // Without a handle it runs on the caller's stream. A program that asked for none waits at once, and its stream with it.
  void follow_on_device(Thread& thread, const Event& event, torch::jit::Stack& stack, Group* group, uint64_t in_flight,
                        c10d::Work* work, FollowedDevice& device, IntervalRef& on_device) const {
    Record* r = event.record;
    r->flags |= FLAG_FOLLOWED;
    if (t_batch.open) {
      t_batch.parts.push_back({{event, op_, &device}, on_device, receives_});
      return;
    }
    if (!work) {
      device.end(on_device, DEVICE_FLAG_ON_STREAM);
      event.segment->closed.fetch_add(1, std::memory_order_acq_rel);
      return;
    }
    IntervalRef whole;  // what the first wait ends
    if (r->flags & FLAG_ASYNC || async_ < 0)
      device.end_with(on_device, c10::intrusive_ptr<c10d::Work>::reclaim_copy(work));
    else
      whole = std::exchange(on_device, {});
    auto& boxed = const_cast<c10::IValue&>(stack.back().toObjectRef().getSlot(0));
    WatchedWork::replace(thread, boxed, work->retrieveOpType(), event, group, in_flight,
                         c10::VariableVersion(c10::VariableVersion::DISABLED), op_, device, whole);
  }

  const uint16_t op_;
  const int arguments_, returns_;
  const bool p2p_, receives_, in_place_;
  const std::string name_;
  const bool empty_;
  uint64_t read_ = 0;  // arguments that are only read, a bit each
  int group_ = -1, reduce_op_ = -1, peer_ = -1, tag_ = -1, async_ = -1;
  int inputs_ = -1, outputs_ = -1, input_splits_ = -1, output_splits_ = -1;
  mutable std::atomic<const std::type_info*> futureless_{nullptr};  // works of this class have no future
};

}  // namespace
}  // namespace dtprof
