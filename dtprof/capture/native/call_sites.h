// Call sites: the innermost line of the user's program that issued an operation with the user's lines that led there, and
// the attribution labels that frameworks add to it.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "frames.h"
#include "names.h"

namespace py = pybind11;

namespace dtprof {
namespace {

class SiteTable {
 public:
  std::mutex& mutex() { return mutex_; }
  void forget() {  // mutex held
    ids_.clear();
    frames_.clear();
  }

  void configure(std::vector<std::string> tool, std::vector<std::string> library, std::vector<std::string> transparent) {
    tool_ = std::move(tool);
    library_ = std::move(library);
    transparent_ = std::move(transparent);
  }

  uint32_t here(Log* log, Thread& thread) {
    PyThreadState* state = PyGILState_GetThisThreadState();  // thread-local: valid without the GIL
    if (!state) return 0;
    [[maybe_unused]] Frame::Reading reading;
    const Frame innermost = Frame::innermost(state);
    // The last way to an operation comes again more often than not.
    const auto& last = thread.last_path;
    Frame f = innermost;
    uint32_t depth = 0;
    for (; depth < last.depth && f; depth++, f = f.caller()) {
      const auto& seen = last.frames[depth];
      if (f.code() != seen.code || (seen.instruction != kAny && f.instruction() != seen.instruction)) break;
    }
    const bool is_same = depth == last.depth && depth && !(last.is_whole && f);
    return is_same ? last.id : walk(log, thread, innermost);
  }

 private:
  static std::string utf8(PyObject* text) {
    const char* chars = text ? PyUnicode_AsUTF8(text) : nullptr;
    if (chars) return chars;
    PyErr_Clear();
    return "?";
  }
  static bool starts_with_any(const std::string& path, const std::vector<std::string>& prefixes) {
    for (const auto& p : prefixes)
      if (path.compare(0, p.size(), p) == 0) return true;
    return false;
  }
  Owner classify(PyCodeObject* code) const {  // GIL held
    const std::string path = utf8(code->co_filename);
    if (starts_with_any(path, tool_)) return Owner::kTool;
    if (path.empty() || path[0] == '<' || starts_with_any(path, library_)) return Owner::kLibrary;
    return Owner::kUser;
  }
  // Logging wrappers and the like that stand between the user's call and what was called.
  bool is_transparent(PyCodeObject* code) const {
    const std::string path = utf8(code->co_filename);
    for (const auto& end : transparent_)
      if (path.find(end) != std::string::npos) return true;
    return false;
  }
  // The top-level package of an installed file: "deepspeed" of ".../site-packages/deepspeed/runtime/engine.py".
  static std::string package_of(const std::string& path) {
    static const std::string kFolder = "-packages/";
    const size_t found = path.rfind(kFolder);
    if (found == std::string::npos) return "";
    const size_t begin = found + kFolder.size();
    return path.substr(begin, path.find_first_of("/.", begin) - begin);
  }
  Owner owner_of(Thread& thread, PyCodeObject* code) {
    auto& slot = thread.owners[(reinterpret_cast<uintptr_t>(code) >> 6) % std::size(thread.owners)];
    if (slot.code == code) return slot.owner;
    const Owner owner = look_up_owner(code);
    if (owner != Owner::kUnknown) slot = {code, owner};
    return owner;
  }
  [[gnu::cold]] Owner look_up_owner(PyCodeObject* code) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto known = owners_.find(code);
      if (known != owners_.end()) return known->second;
      if (owners_.size() >= kMostCodes) return Owner::kUnknown;
    }
    py::gil_scoped_acquire gil;
    const Owner owner = classify(code);
    std::lock_guard<std::mutex> lock(mutex_);
    if (owners_.emplace(code, owner).second) Py_INCREF(code);  // its address must not be used again
    return owner;
  }
  // The frames of the user's program, innermost first, and that of the installed package which the innermost called. The
  // package's own stand for them in a thread that runs none.
  struct Way {
    struct {
      PyCodeObject* code;
      int instruction;
    } frames[1 + MOST_CALLERS];
    size_t size = 0;
    PyCodeObject* library = nullptr;

    void add(PyCodeObject* code, int instruction) { frames[size++] = {code, instruction}; }
    uint64_t hash() const {
      uint64_t h = reinterpret_cast<uintptr_t>(library);
      for (size_t i = 0; i < size; i++) h = mix(mix(h) ^ reinterpret_cast<uintptr_t>(frames[i].code)) ^ static_cast<uint32_t>(frames[i].instruction);
      return mix(h);
    }
    static uint64_t mix(uint64_t h) {  // a bijection whose every output bit depends on all of the input (MurmurHash3)
      h = (h ^ h >> 33) * 0xff51afd7ed558ccd;
      h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53;
      return h ^ h >> 33;
    }
  };

  [[gnu::noinline]] uint32_t walk(Log* log, Thread& thread, const Frame& innermost) {
    Way way;
    Frame library = innermost;
    auto path = thread.last_path;  // a copy: to learn of code takes the GIL, and others may run in this thread meanwhile
    bool fits = true;
    uint32_t depth = 0, end = kDeepest;
    Frame f = innermost;
    for (; f && depth < end && way.size < std::size(way.frames); f = f.caller(), depth++) {
      PyCodeObject* const code = f.code();
      const Owner owner = owner_of(thread, code);
      const int instruction = owner == Owner::kUser ? f.instruction() : kAny;
      if (owner == Owner::kUser) {
        if (way.size == 0) end = std::min<uint32_t>(kDeepest, depth + FRAMES_OF_CALLERS);
        way.add(code, instruction);
      } else if (owner == Owner::kLibrary && !way.library && way.size == 0) {
        library = f;
        way.library = code;
      }
      fits = fits && owner != Owner::kUnknown && depth < std::size(path.frames);
      if (fits) path.frames[depth] = {code, instruction};
    }
    if (way.size == 0) {
      if (!way.library) return 0;
      way.add(way.library, library.instruction());
      fits = false;  // it hangs on an instruction that a path does not hold
    }
    const uint32_t id = identify(log, innermost, way);
    if (fits) {
      auto& last = thread.last_path;
      last.id = id;
      last.depth = depth;
      last.is_whole = !f;
      std::copy_n(path.frames, depth, last.frames);
    }
    return id;
  }

