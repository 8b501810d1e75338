// Streams: FIFO queues with a thread and a virtual clock each; marks on them; how the host waits for them.
//
// Real queues, because data must really be late and a collective that nobody joins must really block what is queued
// behind it. A virtual clock, because injected costs must come out exactly on a loaded machine of two cores.
#pragma once

#include <c10/core/Stream.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "settings.h"

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;
constexpr int kPoolStreams = 32;                     // of each of two priorities
constexpr int kMaxStreams = 1 + 2 * kPoolStreams;    // and the default stream

// One recording of an event. Once ready it has the time at which the stream reached it.
class Mark {
 public:
  void complete(ns stamp) {
    stamp_ = stamp;
    ahead_ = ns(settings().clock_ahead_ns.load(std::memory_order_relaxed));
    set(kReady);
  }
  bool ready() const { return state_.load(std::memory_order_acquire) == kReady; }
  void wait() const {
    while (!ready()) state_.wait(state_.load(), std::memory_order_acquire);
  }
  void wait_on_host() const;  // or until the device has failed
  ns stamp() const { return stamp_; }
  ns shown() const { return stamp_ + ahead_; }  // by the clock of the device, which a test may let jump

 private:
  enum State { kOpen, kReady, kFailed };
  void set(State state) const {
    // Not a mere release: libstdc++ then looks whether any thread waits before the others see the new state, misses one
    // that is about to, and does not wake it.
    state_.store(state, std::memory_order_seq_cst);
    state_.notify_all();
  }
  mutable std::atomic<int> state_{kOpen};
  ns stamp_ = 0, ahead_ = 0;
  friend void fail_device(const std::string& what);
};
using MarkPtr = std::shared_ptr<Mark>;

// Each recording makes a new mark: who waits, waits for the latest recording at that time, as on CUDA.
class Event {
 public:
  explicit Event(bool timing, MarkPtr recorded = nullptr) : timing(timing), latest_(std::move(recorded)) {}
  MarkPtr record() {
    auto made = std::make_shared<Mark>();
    const std::lock_guard<std::mutex> hold(mutex_);
    latest_ = made;
    return made;
  }
  MarkPtr latest() {
    const std::lock_guard<std::mutex> hold(mutex_);
    return latest_;
  }
  const bool timing;

 private:
  std::mutex mutex_;
  MarkPtr latest_;
};

// What stands behind a c10::Stream. Tasks run on its thread, one after the other, and advance `clock`.
class Queue {
 public:
  using Task = std::function<void(Queue&)>;
  Queue(int device, int id) : device(device), id(id) {}

  void push(Task task);
  MarkPtr mark();
  void mark(const MarkPtr& mark);
  void wait_for(const MarkPtr& mark);  // the stream waits, the host does not
  bool query() const;                  // all that was enqueued is done
  bool used() const { return pushed_ != 0; }

  // For tasks. The device gets to this point no earlier than its clock says; it is late where CPU kernels took longer
  // than they cost.
  void reach();
  ns task_enqueued() const { return task_enqueued_; }

  const int device, id;
  std::atomic<ns> clock{0};
  std::atomic<bool> capturing{false};  // a graph: events must not be recorded

 private:
  struct Entry {
    Task task;
    ns enqueued;
  };
  void run();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Entry> entries_;
  bool started_ = false, idle_ = false;
  std::atomic<int64_t> pushed_{0}, done_{0};
  ns task_enqueued_ = 0;
};

Queue& queue_of(c10::DeviceIndex device, c10::StreamId id);
inline Queue& queue_of(const c10::Stream& stream) { return queue_of(stream.device_index(), stream.id()); }

// Of the calling thread.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
void set_current_stream(c10::Stream stream);
c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream stream_from_pool(c10::DeviceIndex device, bool high_priority);
inline Queue& current_queue(c10::DeviceIndex device) { return queue_of(current_stream(device)); }

// The host waits for the device: named and exported as a driver's functions are, to be found in native stacks.
#define SIM_EXPORTED extern "C" __attribute__((visibility("default"), noinline))
SIM_EXPORTED void simStreamSynchronize(Queue* queue);
SIM_EXPORTED void simDeviceSynchronize(int device);
SIM_EXPORTED void simEventSynchronize(const Mark* mark);

// The process and the device.
int device_count();
void set_device_count(int count);
bool initialized();
bool in_forked_child();     // of a process that had initialised the device
void ensure_initialized();  // throws in such a child
void park_streams();        // at exit: no further task is begun
void report_error(const std::string& what);  // what the device finds wrong, raised where the host next waits for it
void fail_device(const std::string& what);   // the same for good: whoever waits for the device is told, and has no end
void lose_device(const std::string& what);   // it has fallen off the bus: whatever is asked of it raises this
void raise_error();
void raise_if_lost();

// Faults: tasks that never end, until all that were enqueued by then are released.
uint64_t num_releases();
void wait_for_release(uint64_t since);
void release_all();

}  // namespace sim
