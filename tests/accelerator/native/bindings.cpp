// What tests/accelerator/simulated_device.py makes the module of the device from.
#include <ATen/core/Generator.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "device_hooks.h"
#include "streams.h"

namespace sim {
namespace {

// Kernels that cost this much, end at this time, or do not end before all are released.
void spin(ns cost) {
  current_queue(current_device()).push([cost](Queue& queue) {
    const ns start = queue.clock;
    queue.clock = start + cost;
    trace({"sim::spin", queue.id, -1, queue.task_enqueued(), start, start, start + cost});
  });
}
void spin_until(ns when) {  // where ranks are to begin together: exact to the ns, which no barrier is
  current_queue(current_device()).push([when](Queue& queue) {
    const ns start = queue.clock;
    queue.clock = std::max(start, when);
    trace({"sim::spin_until", queue.id, -1, queue.task_enqueued(), start, start, queue.clock});
  });
}
void spin_forever() {
  current_queue(current_device()).push([since = num_releases()](Queue& queue) {
    const ns start = queue.clock;
    wait_for_release(since);
    queue.clock = std::max(start, now());
    trace({"sim::spin_forever", queue.id, -1, queue.task_enqueued(), start, start, queue.clock});
  });
}

py::dict read_counters() {
  auto& c = counters();
  py::dict read;
  read["enqueued"] = c.enqueued.load();
  read["blocking"] = c.blocking.load();
  read["host_syncs"] = c.host_syncs.load();
  read["events"] = c.events.load();
  read["collectives"] = c.collectives.load();
  read["allocated_bytes"] = c.allocated_bytes.load();
  read["max_lag_ns"] = c.max_lag_ns.exchange(0);
  const std::lock_guard<std::mutex> hold(c.mutex);
  read["blocking_operators"] = c.blocking_operators;
  return read;
}

py::list trace_as_tuples() {
  py::list tasks;
  for (auto& t : take_trace())
    tasks.append(py::make_tuple(t.name, t.stream, t.seq, t.enqueued, t.start, t.met, t.end));
  return tasks;
}

PYBIND11_MODULE(SIM_MODULE, m) {
  register_device();
  m.def("device_count", &device_count);
  m.def("set_device_count", &set_device_count);
  m.def("initialized", &initialized);
  m.def("init", &ensure_initialized);
  m.def("in_forked_child", &in_forked_child);
  m.def("current_device", [] { return int(current_device()); });
  m.def("set_device", [](int device) {
    TORCH_CHECK(device >= 0 && device < device_count(), "sim: no such device ", device);
    set_current_device(c10::DeviceIndex(device));
  });
  m.def("synchronize", [](int device) { simDeviceSynchronize(device); });
  m.def("default_generator", [](int device) { return default_generator(c10::DeviceIndex(device)); });
  m.def("make_backend", &make_backend);
  m.def("park_streams", &park_streams);

  m.def("now", &now);
  m.def("spin", &spin);
  m.def("spin_until", &spin_until);
  m.def("spin_forever", &spin_forever);
  m.def("stall_network", &stall_network);
  m.def("release_all", &release_all);
  m.def("report_error", &report_error);
  m.def("lose_device", &lose_device);
  m.def("set_capturing", [](bool capturing) { current_queue(current_device()).capturing = capturing; });
  m.def("configure", [](const std::string& name, double value) { settings().set(name, value); });
  m.def("set_cost", [](const std::string& task, ns cost) { settings().set_cost(task, cost); });
  m.def("counters", &read_counters);
  m.def("take_trace", &trace_as_tuples);
}

}  // namespace
}  // namespace sim
