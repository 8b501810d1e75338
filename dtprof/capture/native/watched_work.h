// The Work handle that operations of gloo and on devices return to the program: times every wait, on devices those of
// the stream, and completes records whose back end offers no future.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "buffers_in_flight.h"
#include "device_time.h"
#include "process_groups.h"
#include "thread_state.h"

namespace dtprof {
namespace {

// The place of a handle that is gone, for one to come in this thread: the general allocator is a good part of a launch.
// A thread that only destroys handles keeps so many places, and gives all others back.
struct Spare {
  Spare* next;
};
constexpr uint16_t kMostSpares = 256;

// Gives them back when the thread ends.
struct SparesOfThread {
  Thread* thread = nullptr;
  ~SparesOfThread() {
    while (Spare* spare = thread->spares) {
      thread->spares = spare->next;
      ::operator delete(spare);
    }
    thread->num_spares = kMostSpares;  // handles that are destroyed later still leave none
  }
};
thread_local SparesOfThread t_spares;

// Times every wait, from Python or C++, and completes events whose back end has no future (gloo's send, receive and
// reduce_scatter). Everything else is the back end's own Work.
struct WatchedWork final : c10d::Work {
  WatchedWork(c10d::OpType type, const Event& event, bool has_future)
      : c10d::Work(-1, type), event_(event), has_future_(has_future) {}
  WatchedWork(c10d::OpType type, const Event& event, uint16_t op, FollowedDevice& device, const IntervalRef& whole)
      : c10d::Work(-1, type), event_(event), has_future_(true), op_(op), device_(&device), whole_(whole) {}

  // Take the place of the work in its box, which was made for this call by the kernel below.
  template <class... Rest>
  static void replace(Thread& thread, c10::IValue& boxed, c10d::OpType type, const Event& event, Group* group,
                      uint64_t in_flight, const c10::VariableVersion& version, Rest&&... rest) {
    auto watched = c10::intrusive_ptr<WatchedWork>::unsafe_steal_from_new(
        new (thread) WatchedWork(type, event, std::forward<Rest>(rest)...));
    watched->work_ = c10::static_intrusive_pointer_cast<c10d::Work>(std::move(boxed).toCapsule());
    watched->group_ = group;
    watched->in_flight_ = in_flight;
    if (version.enabled()) watched->remember(version);
    boxed = c10::IValue::make_capsule(std::move(watched));
  }

  // Return a handle for operations that the back end has joined, of which this is one.
  static c10::intrusive_ptr<c10d::Work> watch(Thread& thread, c10::intrusive_ptr<c10d::Work> work,
                                              const DeviceOperation& operation) {
    auto watched = c10::intrusive_ptr<WatchedWork>::unsafe_steal_from_new(new (thread) WatchedWork(
        work->retrieveOpType(), operation.event, operation.op, *operation.device, IntervalRef{}));
    watched->work_ = std::move(work);
    return watched;
  }

  static void* operator new(size_t size, Thread& thread) {
    Spare* spare = thread.spares;
    if (!spare) return ::operator new(size);
    thread.spares = spare->next;
    thread.num_spares--;
    return spare;
  }
  static void operator delete(void* place, Thread&) { operator delete(place); }
  static void operator delete(void* place) {
    Thread& thread = this_thread();
    if (thread.num_spares >= kMostSpares) return ::operator delete(place);
    if (!thread.spares) t_spares.thread = &thread;
    thread.spares = new (place) Spare{thread.spares};
    thread.num_spares++;
  }

  ~WatchedWork() override {
    buffers_in_flight().dropped(in_flight_);
    if (device_) {
      whole_.lose();
      if (recording()) event_.segment->closed.fetch_add(1, std::memory_order_acq_rel);
      return;
    }
    if (has_future_ || !recording()) return;
    bool completed = false, succeeded = false;
    try {
      completed = work_->isCompleted();
      succeeded = completed && work_->isSuccess();
    } catch (...) {
    }
    if (completed) event_.complete(succeeded ? STATE_DONE : STATE_FAILED);
    else if (event_.record->state.load(std::memory_order_acquire) < STATE_DONE)
      event_.segment->closed.fetch_add(1, std::memory_order_acq_rel);
  }

