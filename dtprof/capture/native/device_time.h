// Time on devices: when the device began and ended an operation, a wait of a stream, a phase.
//
// An interval is a pair of timing events that the issuing thread records through torch's device-generic interface. A
// thread without the GIL reads events that have completed and writes records. Nothing here waits for a device,
// synchronises it, or adds to a stream that captures a graph; a job without a device never comes here.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "kernel_events.h"
#include "names.h"

namespace dtprof {
namespace {

using DeviceImpl = c10::impl::DeviceGuardImplInterface;

constexpr size_t kMostIntervals = 8192;  // started by the host and not completed on the device; further ones are skipped
constexpr int kMostDevices = 64;
// Before the drift of a clock is measured, its error grows by kDrift: on an H100 anchors 1 s apart left 70 to 115 us, where
// an anchor alone is known to 10.
constexpr uint64_t kAnchorEvery = 250'000'000, kAnchorAgain = 20'000'000, kAnchorAtOnce = 1'000'000, kPatience = 200'000;
constexpr int kMostInARow = 3, kMostAtOnce = 16;  // anchors in quick succession until the first good one
constexpr double kGoodAnchor = 20e3;  // ns: after an anchor with a larger error the next one comes soon
constexpr double kDrift = 100e-6;  // of a device's clock against the host's, before it is measured
constexpr double kJump = 1e6;  // ns: what two anchors are apart beyond their errors is a jump from here on, below it drift
constexpr int kMostJumps = 3;  // a clock that jumps more often tells no times

template <class Impl>
constexpr bool kTellsCapture = requires(const Impl* impl, const c10::Stream& stream) { impl->isStreamCapturing(stream); };
template <class Impl>
constexpr bool kTellsHandle = requires(const Impl* impl, const c10::Stream& stream) { impl->getStreamNativeHandle(stream); };

std::atomic<FindKernelEvents> g_find_kernel_events{nullptr};  // of NCCL; from a library that needs the headers of CUDA

struct DeviceInterval {
  // Written by the thread that begins it, before the reader has it.
  uint8_t kind = 0, flags = 0;
  uint16_t op = 0, group = 0;
  uint32_t seq = 0, site = 0, step = 0;
  uint64_t host_begin = 0;
  c10::StreamId stream = 0;
  void* begin = nullptr;  // event of its own
  Event operation;        // of which it is
  // Written by whoever ends it, before `ended`.
  void* end = nullptr;  // event of its own
  uint64_t host_end = 0;
  KernelEvents kernel;                      // in place of its own events
  c10::intrusive_ptr<c10d::Work> work;      // in place of an event for its end: asked whether it is complete
  std::atomic<bool> ended{false};
  std::atomic<uint32_t> lost{0};            // the generation of which the end will never be known
  std::atomic<uint32_t> generation{1};      // counts its uses
  // The reader's.
  bool begun = false, spoiled = false;  // spoiled: the clock of the device jumped while it was open
  uint64_t begin_ns = 0, error_ns = 0, queued_ns = 0;
  Event record;
};

// One use of an interval: the interval may have been recycled by the time it ends.
struct IntervalRef {
  DeviceInterval* interval = nullptr;
  uint32_t generation = 0;
  explicit operator bool() const { return interval != nullptr; }
  void lose() {
    if (interval) interval->lost.store(generation, std::memory_order_release);
    interval = nullptr;
  }
};

// Function of a library that the job has loaded; else null.
void* function_of(const char* library, const char* name) {
  void* loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  return loaded ? dlsym(loaded, name) : nullptr;
}
void* driver_function(const char* name) { return function_of("libcuda.so.1", name); }

// While a thread captures a graph in CUDA's default mode, event queries of any other thread invalidate the capture, unless
// that thread has exchanged its capture mode for the relaxed one. Throws where that is impossible.
void allow_captures_elsewhere() {
  constexpr int kRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
  const auto exchange = reinterpret_cast<int (*)(int*)>(driver_function("cuThreadExchangeStreamCaptureMode"));
  int mode = kRelaxed;
  if (!exchange || exchange(&mode) != 0) throw std::runtime_error("graphs that the job captures might be harmed");
}

// Maps times of a device's events to the host's clock, by anchor events on a stream of its own: the device reaches an
// anchor between the moment the host records it and the moment the host finds it complete.
class DeviceClock {
 public:
  void start(const DeviceImpl* impl, c10::Device device) {
    impl_ = impl;
    device_ = device;
    stream_.emplace(impl->getNewStream(device, 0));
  }
  // Until a good anchor has been tried for, times wait for it, unless these are the last.
  bool known(bool last) const { return count_ > 0 && (last || settled()); }
  bool settled() const { return num_at_once_ >= kMostAtOnce; }
  bool due(uint64_t at) const { return pending_ ? true : at >= next_; }

