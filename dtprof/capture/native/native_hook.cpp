// The native hook: records every c10d operation of this process without taking the GIL.
//
// A boxed kernel at DispatchKey::BackendSelect sees each operation once, on its way to whatever back end, writes a
// record into a memory-mapped segment, redispatches, and completes the record in place. Nothing here may change what
// the job computes, raise into it, or block it.
//
// One translation unit, its concerns in headers: event_log (records on disk), thread_state, names, process_groups,
// call_sites, tensor_sizes, buffers_in_flight, device_time, watched_work, operation_hook, program_events. This file is
// what Python calls.
#include "call_sites.h"  // first: it decides how Python.h is read
#include "buffers_in_flight.h"
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device_time.h"
#include "event_log.h"
#include "fatal_signals.h"
#include "names.h"
#include "operation_hook.h"
#include "process_groups.h"
#include "program_events.h"
#include "tensor_sizes.h"
#include "thread_state.h"

// As torch itself holds works that it hands to Python.
PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace dtprof {
namespace {

void install(const std::vector<std::string>& ops) {
  static bool installed = false;  // also in a forked process, which inherits the kernels
  if (std::exchange(installed, true)) return;
  // Never deleted: the kernels stay until the process ends.
  auto* library = new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  for (const auto& op : ops) {
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(("c10d::" + op).c_str(), "");
    auto hook = std::make_unique<OperationHook>(names().id(op), op, handle.schema());
    library->impl(op.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(hook)));
  }
}

void open_log(const std::string& folder, const py::bytes& header, uint32_t max_segments) {
  if (g_log.load()) throw std::runtime_error("the log is open already");
  auto* log = new Log(folder, header, max_segments);
  names().declare_all(log);
  g_log.store(log, std::memory_order_release);
  FatalSignals::install(folder + "/crash.txt");
}

void write_entry(const std::string& line) {
  if (Log* log = g_log.load(std::memory_order_acquire)) log->write_line(line);
}

void close_log() {
  FatalSignals::rest();
  stop_following();
  if (Log* log = g_log.load(std::memory_order_acquire)) log->mark(MARK_CLOSED);
}

// A forked child shares the parent's segments: it must never write to them.
void off() { g_log.store(nullptr, std::memory_order_release); }

// Around a fork no table is in the hands of another thread, which the child would not have.
void hold_tables() {
  for (std::mutex* m : {&names().mutex(), &groups().mutex, &sites().mutex(), &labelled_sites().mutex(), &sizes().mutex(),
                        &open_spans().mutex(), &buffers_in_flight().mutex()})
    m->lock();
}
void release_tables() {
  for (std::mutex* m : {&buffers_in_flight().mutex(), &open_spans().mutex(), &sizes().mutex(), &labelled_sites().mutex(), &sites().mutex(),
                        &groups().mutex, &names().mutex()})
    m->unlock();
}

// A child that opens a log of its own declares everything anew. This thread is its only one.
void begin_child() {
  off();
  forget_devices();
  g_process++;
  groups().known.clear();
  sites().forget();
  labelled_sites().forget();
  sizes().forget();
  buffers_in_flight().forget();
  g_threads.store(0);
  g_backward_site.store(0);
  Thread& thread = this_thread();
  Spare* const spares = std::exchange(thread.spares, nullptr);
  const uint16_t num_spares = thread.num_spares;
  thread = {};
  thread.spares = spares;
  thread.num_spares = num_spares;
  t_p2p_labels.clear();
  t_batch = {};
  release_tables();
}

}  // namespace

PYBIND11_MODULE(DTPROF_MODULE, m) {
  pthread_atfork(&hold_tables, &release_tables, &begin_child);
  m.def("install", &install);
  m.def("configure_sites", [](std::vector<std::string> tool, std::vector<std::string> library,
                              std::vector<std::string> transparent) {
    sites().configure(std::move(tool), std::move(library), std::move(transparent));
  });
  m.def("on_group", [](const py::function& f) { g_on_group = py::function(f).release().ptr(); });
  m.def("open_log", &open_log);
  m.def("name_id", [](const std::string& name) { return names().id(name); });
  m.def("begin_span", &begin_span, py::arg("op"), py::arg("is_backward"), py::arg("stage") = -1, py::arg("microbatch") = 0);
  m.def("set_label", [](uint32_t label) { return std::exchange(this_thread().label, label); });
  m.def("label_next_p2p", [](const std::vector<uint32_t>& labels) {
    t_p2p_labels.assign(labels.begin(), labels.end());
    this_thread().p2p_labels = static_cast<uint32_t>(labels.size());
  });
  m.def("end_span", &end_span);
  m.def("past_span", &past_span);
  m.def("sample", &sample);
  m.def("device_time", &device_time);
  m.def("follow_device", &follow_device);
  m.def("use_kernel_events", &use_kernel_events);
  m.def("begin_batch", [] { t_batch.begin(); });
  m.def("end_batch", [](c10::intrusive_ptr<c10d::Work> work) { return t_batch.end(std::move(work)); },
        py::arg("work").none(true));
  py::class_<DeviceOperation>(m, "DeviceOperation").def("__bool__", [](const DeviceOperation& o) { return bool(o); });
  m.def("check_handles", [] { buffers_in_flight().begin(); });
  m.def("devices_synchronized", [] { buffers_in_flight().synchronized(); });
  m.def("take_last_operation", &take_last_operation);
  m.def("begin_wait", &begin_wait);
  m.def("advance_step", [] { return ++g_step; });
  m.def("write_entry", &write_entry);
  m.def("close_log", &close_log, py::call_guard<py::gil_scoped_release>());  // readers may need it to drop a handle
  m.def("off", &off);
}

}  // namespace dtprof