  bool wait(std::chrono::milliseconds timeout) override {
    if (!recording()) return work_->wait(timeout);
    const uint64_t from = now();
    Record* r = event_.record;
    const std::atomic_ref waits(r->waits);  // two threads may wait for one operation
    const uint8_t before = waits.load(std::memory_order_relaxed);
    if (before == 0) std::atomic_ref(r->waited_from).store(static_cast<float>(from - r->issued_ns), std::memory_order_relaxed);
    if (before < 255) waits.store(before + 1, std::memory_order_relaxed);
    if (is_written_to()) [[unlikely]] report_write();
    StreamWait on_device(*this);
    try {
      const bool ok = work_->wait(timeout);
      waited(from, STATE_DONE);
      if (ok) known_complete();
      return ok;
    } catch (...) {
      waited(from, STATE_FAILED);
      throw;
    }
  }
  bool isCompleted() override {
    asked();
    const bool completed = work_->isCompleted();
    if (completed) known_complete();
    if (completed && !has_future_ && recording()) event_.complete(work_->isSuccess() ? STATE_DONE : STATE_FAILED);
    return completed;
  }
  bool isSuccess() const override {
    asked();
    return work_->isSuccess();
  }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override {
    asked();
    known_complete();
    return work_->result();
  }
  void synchronize() override {
    asked();
    StreamWait on_device(*this);
    work_->synchronize();
    known_complete();
  }
  // Overrides the function of c10d::Work where this torch has it.
  void blockCurrentStream() {
    asked();
    StreamWait on_device(*this);
    block_stream(*work_);
    known_complete();
  }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    asked();
    known_complete();  // by what follows from the future
    return work_->getFuture();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    asked();
    known_complete();  // by what follows from the future
    return work_->getFutureResult();
  }
  float getDuration() const override { return work_->getDuration(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }

 private:
  // The wait of a device's stream, marked before and behind it; of what the program waits for at once, its end as well.
  class StreamWait {
   public:
    explicit StreamWait(WatchedWork& work) : work_(work) {
      if (!work_.device_ || work_.whole_ || !work_.recording()) return;
      try {
        const Record* r = work_.event_.record;
        wait_ = work_.device_->begin(KIND_DEVICE_WAIT, work_.op_, r->site, now(), work_.event_);
      } catch (...) {
      }
    }
    ~StreamWait() {
      if (!work_.device_) return;
      try {
        work_.device_->end(wait_);
        work_.device_->end(work_.whole_, DEVICE_FLAG_ON_STREAM);
      } catch (...) {
      }
    }

   private:
    WatchedWork& work_;
    IntervalRef wait_;
  };

  template <class W>  // a template, so that what this torch lacks is not compiled
  static void block_stream(W& work) {
    if constexpr (requires { work.blockCurrentStream(); }) work.blockCurrentStream();
  }

  bool recording() const { return g_log.load(std::memory_order_acquire) && event_.current(); }
  void asked() const {
    if (recording()) std::atomic_ref(event_.record->flags).fetch_or(FLAG_ASKED, std::memory_order_relaxed);
  }
  // The program knows, or will, that the operation is complete.
  void known_complete() {
    if (group_ && opType_ == c10d::OpType::BARRIER) {
      group_->barriers.fetch_add(1, std::memory_order_relaxed);
      buffers_in_flight().passed(group_->id);
    }
    buffers_in_flight().waited(in_flight_);
  }

  void remember(const c10::VariableVersion& version) {
    version_ = version;
    version_at_issue_ = version.current_version();
    barriers_at_issue_ = group_->barriers.load(std::memory_order_relaxed);
  }
  bool is_written_to() const {
    return version_.enabled() && version_.current_version() != version_at_issue_ && !buffers_in_flight().on() &&
           group_->barriers.load(std::memory_order_relaxed) == barriers_at_issue_ &&
           !(std::atomic_ref(event_.record->flags).load(std::memory_order_relaxed) & FLAG_ASKED) &&
           event_.record->waits <= 1;
  }
  [[gnu::cold]] void report_write() const {
    try {
      const Record* r = event_.record;
      BuffersInFlight::Operation operation;
      operation.op = r->op;
      operation.group = r->group;
      operation.seq = r->seq;
      operation.site = r->site;
      if (Log* log = g_log.load(std::memory_order_acquire)) buffers_in_flight().written_before(log, operation);
    } catch (...) {
    }
  }

  void waited(uint64_t from, uint8_t state) {
    if (!recording()) return;
    const uint64_t at = now();
    std::atomic_ref(event_.record->waited_for).fetch_add(static_cast<float>(at - from), std::memory_order_relaxed);
    if (!device_) event_.complete(state, at);  // else the host has gone on, and the device has not come to it yet
  }

  c10::intrusive_ptr<c10d::Work> work_;
  Event event_;
  bool has_future_;
  uint16_t op_ = 0;
  uint32_t version_at_issue_ = 0, barriers_at_issue_ = 0;
  Group* group_ = nullptr;
  uint64_t in_flight_ = 0;  // its number there, 0 for none
  c10::VariableVersion version_{c10::VariableVersion::DISABLED};
  FollowedDevice* device_ = nullptr;  // of operations there
  IntervalRef whole_;                 // of an operation that the program waits for at once: not ended yet
};

// Operations that this thread issues between the begin and the end of a batch: the back end starts them at the end.
struct Batch {
  struct Part {
    DeviceOperation operation;
    IntervalRef interval;
    bool receives = false;
  };
  bool open = false;
  std::vector<Part> parts;

  void begin() {
    for (Part& part : parts) {  // of one that an exception has left
      part.interval.lose();
      close(part);
    }
    parts.clear();
    open = true;
  }
  // Return the handle that the program gets: it waits for what it receives, if it receives anything.
  c10::intrusive_ptr<c10d::Work> end(c10::intrusive_ptr<c10d::Work> work) {
    open = false;
    const Part* waited = nullptr;
    for (Part& part : parts) {
      if (work && (!waited || part.receives || !waited->receives)) waited = &part;
      if (work) part.operation.device->end_with(part.interval, work, DEVICE_FLAG_SEVERAL);
      else part.operation.device->end(part.interval, DEVICE_FLAG_SEVERAL | DEVICE_FLAG_ON_STREAM);
    }
    for (const Part& part : parts)
      if (&part != waited) close(part);
    if (waited) work = WatchedWork::watch(this_thread(), std::move(work), waited->operation);
    parts.clear();
    return work;
  }

 private:
  // Nothing more is written to its record.
  static void close(const Part& part) {
    const Event& event = part.operation.event;
    if (event.current()) event.segment->closed.fetch_add(1, std::memory_order_acq_rel);
  }
};
thread_local Batch t_batch;

}  // namespace
}  // namespace dtprof