  enum class Anchored { kNotYet, kAgrees, kJumped };

  // Take an anchor, or finish one whose event had not completed in time; say whether the one before agrees with it. Where
  // processes share a device, it is this one's turn when an anchor has completed: the next follows at once.
  Anchored anchor() {
    for (int i = 1;; i++) {
      const Anchored found = take();
      if (found != Anchored::kAgrees || is_good_ || i == kMostInARow) return found;
    }
  }
  double jumped_by() const { return jumped_by_; }

  // Host time of a completed event, and how far that may be off.
  std::pair<uint64_t, uint64_t> time_of(void* event) const {
    const double ns = elapsed(newest().event, event);
    const double at = static_cast<double>(ns) * (1.0 + drift_);
    return {newest().host + std::llround(at), static_cast<uint64_t>(std::llround(error_of(ns)))};
  }

  // In ns of the device.
  double elapsed(void* from, void* to) const { return impl_->elapsedTime(from, to, device_.index()) * 1e6; }

 private:
  struct Anchor {
    void* event = nullptr;
    uint64_t host = 0;
    double error = 0;
  };
  const Anchor& newest() const { return anchors_[(count_ - 1) % anchors_.size()]; }
  // CUDA tells elapsed times as float, in ms.
  double error_of(double ns) const { return newest().error + std::abs(ns) * (drift_error_ + 6e-8); }

  Anchored take() {
    const uint64_t from = now();
    Anchor& anchor = anchors_[count_ % anchors_.size()];
    if (!pending_) {
      impl_->record(&anchor.event, *stream_, device_.index(), c10::EventFlag::BACKEND_DEFAULT);
      recorded_ = from;
      pending_ = true;
    }
    while (!impl_->queryEvent(anchor.event))
      if (now() - from > kPatience) return Anchored::kNotYet;
    const uint64_t to = now();
    pending_ = false;
    anchor.host = (recorded_ + to) / 2;
    anchor.error = static_cast<double>(to - recorded_) / 2;
    is_good_ = anchor.error <= kGoodAnchor;
    next_ = to + (is_good_ ? kAnchorEvery : num_at_once_++ < kMostAtOnce ? kAnchorAtOnce : kAnchorAgain);
    if (is_good_) num_at_once_ = kMostAtOnce;
    if (count_) {
      const double ns = elapsed(newest().event, anchor.event), predicted_error = error_of(ns);
      jumped_by_ = ns * (1.0 + drift_) - static_cast<double>(static_cast<int64_t>(anchor.host - newest().host));
      if (std::abs(jumped_by_) > anchor.error + predicted_error + kJump) {
        std::swap(anchors_[0], anchor);
        count_ = 1;
        drift_ = 0;
        drift_error_ = kDrift;
        return Anchored::kJumped;
      }
      // An anchor with a larger error than the prediction from the one before it is dropped.
      if (anchor.error > predicted_error) return Anchored::kAgrees;
    }
    count_++;
    measure_drift();
    return Anchored::kAgrees;
  }

