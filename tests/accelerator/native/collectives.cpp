// A collective is a task of a stream. The task joins its peers over gloo, which carries the data and the members' start
// stamps; it ends at the latest start plus the cost of the transfer, as an NCCL kernel spins until all have started.
#include "collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "../../../dtprof/capture/native/kernel_events.h"
#include "memory.h"

namespace sim {
namespace {

using at::Tensor;
using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Works = std::vector<WorkPtr>;

std::atomic<int64_t> collectives_until_stall{INT64_MAX};

// ---- the handle that the program gets

struct SimWork final : c10d::Work {
  SimWork(int rank, OpType type, c10::Stream stream, uint64_t seq, std::vector<Tensor> outputs)
      : Work(rank, type), stream(stream), seq(seq), outputs(std::move(outputs)) {}
  const c10::Stream stream;
  const uint64_t seq;
  const std::vector<Tensor> outputs;
  const MarkPtr start = std::make_shared<Mark>(), end = std::make_shared<Mark>();
  c10::intrusive_ptr<c10::ivalue::Future> future;

  bool isCompleted() override { return end->ready(); }
  bool isSuccess() const override { return end->ready(); }
  void synchronize() override {  // stalls the current stream, never the host
    const auto current = current_stream(stream.device_index());
    if (current != stream) queue_of(current).wait_for(end);
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (retrieveOpType() == OpType::BARRIER) simStreamSynchronize(&current_queue(stream.device_index()));
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  std::vector<Tensor> result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  float getDuration() const override {
    TORCH_CHECK(end->ready(), "getDuration: the work is not completed");
    return float(double(end->stamp() - start->stamp()) * 1e-6);
  }
  uint64_t getSequencenumber() const override { return seq; }
};

// ---- reductions that gloo lacks: averages and products with a factor, as FSDP2 asks for, around a sum

c10d::ReduceOp carried(const c10d::ReduceOp& op) {
  const bool lacking = op.op_ == c10d::ReduceOp::AVG || op.op_ == c10d::ReduceOp::PREMUL_SUM;
  return lacking ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
}
void scale_before(const Tensor& t, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return;
  const auto& factor = *static_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
  if (!factor.tensor_factor.defined()) t.mul_(factor.double_factor);
  else t.mul_(on_sim(factor.tensor_factor) ? cpu_alias(factor.tensor_factor) : factor.tensor_factor);
}
void scale_after(const Tensor& t, const c10d::ReduceOp& op, int size) {
  if (op.op_ == c10d::ReduceOp::AVG) t.div_(size);
}

WorkPtr carry_sum(c10d::Backend& carrier, const Tensor& t, const c10d::ReduceOp& op) {
  scale_before(t, op);
  std::vector<Tensor> list{t};
  c10d::AllreduceOptions options;
  options.reduceOp = carried(op);
  return carrier.allreduce(list, options);
}

Tensor flat(const Tensor& t) {
  TORCH_CHECK(on_sim(t), "simccl: tensors must be on the device sim");
  TORCH_CHECK(t.is_non_overlapping_and_dense(), "simccl: tensors must be dense");
  const Tensor made = flat_cpu_alias(t);
  return made.scalar_type() == at::kBool ? made.view(at::kByte) : made;
}

std::vector<std::vector<Tensor>> flat_lists(const std::vector<std::vector<Tensor>>& lists) {  // the root's, or none
  std::vector<std::vector<Tensor>> made;
  for (const auto& list : lists) {
    made.emplace_back();
    for (const auto& t : list) made.back().push_back(flat(t));
  }
  return made;
}

// What a collective moves: one part an operation; a coalesced group has several.
struct Part {
  std::function<void(Works&, ns start)> begin;  // starts gloo's operations
  std::function<ns()> finish;                   // after all of them; the latest start that it learned of, or 0
  int64_t bytes = 0;
};
ns nothing_left() { return 0; }

class SimBackend final : public c10d::Backend {
 public:
  SimBackend(int rank, int size, c10::intrusive_ptr<c10d::Backend> carrier)
      : Backend(rank, size), carrier_(std::move(carrier)) {}
  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<Options>("simccl"); }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds) override {}
  void shutdown() override {  // destroying a group waits for what it has issued, as NCCL's does
    std::vector<MarkPtr> ends;
    {
      const std::lock_guard<std::mutex> hold(issue_);
      ends.assign(unfinished_.begin(), unfinished_.end());
    }
    for (const auto& end : ends) simEventSynchronize(end.get());
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return seq_; }

