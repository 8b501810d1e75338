#include "streams.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <Python.h>
#include <pthread.h>
#include <sys/prctl.h>

#include <set>
#include <thread>

namespace sim {
namespace {

struct Process {
  std::atomic<bool> initialized{false}, forked{false}, exiting{false};
  std::atomic<int> device_count{4};
  std::mutex mutex;
  std::string error;
  std::atomic<bool> has_error{false}, has_failed{false}, is_lost{false};
  std::set<const Mark*> awaited_by_hosts;
  std::atomic<uint64_t> releases{0};
};
Process& process() {
  static Process* const p = new Process;
  return *p;
}

struct AllQueues {
  std::atomic<Queue*> queues[kMaxDevices][kMaxStreams] = {};
  std::atomic<unsigned> next_of_pool[2] = {};
  std::mutex mutex;
};
AllQueues& all() {
  static AllQueues* const a = new AllQueues;
  return *a;
}

thread_local c10::DeviceIndex t_device = 0;
thread_local c10::StreamId t_stream[kMaxDevices] = {};

// Lets go of the GIL, if this thread holds it: kernels that run in Python and the program's other threads need it while
// the host waits.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) saved_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (saved_) PyEval_RestoreThread(saved_);
  }

 private:
  PyThreadState* saved_ = nullptr;
};

c10::Stream make_stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
}

}  // namespace

// ---- tasks of a stream

void Queue::push(Task task) {
  ensure_initialized();
  const ns enqueued = now();
  bool wake;
  {
    const std::lock_guard<std::mutex> hold(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([this] { run(); }).detach();
    }
    pushed_.fetch_add(1, std::memory_order_relaxed);
    entries_.push_back({std::move(task), enqueued});
    wake = idle_;
  }
  if (wake) wake_.notify_one();
}

void Queue::run() {
  char name[16];
  snprintf(name, sizeof name, "sim%d/s%d", device, id);
  pthread_setname_np(pthread_self(), name);
  prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0);  // sleeps end within 1 us instead of 50
  at::init_num_threads();
  const at::DisableRecordFunctionGuard no_profiling;  // kernels of the device are no operators of the host
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  for (;;) {
    Entry entry;
    {
      std::unique_lock<std::mutex> hold(mutex_);
      idle_ = true;
      wake_.wait(hold, [this] { return !entries_.empty() && !process().exiting; });
      idle_ = false;
      entry = std::move(entries_.front());
      entries_.pop_front();
    }
    task_enqueued_ = entry.enqueued;
    clock = std::max<ns>(clock, entry.enqueued + ns(settings().launch_ns));
    try {
      entry.task(*this);
    } catch (const c10::Error& error) {
      report_error(error.what_without_backtrace());
    } catch (const std::exception& error) {
      report_error(error.what());
    }
    entry.task = nullptr;  // gives memory back before the task counts as done
    done_.fetch_add(1, std::memory_order_release);
  }
}

void Queue::reach() {
  if (settings().real_clock != 0) clock = std::max<ns>(clock, now());
  sleep_until(clock);
  raise_to(counters().max_lag_ns, now() - clock);
}

MarkPtr Queue::mark() {
  auto made = std::make_shared<Mark>();
  mark(made);
  return made;
}

void Queue::mark(const MarkPtr& mark) {
  push([mark](Queue& queue) {
    queue.reach();
    mark->complete(queue.clock);
  });
}

void Queue::wait_for(const MarkPtr& mark) {
  push([mark](Queue& queue) {  // also where the mark is ready: the clock must move in its turn
    mark->wait();
    queue.clock = std::max<ns>(queue.clock, mark->stamp());
  });
}

bool Queue::query() const { return pushed_.load() == done_.load(std::memory_order_acquire) && now() >= clock; }

// ---- which stream, which device

Queue& queue_of(c10::DeviceIndex device, c10::StreamId id) {
  TORCH_CHECK(device >= 0 && device < kMaxDevices && id >= 0 && id < kMaxStreams, "sim: no such stream");
  auto& slot = all().queues[device][id];
  if (Queue* queue = slot.load(std::memory_order_acquire)) return *queue;
  const std::lock_guard<std::mutex> hold(all().mutex);
  if (!slot.load()) slot = new Queue(device, int(id));
  return *slot.load();
}