  void measure_drift() {
    if (count_ < 2) return;
    const size_t kept = std::min(count_, anchors_.size() - 1);  // the oldest place is the next to be written
    const Anchor& oldest = anchors_[(count_ - kept) % anchors_.size()];
    const double device = elapsed(oldest.event, newest().event);
    if (device <= 0) return;
    const double error = (oldest.error + newest().error) / device;
    if (error >= kDrift) return;
    drift_ = static_cast<double>(newest().host - oldest.host) / device - 1.0;
    drift_error_ = error;
  }

  const DeviceImpl* impl_ = nullptr;
  c10::Device device_{c10::DeviceType::CPU};
  std::optional<c10::Stream> stream_;
  std::array<Anchor, 17> anchors_;
  size_t count_ = 0;
  bool pending_ = false, is_good_ = false;
  int num_at_once_ = 0;
  uint64_t recorded_ = 0, next_ = 0;
  double drift_ = 0, drift_error_ = kDrift, jumped_by_ = 0;
};

class FollowedDevice {
 public:
  // Called by a thread of the job that uses the device: it is initialised.
  FollowedDevice(const DeviceImpl* impl, c10::Device device) : impl_(impl), device_(device) {
    skipped_ = names().id("device_marks_skipped");
    captured_ = names().id("device_marks_captured");
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);  // the job's signals are not ours to take
    reader_ = std::thread([this] { follow(); });
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
  }

  // Mark the begin of an interval on the current stream of this thread; empty where that is impossible.
  IntervalRef begin(uint8_t kind, uint16_t op, uint32_t site, uint64_t at, const Event& operation = {}) {
    const c10::Stream stream = impl_->getStream(device_);
    if (is_capturing(stream)) {
      num_captured_.fetch_add(1, std::memory_order_relaxed);
      return {};
    }
    DeviceInterval* interval = take();
    if (!interval) return {};
    interval->kind = kind;
    interval->flags = 0;
    interval->op = op;
    interval->site = site;
    interval->step = g_step.load(std::memory_order_relaxed);
    interval->host_begin = at;
    interval->stream = stream.id();
    interval->operation = operation;
    if (operation) {
      const Record* r = operation.record;
      interval->group = r->group;
      interval->seq = r->seq;
      if (r->kind == KIND_P2P) interval->flags |= DEVICE_FLAG_P2P;
    } else {
      interval->group = 0;
      interval->seq = 0;
    }
    impl_->record(&interval->begin, stream, device_.index(), c10::EventFlag::BACKEND_DEFAULT);
    const IntervalRef ref{interval, interval->generation.load(std::memory_order_relaxed)};
    std::lock_guard<std::mutex> lock(mutex_);
    incoming_.push_back(interval);
    return ref;
  }

  // Mark the end of an interval on the current stream.
  void end(IntervalRef& ref, uint8_t flags = 0) {
    if (!ref) return;
    DeviceInterval* interval = ref.interval;
    const c10::Stream stream = impl_->getStream(device_);
    if (is_capturing(stream)) {
      num_captured_.fetch_add(1, std::memory_order_relaxed);
      return ref.lose();
    }
    interval->host_end = now();
    interval->flags |= flags;
    impl_->record(&interval->end, stream, device_.index(), c10::EventFlag::BACKEND_DEFAULT);
    interval->ended.store(true, std::memory_order_release);
    ref.interval = nullptr;
  }

  // Take the end of an interval, and where possible its begin, from the back end's Work.
  void end_with(const IntervalRef& ref, const c10::intrusive_ptr<c10d::Work>& work, uint8_t flags = 0) {
    DeviceInterval* interval = ref.interval;
    interval->flags |= flags;
    const auto find = g_find_kernel_events.load(std::memory_order_acquire);
    if (find && find(work.get(), &interval->kernel)) interval->flags |= DEVICE_FLAG_EXACT;
    else interval->work = work;
    interval->host_end = now();
    interval->ended.store(true, std::memory_order_release);
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (stopping_) return;
      stopping_ = true;
    }
    wake_.notify_one();
    reader_.join();
  }

