#include "settings.h"

#include <stdexcept>
#include <utility>

namespace sim {

// All state of the process is made on first use and never destroyed: the streams' threads outlive `main`.
Settings& settings() {
  static Settings* const s = new Settings;
  return *s;
}

Counters& counters() {
  static Counters* const c = new Counters;
  return *c;
}

void Settings::set(const std::string& name, double value) {
  const std::map<std::string, std::atomic<double>*> all{
      {"kernel_ns", &kernel_ns},
      {"slowdown", &slowdown},
      {"launch_ns", &launch_ns},
      {"copy_latency_ns", &copy_latency_ns},
      {"copy_bytes_per_s", &copy_bytes_per_s},
      {"comm_latency_ns", &comm_latency_ns},
      {"comm_bytes_per_s", &comm_bytes_per_s},
      {"drift_ppm", &drift_ppm},
      {"clock_ahead_ns", &clock_ahead_ns},
      {"sync_on_current", &sync_on_current},
      {"real_clock", &real_clock},
      {"trace", &trace},
  };
  const auto found = all.find(name);
  if (found == all.end()) throw std::invalid_argument("sim: no such setting: " + name);
  *found->second = value;
}

void Settings::set_cost(const std::string& task, ns cost) {
  const std::lock_guard<std::mutex> hold(mutex_);
  if (cost < 0) costs_.erase(task);
  else costs_[task] = cost;
  has_costs_ = !costs_.empty();
}

bool Settings::find_cost(const std::string& task, ns& cost) {
  if (!has_costs_.load(std::memory_order_relaxed)) return false;
  const std::lock_guard<std::mutex> hold(mutex_);
  const auto found = costs_.find(task);
  if (found == costs_.end()) return false;
  cost = found->second;
  return true;
}

ns Settings::kernel_cost(const std::string& task) {
  ns cost = ns(kernel_ns);
  find_cost(task, cost);
  return ns(double(cost) * slowdown);
}

ns Settings::copy_cost(const std::string& task, int64_t bytes) {
  ns cost = ns(copy_latency_ns + double(bytes) / copy_bytes_per_s * 1e9);
  find_cost(task, cost);
  return cost;
}

ns Settings::transfer_cost(const std::string& task, int64_t bytes) {
  ns cost = ns(comm_latency_ns + double(bytes) / comm_bytes_per_s * 1e9);
  find_cost(task, cost);
  return cost;
}

namespace {
struct Trace {
  std::mutex mutex;
  std::vector<TracedTask> tasks;
};
Trace& all_tasks() {
  static Trace* const t = new Trace;
  return *t;
}
}  // namespace

void trace(TracedTask task) {
  if (settings().trace.load(std::memory_order_relaxed) == 0) return;
  const std::lock_guard<std::mutex> hold(all_tasks().mutex);
  all_tasks().tasks.push_back(std::move(task));
}

std::vector<TracedTask> take_trace() {
  const std::lock_guard<std::mutex> hold(all_tasks().mutex);
  return std::exchange(all_tasks().tasks, {});
}

}  // namespace sim