  void startCoalescing() override { coalescing_ = true; }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    auto parts = std::exchange(coalesced_parts_, {});
    auto outputs = std::exchange(coalesced_outputs_, {});
    const bool messages = std::exchange(coalesced_messages_, false);
    return issue(messages ? OpType::COALESCED : coalesced_type_, std::move(outputs), std::move(parts),
                 {.async = true, .messages = messages});
  }

  WorkPtr allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    TORCH_CHECK(tensors.size() == 1, "simccl: one tensor per call");
    return issue(OpType::ALLREDUCE, tensors, {all_reduce(tensors[0], options.reduceOp)}, {.async = options.asyncOp});
  }
  WorkPtr allreduce_coalesced(std::vector<Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<Part> parts;
    for (auto& t : tensors) parts.push_back(all_reduce(t, options.reduceOp));
    return issue(OpType::ALLREDUCE_COALESCED, tensors, std::move(parts), {.async = options.asyncOp});
  }
  WorkPtr broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    c10d::BroadcastOptions gloo;
    gloo.rootRank = options.rootRank;
    const auto begin = [carrier = carrier_, gloo, t = flat(tensors.at(0))](Works& works, ns) {
      std::vector<Tensor> list{t};
      works.push_back(carrier->broadcast(list, gloo));
    };
    return issue(OpType::BROADCAST, tensors, {{begin, nothing_left, int64_t(tensors[0].nbytes())}},
                 {.async = options.asyncOp});
  }
  WorkPtr reduce(std::vector<Tensor>& tensors, const c10d::ReduceOptions& options) override {
    const Tensor t = flat(tensors.at(0));
    const auto sum = std::make_shared<Tensor>();  // only the root's tensor may change
    const auto begin = [=, carrier = carrier_, op = options.reduceOp](Works& works, ns) {
      *sum = t.clone();
      works.push_back(carry_sum(*carrier, *sum, op));
    };
    const auto finish = [=, size = size_, op = options.reduceOp, is_root = options.rootRank == rank_]() -> ns {
      scale_after(*sum, op, size);
      if (is_root) t.copy_(*sum);
      return 0;
    };
    return issue(OpType::REDUCE, tensors, {{begin, finish, int64_t(tensors[0].nbytes())}}, {.async = options.asyncOp});
  }
  WorkPtr allgather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                    const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1, "simccl: one tensor per call");
    std::vector<Tensor> to;
    for (auto& t : outputs[0]) to.push_back(flat(t));
    return issue(OpType::ALLGATHER, outputs[0], {all_gather(std::move(to), inputs[0])}, {.async = options.asyncOp});
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return issue(OpType::_ALLGATHER_BASE, {output}, {all_gather_into(output, input)}, {.async = options.asyncOp});
  }
  WorkPtr allgather_into_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                          const c10d::AllgatherOptions& options) override {
    std::vector<Part> parts;
    for (size_t i = 0; i < outputs.size(); i++) parts.push_back(all_gather_into(outputs[i], inputs[i]));
    return issue(OpType::COALESCED, outputs, std::move(parts), {.async = options.asyncOp});
  }
  WorkPtr reduce_scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    std::vector<Tensor> flattened;
    for (auto& t : inputs.at(0)) flattened.push_back(t.reshape({-1}));
    return issue(OpType::REDUCE_SCATTER, outputs, {reduce_scatter(outputs.at(0), at::cat(flattened), options.reduceOp)},
                 {.async = options.asyncOp});
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return issue(OpType::_REDUCE_SCATTER_BASE, {output}, {reduce_scatter(output, input, options.reduceOp)},
                 {.async = options.asyncOp});
  }
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    std::vector<Part> parts;
    for (size_t i = 0; i < outputs.size(); i++)
      parts.push_back(reduce_scatter(outputs[i], inputs[i], options.reduceOp));
    return issue(OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs, std::move(parts), {.async = options.asyncOp});
  }
  WorkPtr scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
                  const c10d::ScatterOptions& options) override {
    c10d::ScatterOptions gloo;
    gloo.rootRank = options.rootRank;
    const auto begin = [carrier = carrier_, gloo, to = flat(outputs.at(0)), from = flat_lists(inputs)](Works& works,
                                                                                                      ns) mutable {
      std::vector<Tensor> list{to};
      works.push_back(carrier->scatter(list, from, gloo));
    };
    return issue(OpType::SCATTER, outputs, {{begin, nothing_left, int64_t(outputs[0].nbytes()) * size_}},
                 {.async = options.asyncOp});
  }
  WorkPtr gather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                 const c10d::GatherOptions& options) override {
    c10d::GatherOptions gloo;
    gloo.rootRank = options.rootRank;
    const auto begin = [carrier = carrier_, gloo, to = flat_lists(outputs), from = flat(inputs.at(0))](Works& works,
                                                                                                      ns) mutable {
      std::vector<Tensor> list{from};
      works.push_back(carrier->gather(to, list, gloo));
    };
    return issue(OpType::GATHER, outputs.empty() ? inputs : outputs[0],
                 {{begin, nothing_left, int64_t(inputs[0].nbytes()) * size_}}, {.async = options.asyncOp});
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    const auto begin = [carrier = carrier_, to = cpu_alias(output), from = cpu_alias(input), output_sizes,
                        input_sizes](Works& works, ns) mutable {
      works.push_back(carrier->alltoall_base(to, from, output_sizes, input_sizes));
    };
    return issue(OpType::ALLTOALL_BASE, {output}, {{begin, nothing_left, int64_t(input.nbytes())}},
                 {.async = options.asyncOp});
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return issue(OpType::BARRIER, {}, {}, {.async = options.asyncOp});
  }
  WorkPtr send(std::vector<Tensor>& tensors, int to, int tag) override { return message(OpType::SEND, tensors, to, tag); }
  WorkPtr recv(std::vector<Tensor>& tensors, int from, int tag) override {
    return message(OpType::RECV, tensors, from, tag);
  }

 private:
  // ---- parts: they hold what they need, for they may run after the group is gone

  Part all_reduce(const Tensor& tensor, const c10d::ReduceOp& op) {
    const Tensor t = flat(tensor);
    return {[=, carrier = carrier_](Works& works, ns) { works.push_back(carry_sum(*carrier, t, op)); },
            [=, size = size_]() -> ns {
              scale_after(t, op, size);
              return 0;
            },
            int64_t(tensor.nbytes())};
  }
  Part all_gather(std::vector<Tensor> outputs, const Tensor& input) {
    int64_t bytes = 0;
    for (auto& t : outputs) bytes += int64_t(t.nbytes());
    const auto to = std::make_shared<std::vector<std::vector<Tensor>>>(1, std::move(outputs));
    const auto from = std::make_shared<std::vector<Tensor>>(1);
    const auto begin = [=, carrier = carrier_, t = flat(input)](Works& works, ns) {
      (*from)[0] = t.clone();  // the input may be a slice of the output
      works.push_back(carrier->allgather(*to, *from));
    };
    return {begin, nothing_left, bytes};
  }
  Part all_gather_into(const Tensor& output, const Tensor& input) {
    TORCH_CHECK(output.numel() == input.numel() * size_, "simccl: all_gather: output has the wrong size");
    return all_gather(flat(output).chunk(size_), input);
  }
  Part reduce_scatter(const Tensor& output, const Tensor& input, const c10d::ReduceOp& op) {
    TORCH_CHECK(input.numel() == output.numel() * size_, "simccl: reduce_scatter: input has the wrong size");
    const Tensor to = flat(output), from = flat(input);
    const auto sum = std::make_shared<Tensor>();
    return {[=, carrier = carrier_](Works& works, ns) {
              *sum = from.clone();
              works.push_back(carry_sum(*carrier, *sum, op));
            },
            [=, rank = rank_, size = size_]() -> ns {
              const Tensor mine = sum->narrow(0, rank * to.numel(), to.numel());
              scale_after(mine, op, size);
              to.copy_(mine);
              return 0;
            },
            int64_t(input.nbytes())};
  }
  // A message, and the start stamps of sender and receiver in either direction. Messages of batches match among
  // themselves, as NCCL has a communicator of their own for pairs.
  WorkPtr message(OpType type, std::vector<Tensor>& tensors, int peer, int tag) {
    const bool sends = type == OpType::SEND;
    const int first_tag = (tag * 2 + coalescing_) * 4;
    const auto mine = std::make_shared<std::vector<Tensor>>(1);
    const auto theirs = std::make_shared<std::vector<Tensor>>(1, at::zeros({1}, at::kLong));
    const auto begin = [=, carrier = carrier_, t = flat(tensors.at(0))](Works& works, ns start) {
      std::vector<Tensor> list{t};
      (*mine)[0] = at::full({1}, start, at::kLong);
      works.push_back(sends ? carrier->send(list, peer, first_tag) : carrier->recv(list, peer, first_tag));
      works.push_back(carrier->send(*mine, peer, first_tag + (sends ? 1 : 2)));
      works.push_back(carrier->recv(*theirs, peer, first_tag + (sends ? 2 : 1)));
    };
    const auto finish = [theirs]() -> ns { return (*theirs)[0].item<int64_t>(); };
    return issue(type, tensors, {{begin, finish, int64_t(tensors[0].nbytes())}},
                 {.async = true, .messages = true, .peer = peer});
  }

  // ---- issuing

  struct How {
    bool async = false;
    bool messages = false;
    int peer = -1;  // of a single message
  };

  WorkPtr issue(OpType type, std::vector<Tensor> outputs, std::vector<Part> parts, How how) {
    if (coalescing_) return coalesce(type, std::move(outputs), std::move(parts), how);
    const std::lock_guard<std::mutex> hold(issue_);  // the main thread and autograd's both issue
    const auto device = outputs.empty() ? current_device() : outputs[0].device().index();
    const auto current = current_stream(device);
    const bool stays = !how.async && settings().sync_on_current != 0;
    const auto stream = stays ? current : own_stream(device, how.peer);
    if (stream != current) queue_of(stream).wait_for(queue_of(current).mark());  // behind the kernels of the inputs
    auto work = c10::make_intrusive<SimWork>(rank_, type, stream, ++seq_, outputs);
    counters().collectives++;
    while (!unfinished_.empty() && unfinished_.front()->ready()) unfinished_.pop_front();
    unfinished_.push_back(work->end);

    auto task = std::make_shared<Task>();
    task->name = "simccl::" + c10d::opTypeToString(type);
    for (auto& part : parts) task->bytes += part.bytes;
    task->cost = settings().transfer_cost(task->name, task->bytes);
    task->parts = std::move(parts);
    task->start = work->start;
    task->end = work->end;
    task->seq = int64_t(work->seq);
    task->carrier = carrier_;
    if (!how.messages) task->turn = turns_->take();
    task->turns = turns_;
    task->never_ends = collectives_until_stall-- <= 0;
    task->release = num_releases();
    queue_of(stream).push([task](Queue& queue) { task->run(queue); });

    const c10::StreamGuard on_stream(stream);  // where callbacks of the future run
    work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                            std::vector<c10::Device>{c10::Device(kSim, device)});
    work->future->markCompleted(c10::IValue(std::move(outputs)));  // at once, as NCCL's
    return work;
  }

  WorkPtr coalesce(OpType type, std::vector<Tensor> outputs, std::vector<Part> parts, How how) {
    for (auto& part : parts) coalesced_parts_.push_back(std::move(part));
    for (auto& t : outputs) coalesced_outputs_.push_back(t);
    coalesced_messages_ |= how.messages;
    coalesced_type_ = type;
    auto work = c10::make_intrusive<SimWork>(rank_, type, current_stream(current_device()), seq_, std::move(outputs));
    work->start->complete(now());
    work->end->complete(now());
    return work;
  }

  // As NCCL: one stream for collectives and batches, one for the single messages of each peer.
  c10::Stream own_stream(c10::DeviceIndex device, int peer) {
    const auto key = std::make_pair(device, peer);
    auto found = streams_.find(key);
    if (found == streams_.end()) found = streams_.emplace(key, stream_from_pool(device, true)).first;
    return found->second;
  }

  // Gloo pairs collectives by the order of its calls, so streams call it in the order in which the host issued.
  class Turns {
   public:
    int64_t take() { return taken_++; }
    template <class F>
    void in_turn(int64_t turn, F&& call) {
      std::unique_lock<std::mutex> hold(mutex_);
      changed_.wait(hold, [&] { return next_ == turn; });
      call();
      next_++;
      changed_.notify_all();
    }

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int64_t taken_ = 0, next_ = 0;
  };

  struct Task {
    std::string name;
    int64_t seq, bytes = 0, turn = -1;
    ns cost;
    std::vector<Part> parts;
    MarkPtr start, end;
    c10::intrusive_ptr<c10d::Backend> carrier;
    std::shared_ptr<Turns> turns;
    bool never_ends;
    uint64_t release;

    void run(Queue& queue) {
      queue.reach();
      const ns began = queue.clock;
      start->complete(began);
      ns met = began;
      try {
        met = std::max(began, join(began));
      } catch (const std::exception& error) {
        fail_device(name + ": " + error.what());
        wait_for_release(num_releases());  // as a kernel of a communicator that is not aborted
      }
      if (never_ends) {
        wait_for_release(release);
        met = std::max(met, now());
      }
      queue.clock = met + cost;
      queue.reach();
      trace({name, queue.id, seq, queue.task_enqueued(), began, met, queue.clock});
      end->complete(queue.clock);
    }

    // Move the data; returns the latest start of all members.
    ns join(ns began) {
      std::vector<Tensor> latest{at::full({1}, began, at::kLong)};
      Works works;
      const auto begin = [&] {
        for (auto& part : parts) part.begin(works, began);
      };
      if (turn < 0) {
        begin();
      } else {
        turns->in_turn(turn, [&] {
          c10d::AllreduceOptions options;
          options.reduceOp = c10d::ReduceOp::MAX;
          works.push_back(carrier->allreduce(latest, options));
          begin();
        });
      }
      for (auto& work : works) work->wait();
      ns met = latest[0].item<int64_t>();
      for (auto& part : parts) met = std::max(met, part.finish());
      return met;
    }
  };

  const c10::intrusive_ptr<c10d::Backend> carrier_;
  const std::shared_ptr<Turns> turns_ = std::make_shared<Turns>();
  std::mutex issue_;
  std::deque<MarkPtr> unfinished_;  // ends of works, the oldest first
  std::map<std::pair<c10::DeviceIndex, int>, c10::Stream> streams_;
  std::atomic<uint64_t> seq_{0};
  bool coalescing_ = false, coalesced_messages_ = false;
  OpType coalesced_type_ = OpType::COALESCED;
  std::vector<Part> coalesced_parts_;
  std::vector<Tensor> coalesced_outputs_;
};

// DDP's logger takes its times from a timer of the device's type.
struct SimTimer final : c10d::Timer {
  explicit SimTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(int rank, int size, c10::intrusive_ptr<c10d::Backend> carrier) {
  return c10::make_intrusive<SimBackend>(rank, size, std::move(carrier));
}

void stall_network(int64_t after) { collectives_until_stall = after; }

}  // namespace sim

// What dtprof's library for NCCL finds in NCCL's handles: the events around the kernel, on the stream that it runs on.
extern "C" __attribute__((visibility("default"))) bool dtprof_find_kernel_events(c10d::Work* work,
                                                                                 dtprof::KernelEvents* found) {
  auto* issued = dynamic_cast<sim::SimWork*>(work);
  if (!issued) return false;
  auto events = std::make_shared<std::pair<sim::Event, sim::Event>>(
      std::piecewise_construct, std::forward_as_tuple(true, issued->start), std::forward_as_tuple(true, issued->end));
  found->begin = &events->first;
  found->end = &events->second;
  found->keep = std::move(events);
  return true;
}

// The macro works inside of this namespace alone.
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::PrivateUse1, sim::SimTimer)
}