 private:
  // Streams whose state is unknown are skipped.
  bool is_capturing(const c10::Stream& stream) const {
    try {
      return captures(impl_, stream);
    } catch (...) {
      return true;
    }
  }
  template <class Impl>  // a template, so that members this torch lacks are not compiled
  bool captures(const Impl* impl, const c10::Stream& stream) const {
    if constexpr (kTellsCapture<Impl>) return impl->isStreamCapturing(stream);
    int status = 0;  // torch before 2.12
    void* const handle = native_handle(impl, stream);
    return !capture_status_ || capture_status_(handle, &status) != 0 || status != 0;
  }
  template <class Impl>
  void* native_handle(const Impl* impl, const c10::Stream& stream) const {
    if constexpr (kTellsHandle<Impl>) return impl->getStreamNativeHandle(stream);
    // Older ones: a CUDAStream holds a Stream and nothing else.
    if (!cuda_stream_) throw std::runtime_error("torch does not tell the stream of the driver");
    return cuda_stream_(&stream);
  }

  DeviceInterval* take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_ || broken_) return nullptr;
    if (!free_.empty()) {
      DeviceInterval* interval = free_.back();
      free_.pop_back();
      return interval;
    }
    if (intervals_.size() < kMostIntervals) return &intervals_.emplace_back();
    num_skipped_.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }

  void follow() {
    pthread_setname_np(pthread_self(), "dtprof-device");
    try {
      if (device_.is_cuda()) allow_captures_elsewhere();
      impl_->setDevice(device_);  // else c10 creates a context on the first device for this thread
      clock_.start(impl_, device_);
      while (true) {
        const bool last = wait_a_while();
        if (last ? !unconfirmed_.empty() : clock_.due(now()) && !(open_.empty() && unconfirmed_.empty())) {
          const auto anchored = clock_.anchor();
          if (anchored == DeviceClock::Anchored::kJumped) revoke();
          else if (anchored == DeviceClock::Anchored::kAgrees) unconfirmed_.clear();
        }
        if (clock_.known(last)) read_events();
        write_counts(last);
        if (last) return;
      }
    } catch (const std::exception& error) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        broken_ = true;
        open_.insert(open_.end(), incoming_.begin(), incoming_.end());
        incoming_.clear();
      }
      for (DeviceInterval* interval : open_) forget(*interval);
      const std::string text = error.what();
      note("times on the device are not recorded any more: " + text.substr(0, text.find('\n')));
    }
  }

  void note(const std::string& text) {
    if (Log* log = g_log.load(std::memory_order_acquire))
      log->write_line("{\"k\":\"note\",\"t_ns\":" + std::to_string(now()) + ",\"text\":" + quoted(text) + "}");
  }

  // The clock has jumped at an unknown moment since the last anchor that agreed: take back all times read since then, and
  // those of what is open.
  void revoke() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      open_.insert(open_.end(), incoming_.begin(), incoming_.end());
      incoming_.clear();
    }
    for (DeviceInterval* interval : open_) {
      forget(*interval);
      interval->spoiled = true;
    }
    for (const auto& [record, operation] : unconfirmed_) {
      uint8_t done = STATE_DONE;
      if (record.current()) record.record->state.compare_exchange_strong(done, STATE_FAILED);
      clear_followed(operation);
    }
    unconfirmed_.clear();
    char text[160];
    snprintf(text, sizeof text, "the clock of %s jumped by about %+.3f s against that of its host; times on the device of the "
             "second before are not known", device_.str().c_str(), clock_.jumped_by() / 1e9);
    note(text);
    if (++num_jumps_ > kMostJumps) throw std::runtime_error("the clock of " + device_.str() + " jumps again and again");
  }

  // Fetch the started intervals; return whether this is the last time. Events keep their times until they are read; whether
  // a Work has completed is known as closely as it is asked. A wake-up costs some 20 us: each ms, 2 % of a core.
  bool wait_a_while() {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool hurries = (asks_works_ || !clock_.settled()) && !(open_.empty() && incoming_.empty());
    const auto pause = hurries ? std::chrono::milliseconds(1) : std::chrono::milliseconds(10);
    wake_.wait_for(lock, pause, [this] { return stopping_; });
    open_.insert(open_.end(), incoming_.begin(), incoming_.end());
    incoming_.clear();
    return stopping_;
  }

  // Streams and groups run in order: behind the first event that has not completed, no other of the same is queried.
  struct Behind {
    std::vector<int64_t> places;
    bool holds(int64_t place) const { return std::find(places.begin(), places.end(), place) != places.end(); }
  };

  void read_events() {
    Behind streams, groups;
    size_t kept = 0;
    for (DeviceInterval* interval : open_) {
      if (read(*interval, streams, groups)) release(interval);
      else open_[kept++] = interval;
    }
    open_.resize(kept);
  }

  // Query the device's progress; return whether the interval has ended.
  bool read(DeviceInterval& interval, Behind& streams, Behind& groups) {
    const bool ended = interval.ended.load(std::memory_order_acquire);
    if (interval.spoiled && ended) return true;
    if (!ended && interval.lost.load(std::memory_order_acquire) == interval.generation) {
      forget(interval);
      return true;
    }
    if (interval.spoiled) return false;  // whoever began it has yet to end it
    if (!interval.begun) {
      if (interval.kernel.begin) {
        if (!impl_->queryEvent(interval.kernel.begin)) return give_up(interval);
      } else {
        if (streams.holds(interval.stream)) return give_up(interval);
        if (!impl_->queryEvent(interval.begin)) {
          streams.places.push_back(interval.stream);
          return give_up(interval);
        }
      }
      std::tie(interval.begin_ns, interval.error_ns) =
          clock_.time_of(interval.kernel.begin ? interval.kernel.begin : interval.begin);
      // The kernel starts after the mark before the call, and perhaps after other kernels of its stream.
      interval.queued_ns = interval.kernel.begin && impl_->queryEvent(interval.begin)
                               ? std::max(0ll, std::llround(clock_.elapsed(interval.begin, interval.kernel.begin)))
                               : 0;
      interval.begun = true;
    }
    if (ended) {
      uint64_t end_ns = 0;
      if (interval.work) {
        asks_works_ = true;
        const int64_t place = interval.group << 1 | (interval.flags & DEVICE_FLAG_P2P);
        if (!groups.holds(place)) {
          if (interval.work->isCompleted()) {
            end_ns = now();
            interval.flags |= DEVICE_FLAG_POLLED;
          } else if (!(interval.flags & DEVICE_FLAG_P2P)) {
            groups.places.push_back(place);
          }
        }
      } else {
        void* event = interval.kernel.end ? interval.kernel.end : interval.end;
        // Relative to its begin, because the anchor may have changed since the begin.
        void* begin = interval.kernel.begin ? interval.kernel.begin : interval.begin;
        if (impl_->queryEvent(event)) end_ns = interval.begin_ns + std::max(0ll, std::llround(clock_.elapsed(begin, event)));
      }
      if (end_ns) {
        write(interval);
        if (interval.record) {
          Record* r = interval.record.record;
          if (interval.record.current()) {
            const bool is_operation = interval.kind == KIND_DEVICE_OPERATION;
            r->flags = interval.flags;
            r->tag = static_cast<int32_t>(std::min<uint64_t>(interval.error_ns, INT32_MAX));
            if (!is_operation)
              r->returned_after = static_cast<float>(interval.host_end - interval.host_begin);
            interval.record.complete(STATE_DONE, std::max(end_ns, interval.begin_ns));
            unconfirmed_.emplace_back(interval.record, is_operation ? interval.operation : Event{});
          }
        }
        return true;
      }
    }
    write(interval);
    return give_up(interval);
  }

  // The program may have dropped the handle on purpose before it completed: do not keep it alive.
  bool give_up(DeviceInterval& interval) {
    if (!interval.work || interval.lost.load(std::memory_order_acquire) != interval.generation) return false;
    forget(interval);
    return true;
  }

  // Claim the record of a started interval.
  void write(DeviceInterval& interval) {
    Log* log = g_log.load(std::memory_order_acquire);
    if (interval.record || !log) return;
    interval.record = log->claim();
    Record* r = interval.record.record;
    if (!r) return;
    r->kind = interval.kind;
    r->dtype = r->reduce_op = NO_CODE;
    r->op = interval.op;
    r->thread = stream_number(log, interval.stream);
    r->group = interval.group;
    r->flags = interval.flags;
    r->waits = 0;
    r->seq = interval.seq;
    r->peer = -1;
    r->tag = static_cast<int32_t>(std::min<uint64_t>(interval.error_ns, INT32_MAX));
    r->site = interval.site;
    r->step = interval.step;
    r->issued_ns = interval.begin_ns;
    r->numel = interval.host_begin;
    r->waited_from = r->waited_for = r->done_after = 0;
    r->returned_after = static_cast<float>(interval.queued_ns);
    r->state.store(STATE_ISSUED, std::memory_order_release);
  }

  // The end of an operation stays unknown: clear the device flag of its record.
  void forget(DeviceInterval& interval) {
    if (interval.record && interval.record.current()) interval.record.complete(STATE_FAILED, interval.begin_ns);
    if (interval.kind == KIND_DEVICE_OPERATION) clear_followed(interval.operation);
  }
  static void clear_followed(const Event& operation) {
    if (operation && operation.current())
      std::atomic_ref(operation.record->flags).fetch_and(static_cast<uint8_t>(~FLAG_FOLLOWED));
  }

  void release(DeviceInterval* interval) {
    interval->work.reset();
    interval->kernel = {};
    interval->record = interval->operation = {};
    interval->begun = interval->spoiled = false;
    interval->queued_ns = 0;
    interval->ended.store(false, std::memory_order_relaxed);
    interval->generation.fetch_add(1, std::memory_order_release);
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(interval);
  }

  uint16_t stream_number(Log* log, c10::StreamId stream) {
    for (size_t i = 0; i < streams_.size(); i++)
      if (streams_[i] == stream) return static_cast<uint16_t>(i + 1 + first_stream());
    if (streams_.size() >= kMostStreams) return 0;
    streams_.push_back(stream);
    const auto number = static_cast<uint16_t>(streams_.size() + first_stream());
    log->write_line("{\"k\":\"stream\",\"id\":" + std::to_string(number) + ",\"device\":" +
                    quoted(c10::DeviceTypeName(device_.type(), true)) + ",\"index\":" + std::to_string(device_.index()) +
                    ",\"stream\":" + std::to_string(stream) + "}");
    return number;
  }
  size_t first_stream() const { return static_cast<size_t>(device_.index()) * kMostStreams; }

  void write_counts(bool last) {
    for (const auto& [count, written, op] : {std::tie(num_skipped_, written_skipped_, skipped_),
                                             std::tie(num_captured_, written_captured_, captured_)}) {
      const uint64_t seen = count.load(std::memory_order_relaxed);
      if (seen == written || (now() < next_counts_ && !last)) continue;
      Log* log = g_log.load(std::memory_order_acquire);
      Event event = log ? log->claim() : Event{};
      if (!event) continue;
      written = seen;
      next_counts_ = now() + kAnchorEvery;
      Record* r = event.record;
      r->kind = KIND_SAMPLE;
      r->dtype = r->reduce_op = NO_CODE;
      r->op = op;
      r->peer = -1;
      r->step = g_step.load(std::memory_order_relaxed);
      r->issued_ns = now();
      r->numel = seen;
      r->state.store(STATE_ISSUED, std::memory_order_release);
      event.complete(STATE_DONE);
    }
  }

  static constexpr size_t kMostStreams = 1000;
  const DeviceImpl* const impl_;
  const c10::Device device_;
  int (*const capture_status_)(void*, int*) = reinterpret_cast<int (*)(void*, int*)>(driver_function("cuStreamIsCapturing"));
  void* (*const cuda_stream_)(const void*) = reinterpret_cast<void* (*)(const void*)>(
      function_of("libc10_cuda.so", "_ZNK3c104cuda10CUDAStream6streamEv"));
  uint16_t skipped_, captured_;
  std::atomic<uint64_t> num_skipped_{0}, num_captured_{0};
  std::mutex mutex_;  // guards the next five; never held while waiting for the GIL or the device
  std::deque<DeviceInterval> intervals_;
  std::vector<DeviceInterval*> free_, incoming_;
  bool stopping_ = false, broken_ = false;
  std::condition_variable wake_;
  // The reader's.
  DeviceClock clock_;
  bool asks_works_ = false;  // the ends of some intervals are known from Works alone
  std::vector<DeviceInterval*> open_;
  std::vector<std::pair<Event, Event>> unconfirmed_;  // records, and their operations, with times since the last anchor
  int num_jumps_ = 0;
  std::vector<c10::StreamId> streams_;
  uint64_t written_skipped_ = 0, written_captured_ = 0, next_counts_ = 0;
  std::thread reader_;
};