c10::DeviceIndex current_device() { return t_device; }
void set_current_device(c10::DeviceIndex device) { t_device = device; }
c10::Stream current_stream(c10::DeviceIndex device) { return make_stream(device, t_stream[device]); }
void set_current_stream(c10::Stream stream) { t_stream[stream.device_index()] = stream.id(); }
c10::Stream default_stream(c10::DeviceIndex device) { return make_stream(device, 0); }
c10::Stream stream_from_pool(c10::DeviceIndex device, bool high_priority) {
  const unsigned n = all().next_of_pool[high_priority]++ % kPoolStreams;
  return make_stream(device, 1 + n + (high_priority ? kPoolStreams : 0));
}

// ---- the host waits

void Mark::wait_on_host() const {
  {
    const std::lock_guard<std::mutex> hold(process().mutex);
    if (process().has_failed) return;
    process().awaited_by_hosts.insert(this);
  }
  while (state_.load(std::memory_order_acquire) == kOpen) state_.wait(kOpen, std::memory_order_acquire);
  const std::lock_guard<std::mutex> hold(process().mutex);
  process().awaited_by_hosts.erase(this);
}

void simStreamSynchronize(Queue* queue) {
  counters().host_syncs++;
  if (queue->used()) {
    const WithoutGil unlocked;
    queue->mark()->wait_on_host();
  }
  raise_error();
}

void simDeviceSynchronize(int device) {
  counters().host_syncs++;
  {
    const WithoutGil unlocked;
    std::vector<MarkPtr> marks;
    for (auto& slot : all().queues[device])
      if (Queue* queue = slot.load(); queue && queue->used()) marks.push_back(queue->mark());
    for (auto& mark : marks) mark->wait_on_host();
  }
  raise_error();
}

void simEventSynchronize(const Mark* mark) {
  counters().host_syncs++;
  if (!mark->ready()) {
    const WithoutGil unlocked;
    mark->wait_on_host();
  }
  raise_error();
}

// ---- the process

int device_count() { return process().device_count; }
void set_device_count(int count) { process().device_count = std::clamp(count, 0, kMaxDevices); }
bool initialized() { return process().initialized; }
bool in_forked_child() { return process().forked; }

void ensure_initialized() {
  TORCH_CHECK(!process().forked, "sim: cannot re-initialise the device in a forked process; use spawn");
  if (!process().initialized.load(std::memory_order_relaxed) && !process().initialized.exchange(true))
    pthread_atfork(nullptr, nullptr, [] { process().forked = true; });
}

void park_streams() { process().exiting = true; }

void report_error(const std::string& what) {
  const std::lock_guard<std::mutex> hold(process().mutex);
  if (process().error.empty()) process().error = what;
  process().has_error = true;
}

void fail_device(const std::string& what) {
  report_error(what);
  const std::lock_guard<std::mutex> hold(process().mutex);
  process().has_failed = true;
  for (const Mark* mark : process().awaited_by_hosts)
    if (!mark->ready()) mark->set(Mark::kFailed);
}

void lose_device(const std::string& what) {
  fail_device(what);
  process().is_lost = true;
}

void raise_if_lost() {
  if (process().is_lost.load(std::memory_order_relaxed)) raise_error();
}

void raise_error() {
  if (!process().has_error) return;
  std::string error;
  {
    const std::lock_guard<std::mutex> hold(process().mutex);
    error = process().error;
    if (!process().has_failed) process().error.clear();
    process().has_error = process().has_failed.load();
  }
  TORCH_CHECK(false, "sim: error on the device (reported where the host waits for it): ", error);
}

// ---- faults

uint64_t num_releases() { return process().releases; }
void wait_for_release(uint64_t since) { process().releases.wait(since); }

void release_all() {
  process().releases++;
  process().releases.notify_all();
}

}  // namespace sim
