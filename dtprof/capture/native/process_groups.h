// Process groups by address: the code that records carry, and the sequence numbers of their operations.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <mutex>
#include <unordered_map>

#include "names.h"

namespace py = pybind11;

namespace dtprof {
namespace {

struct Group {
  uint16_t id;
  bool gloo;  // completions can be observed on CPU tensors
  std::atomic<uint32_t> collectives{0}, p2ps{0};
  std::atomic<uint32_t> barriers{0};  // passed
  c10::weak_intrusive_ptr<c10d::ProcessGroup> weak;  // keeps the address from being used again, not the group alive
};
PyObject* g_on_group = nullptr;  // called with (id, name) once a group, to add what only Python knows

bool uses_gloo(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  try {
    return group->getBackend(c10::DeviceType::CPU)->getBackendName() == "gloo";
  } catch (...) {
    return false;
  }
}

struct GroupTable {
  std::mutex mutex;  // never held while waiting for the GIL
  std::unordered_map<c10d::ProcessGroup*, Group*> known;
};
GroupTable& groups() {
  static auto* table = new GroupTable;
  return *table;
}
Group* known_group(c10d::ProcessGroup* address) {
  std::lock_guard<std::mutex> lock(groups().mutex);
  const auto found = groups().known.find(address);
  return found == groups().known.end() ? nullptr : found->second;
}

// Throws what a signal handler of the job raises meanwhile.
[[gnu::cold]] // Torch names the groups that it creates; those of torchft, whose backend is Python, have none.
std::string name_of(const c10d::ProcessGroup& group) {
  try {
    return group.getGroupName();
  } catch (const c10::Error&) {
    return "unnamed group " + std::to_string(reinterpret_cast<uintptr_t>(&group));
  }
}
Group* look_up_group(Log* log, Thread& thread, c10d::ProcessGroup* address) {
  const auto group = c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(address);
  Group* found = known_group(address);
  bool is_new = false;
  if (!found) {
    const bool gloo = uses_gloo(group);
    std::lock_guard<std::mutex> lock(groups().mutex);
    Group*& slot = groups().known[address];
    if (!slot) {
      slot = new Group{static_cast<uint16_t>(std::min<uint64_t>(groups().known.size() - 1, MAX_TABLE_ENTRIES)), gloo,
                       {0}, {0}, {0}, c10::weak_intrusive_ptr<c10d::ProcessGroup>(group)};
      is_new = true;
    }
    found = slot;
  }
  thread.last_group = {address, found};
  if (is_new) {
    const std::string name = name_of(*group);
    log->write_line("{\"k\":\"group\",\"id\":" + std::to_string(found->id) + ",\"name\":" + quoted(name) +
                    ",\"description\":" + quoted(group->getGroupDesc()) + ",\"size\":" + std::to_string(group->getSize()) +
                    ",\"rank\":" + std::to_string(group->getRank()) + "}");
    if (g_on_group && Py_IsInitialized()) {
      py::gil_scoped_acquire gil;
      PyObject* result = PyObject_CallFunction(g_on_group, "is", static_cast<int>(found->id), name.c_str());
      if (!result) throw py::error_already_set();  // the job's own: errors of dtprof are caught in Python
      Py_DECREF(result);
    }
  }
  return found;
}
Group* group_of(Log* log, Thread& thread, c10d::ProcessGroup* address) {
  return thread.last_group.address == address ? thread.last_group.group : look_up_group(log, thread, address);
}

}  // namespace
}  // namespace dtprof