// Followed devices by index; a process has one type of accelerator. Never deleted, and not inherited by a forked child.
std::array<std::atomic<FollowedDevice*>, kMostDevices> g_devices{};
std::atomic<int> g_device_type{-1};
std::mutex g_devices_mutex;
std::atomic<bool> g_follows_devices{true};

[[gnu::cold]] FollowedDevice* start_following(c10::Device device) {
  if (!g_follows_devices.load() || (!kTellsCapture<DeviceImpl> && !device.is_cuda())) return nullptr;
  std::lock_guard<std::mutex> lock(g_devices_mutex);
  if (!g_follows_devices.load()) return nullptr;
  int type = -1;
  if (!g_device_type.compare_exchange_strong(type, static_cast<int>(device.type())) &&
      type != static_cast<int>(device.type()))
    return nullptr;
  auto& slot = g_devices[device.index()];
  if (FollowedDevice* known = slot.load()) return known;
  const DeviceImpl* impl = c10::impl::device_guard_impl_registry[static_cast<size_t>(device.type())].load();
  if (!impl) return nullptr;
  auto* followed = new FollowedDevice(impl, device);
  slot.store(followed, std::memory_order_release);
  return followed;
}

FollowedDevice* followed(c10::Device device) {
  if (device.index() < 0 || device.index() >= kMostDevices) return nullptr;
  FollowedDevice* known = g_devices[device.index()].load(std::memory_order_acquire);
  return known ? known : start_following(device);
}