  uint32_t identify(Log* log, const Frame& innermost, Way way) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto known = ids_.find(way.hash());
      if (known == ids_.end() && ids_.size() >= kMostWays) {
        way.size = 1;
        known = ids_.find(way.hash());
      }
      if (known != ids_.end()) return known->second;
    }
    return declare(log, innermost, way);
  }

  [[gnu::cold]] uint32_t declare(Log* log, const Frame& innermost, const Way& way) {
    const auto [code, instruction] = way.frames[0];
    std::string entry, callers;
    {
      py::gil_scoped_acquire gil;
      entry = line_entry(code, instruction) + call_entry(innermost, code, instruction);
    }
    for (size_t i = 1; i < way.size; i++)
      callers += (i > 1 ? "," : "") + std::to_string(frame_id(log, way.frames[i].code, way.frames[i].instruction));
    uint32_t id;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto slot = ids_.emplace(way.hash(), static_cast<uint32_t>(ids_.size() + 1));
      id = slot.first->second;
      if (!slot.second) return id;
    }
    log->write_line("{\"k\":\"site\",\"id\":" + std::to_string(id) + entry +
                    (callers.empty() ? "" : ",\"callers\":[" + callers + "]") + "}");
    return id;
  }

  uint32_t frame_id(Log* log, PyCodeObject* code, int instruction) {
    uint32_t id;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto slot = frames_.emplace(std::pair{code, instruction}, static_cast<uint32_t>(frames_.size() + 1));
      id = slot.first->second;
      if (!slot.second) return id;
    }
    py::gil_scoped_acquire gil;
    log->write_line("{\"k\":\"frame\",\"id\":" + std::to_string(id) + line_entry(code, instruction) + "}");
    return id;
  }

  // What was called at a line, and the installed package that issued the operation.
  std::string call_entry(const Frame& innermost, PyCodeObject* code, int instruction) const {  // GIL held
    std::string api, package;
    for (Frame f = innermost; f; f = f.caller()) {
      PyCodeObject* const inner = f.code();
      if (package.empty() && classify(inner) == Owner::kLibrary && !is_transparent(inner))
        package = package_of(utf8(inner->co_filename));
      if (inner == code && f.instruction() == instruction) break;
      if (!is_transparent(inner)) api = utf8(name_of(inner));
    }
    return ",\"api\":" + dtprof::quoted(api) + (package.empty() ? "" : ",\"package\":" + dtprof::quoted(package));
  }

  static std::string line_entry(PyCodeObject* code, int instruction) {  // GIL held
    return ",\"file\":" + quoted(utf8(code->co_filename)) + ",\"line\":" + std::to_string(line_of(code, instruction)) +
           ",\"function\":" + quoted(utf8(name_of(code)));
  }

  static constexpr int kAny = -2;  // no frame is at this instruction
  static constexpr uint32_t kDeepest = 512;
  static constexpr size_t kMostWays = 65536;  // further ones go by the innermost line alone
  static constexpr size_t kMostCodes = 100000;  // code objects are kept for ever: a program may make them without end
  std::vector<std::string> tool_, library_, transparent_;
  std::mutex mutex_;  // never held while waiting for the GIL
  std::unordered_map<void*, Owner> owners_;
  std::unordered_map<uint64_t, uint32_t> ids_;  // by the hash of a way
  std::map<std::pair<PyCodeObject*, int>, uint32_t> frames_;
};
SiteTable& g_sites = *new SiteTable;  // never deleted, as the other tables
SiteTable& sites() { return g_sites; }

// Sites with a label are sites of their own, declared as `of` the site without.
class LabelledSites {
 public:
  std::mutex& mutex() { return mutex_; }
  void forget() { ids_.clear(); }  // mutex held

  uint32_t id(Log* log, Thread& thread, uint32_t site, uint32_t label) {
    if (label == 0) return site;
    const uint64_t key = static_cast<uint64_t>(label) << 32 | site;
    return thread.last_labelled.key == key ? thread.last_labelled.id : look_up(log, thread, site, label, key);
  }

 private:
  uint32_t look_up(Log* log, Thread& thread, uint32_t site, uint32_t label, uint64_t key) {
    bool is_new;
    uint32_t id;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto slot = ids_.emplace(key, kFirst + static_cast<uint32_t>(ids_.size()));
      is_new = slot.second;
      id = slot.first->second;
    }
    thread.last_labelled = {key, id};
    if (is_new)
      log->write_line("{\"k\":\"site\",\"id\":" + std::to_string(id) + ",\"of\":" + std::to_string(site) +
                      ",\"label\":" + std::to_string(label) + "}");
    return id;
  }

  static constexpr uint32_t kFirst = FIRST_LABELLED_SITE;  // plain sites count from 1
  std::mutex mutex_;
  std::unordered_map<uint64_t, uint32_t> ids_;
};
LabelledSites& g_labelled_sites = *new LabelledSites;
LabelledSites& labelled_sites() { return g_labelled_sites; }

}  // namespace
}  // namespace dtprof
