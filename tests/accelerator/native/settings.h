// What a test sets (costs of the device) and what it reads back: counters, and the ground truth of all that ran.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "clock.h"

namespace sim {

struct Settings {
  // Durations and rates. A kernel costs `kernel_ns * slowdown`, a copy or collective its latency + bytes / rate.
  std::atomic<double> kernel_ns{5000}, slowdown{1}, launch_ns{0};
  std::atomic<double> copy_latency_ns{5000}, copy_bytes_per_s{12e9};
  std::atomic<double> comm_latency_ns{20000}, comm_bytes_per_s{10e9};
  // Timing events read this much too long: the device's clock runs apart from the host's.
  std::atomic<double> drift_ppm{0};
  // Timing events that complete from now on show a clock that is so much ahead: it has jumped.
  std::atomic<double> clock_ahead_ns{0};
  // A collective with async_op=False runs on the caller's stream (1, NCCL since torch 2.7) or on the group's (0).
  std::atomic<double> sync_on_current{1};
  // Stamps never precede the real end of the CPU kernel: right after what the host sees, but no longer exact.
  std::atomic<double> real_clock{0};
  std::atomic<double> trace{0};

  void set(const std::string& name, double value);  // throws where there is no such setting
  void set_cost(const std::string& task, ns cost);   // of "aten::mm", "sim::h2d", "simccl::ALLREDUCE"; < 0: as others
  ns kernel_cost(const std::string& task);
  ns copy_cost(const std::string& task, int64_t bytes);
  ns transfer_cost(const std::string& task, int64_t bytes);

 private:
  bool find_cost(const std::string& task, ns& cost);
  std::mutex mutex_;
  std::unordered_map<std::string, ns> costs_;
  std::atomic<bool> has_costs_{false};
};
Settings& settings();

struct Counters {
  std::atomic<int64_t> enqueued{0}, blocking{0}, host_syncs{0}, events{0}, collectives{0};
  std::atomic<int64_t> allocated_bytes{0}, peak_bytes{0};
  std::atomic<int64_t> max_lag_ns{0};  // how late a mark became visible after its stamp: CPU kernels took longer
  std::mutex mutex;
  std::map<std::string, int64_t> blocking_operators;
};
Counters& counters();

template <class T>
void raise_to(std::atomic<T>& most, T value) {
  T seen = most;
  while (value > seen && !most.compare_exchange_weak(seen, value)) {
  }
}

// One task of a stream. A collective waits from `start` to `met`, when its last member starts; others have met = start.
struct TracedTask {
  std::string name;
  int stream;
  int64_t seq;  // of a collective in its group, else -1
  ns enqueued, start, met, end;
};
void trace(TracedTask task);
std::vector<TracedTask> take_trace();

}  // namespace sim