// Follow a device before its first operation, once the job has initialised it.
void follow_device(const std::string& device) { followed(c10::Device(device)); }

void use_kernel_events(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw std::runtime_error(dlerror());
  g_find_kernel_events.store(reinterpret_cast<FindKernelEvents>(dlsym(handle, "dtprof_find_kernel_events")));
}

// The device that this thread uses now, if that is followed: for phases, which name none.
FollowedDevice* current_device() {
  const int type = g_device_type.load(std::memory_order_relaxed);
  if (type < 0) [[likely]] return nullptr;
  const DeviceImpl* impl = c10::impl::device_guard_impl_registry[static_cast<size_t>(type)].load();
  const c10::DeviceIndex index = impl->getDevice().index();
  return index >= 0 && index < kMostDevices ? g_devices[index].load(std::memory_order_acquire) : nullptr;
}

void stop_following() {
  if (!g_follows_devices.exchange(false)) return;
  std::lock_guard<std::mutex> lock(g_devices_mutex);
  for (auto& slot : g_devices)
    if (FollowedDevice* device = slot.load()) device->stop();
}

// An operation on a device that this process follows.
struct DeviceOperation {
  Event event;
  uint16_t op = 0;
  FollowedDevice* device = nullptr;
  explicit operator bool() const { return device != nullptr; }
};

// The last device operation that this thread issued: frameworks let streams wait for it by events of their own, which
// only the framework hooks can mark.
thread_local DeviceOperation t_last_operation;

// A forked child has no readers and may not touch the device.
void forget_devices() {
  g_follows_devices.store(false);
  g_device_type.store(-1);
  for (auto& slot : g_devices) slot.store(nullptr);
}

}  // namespace
}  // namespace dtprof
