// Names that records carry as codes: operations, phases, and the threads that issued them.
#pragma once

#include <sys/syscall.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "thread_state.h"

namespace dtprof {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const unsigned char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c < 0x20) {
      char escape[8];
      snprintf(escape, sizeof escape, "\\u%04x", c);
      out += escape;
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + "\"";
}

std::string list(const std::vector<int64_t>& values) {
  std::string out = "[";
  for (size_t i = 0; i < values.size(); i++) out += (i ? "," : "") + std::to_string(values[i]);
  return out + "]";
}

class NameTable {
 public:
  uint16_t id(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = ids_.find(name);
    if (known != ids_.end()) return known->second;
    const auto id = static_cast<uint16_t>(std::min<uint64_t>(names_.size(), MAX_TABLE_ENTRIES));
    ids_[name] = id;
    names_.push_back(name);
    if (Log* log = g_log.load()) declare(log, id, name);
    return id;
  }
  void declare_all(Log* log) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < names_.size(); i++) declare(log, i, names_[i]);
  }
  std::mutex& mutex() { return mutex_; }

 private:
  static void declare(Log* log, size_t id, const std::string& name) {
    log->write_line("{\"k\":\"op\",\"id\":" + std::to_string(id) + ",\"name\":" + quoted(name) + "}");
  }
  std::mutex mutex_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, uint16_t> ids_;
};
NameTable& names() {
  static auto* table = new NameTable;
  return *table;
}

std::atomic<uint32_t> g_threads{0};

[[gnu::cold]] void declare_thread(Log* log, Thread& thread) {
  const uint32_t count = ++g_threads;
  thread.id = static_cast<uint16_t>(std::min<uint64_t>(count, MAX_TABLE_ENTRIES));
  if (count > MAX_TABLE_ENTRIES + 1) return;  // two of the last id say that there are more
  char name[32] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  log->write_line("{\"k\":\"thread\",\"id\":" + std::to_string(thread.id) + ",\"name\":" + quoted(name) +
                  ",\"native_id\":" + std::to_string(syscall(SYS_gettid)) + "}");
}
uint16_t thread_id(Log* log, Thread& thread) {
  if (thread.id == 0) declare_thread(log, thread);
  return thread.id;
}

}  // namespace
}  // namespace dtprof
