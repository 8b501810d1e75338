// Events that Python reports: spans of the program, samples of values, and durations measured on the device.
#pragma once

#include <deque>
#include <mutex>
#include <utility>

#include "call_sites.h"
#include "device_time.h"

namespace dtprof {
namespace {

void record_on(Log* log, Record* r, uint8_t kind, uint16_t op, uint64_t entered, uint64_t value, uint32_t site,
               int32_t stage = -1, int32_t microbatch = 0) {
  r->kind = kind;
  r->dtype = r->reduce_op = NO_CODE;
  r->op = op;
  r->thread = thread_id(log, this_thread());
  r->group = 0;
  r->flags = r->waits = 0;
  r->seq = 0;
  r->peer = stage;
  r->tag = microbatch;
  r->site = site;
  r->step = g_step.load(std::memory_order_relaxed);
  r->issued_ns = entered;
  r->numel = value;
  r->returned_after = r->waited_from = r->waited_for = r->done_after = 0;
}

// Open spans by handle. Each handle ends its span once: using it again finds nothing.
class OpenSpans {
 public:
  std::mutex& mutex() { return mutex_; }

  struct Span {
    Event event;
    FollowedDevice* device = nullptr;
    IntervalRef on_device;
  };

  uintptr_t add(const Span& span) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_) free_ = &places_.emplace_back();
    Place* place = std::exchange(free_, free_->next);
    place->span = span;
    return reinterpret_cast<uintptr_t>(place) | static_cast<uintptr_t>(place->turn) << kAddressBits;
  }
  Span take(uintptr_t handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* place = reinterpret_cast<Place*>(handle & ((uintptr_t{1} << kAddressBits) - 1));
    if (place->turn != handle >> kAddressBits) return {};
    place->turn++;
    place->next = free_;
    free_ = place;
    return place->span;
  }

 private:
  static constexpr int kAddressBits = 48;  // of what a process can allocate
  struct Place {
    Span span;
    uint16_t turn = 0;  // counts its spans
    Place* next = nullptr;
  };
  std::mutex mutex_;
  std::deque<Place> places_;
  Place* free_ = nullptr;
};
OpenSpans& open_spans() {
  static auto* spans = new OpenSpans;
  return *spans;
}

uintptr_t begin_span(uint16_t op, bool is_backward, int32_t stage, int32_t microbatch) {
  Log* log = g_log.load(std::memory_order_acquire);
  if (!log) return 0;
  const uint64_t entered = now();
  Thread& thread = this_thread();
  const uint32_t site = labelled_sites().id(log, thread, sites().here(log, thread), thread.label);
  if (is_backward) g_backward_site.store(site, std::memory_order_relaxed);
  Event event = log->claim();
  if (!event) return 0;
  record_on(log, event.record, KIND_SPAN, op, entered, 0, site, stage, microbatch);
  event.record->state.store(STATE_ISSUED, std::memory_order_release);
  OpenSpans::Span span{event, current_device(), {}};
  if (span.device) {
    try {
      span.on_device = span.device->begin(KIND_DEVICE_PHASE, op, site, entered);
    } catch (...) {
    }
  }
  event.segment->capture_ns().fetch_add(now() - entered, std::memory_order_relaxed);
  return open_spans().add(span);
}

void end_span(uintptr_t handle, bool failed, uint8_t flags, bool is_backward) {
  if (!handle) return;
  const uint64_t entered = now();
  if (is_backward) g_backward_site.store(0, std::memory_order_relaxed);
  OpenSpans::Span span = open_spans().take(handle);
  const Event& event = span.event;
  if (span.device) {
    try {
      span.device->end(span.on_device);
    } catch (...) {
    }
  }
  if (event && event.current() && g_log.load(std::memory_order_acquire)) {
    if (flags) event.record->flags |= flags;
    event.complete(failed ? STATE_FAILED : STATE_DONE);
    event.segment->capture_ns().fetch_add(now() - entered, std::memory_order_relaxed);
  }
}

// Return the last operation that this thread issued on a device since the last call; empty where there was none.
DeviceOperation take_last_operation() { return std::exchange(t_last_operation, {}); }

// Mark the current stream before it waits for an operation by other means than its handle; `end_span` marks it behind.
uintptr_t begin_wait(const DeviceOperation& operation) {
  if (!operation || !operation.event.current() || !g_log.load(std::memory_order_acquire)) return 0;
  OpenSpans::Span span{{}, operation.device, {}};
  try {
    span.on_device = operation.device->begin(KIND_DEVICE_WAIT, operation.op, operation.event.record->site, now(),
                                             operation.event);
  } catch (...) {
  }
  return span.on_device ? open_spans().add(span) : 0;
}

void past_span(uint16_t op, uint64_t begin_ns, uint64_t end_ns) {
  Log* log = g_log.load(std::memory_order_acquire);
  if (!log) return;
  const uint64_t entered = now();
  Event event = log->claim();
  if (!event) return;
  record_on(log, event.record, KIND_SPAN, op, begin_ns, 0, 0);
  event.record->state.store(STATE_ISSUED, std::memory_order_release);
  event.complete(STATE_DONE);
  event.record->done_after = static_cast<float>(end_ns - begin_ns);
  event.segment->capture_ns().fetch_add(now() - entered, std::memory_order_relaxed);
}

void device_time(uint16_t group, uint64_t taken_ns, uint64_t duration_ns, uint64_t seen_ns) {
  Log* log = g_log.load(std::memory_order_acquire);
  if (!log) return;
  Event event = log->claim();
  if (!event) return;
  record_on(log, event.record, KIND_DEVICE_TIME, 0, taken_ns, duration_ns, 0);
  event.record->group = group;
  event.record->state.store(STATE_ISSUED, std::memory_order_release);
  event.complete(STATE_DONE);
  event.record->done_after = static_cast<float>(seen_ns - taken_ns);
}

void sample(uint16_t op, uint64_t value) {
  Log* log = g_log.load(std::memory_order_acquire);
  if (!log) return;
  const uint64_t entered = now();
  Event event = log->claim();
  if (!event) return;
  record_on(log, event.record, KIND_SAMPLE, op, entered, value, 0);
  event.record->state.store(STATE_ISSUED, std::memory_order_release);
  event.complete(STATE_DONE);
  event.segment->capture_ns().fetch_add(now() - entered, std::memory_order_relaxed);
}

}  // namespace
}  // namespace dtprof
