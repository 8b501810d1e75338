// Call sites: the innermost line of the user's program that issued an operation, found without the GIL where the
// interpreter's frames can be read directly, and the attribution labels that frameworks add to it.
#pragma once

#include <pybind11/pybind11.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "frames.h"
#include "names.h"

namespace py = pybind11;

namespace dtprof {
namespace {

struct SiteHash {
  size_t operator()(const SiteKey& key) const {
    return (std::hash<void*>()(key.code) * 31 + key.instruction) ^ std::hash<void*>()(key.library) * 7;
  }
};

class SiteTable {
 public:
  std::mutex& mutex() { return mutex_; }
  void forget() { ids_.clear(); }  // mutex held

  void configure(std::vector<std::string> tool, std::vector<std::string> library, std::vector<std::string> transparent) {
    tool_ = std::move(tool);
    library_ = std::move(library);
    transparent_ = std::move(transparent);
  }

  uint32_t here(Log* log, Thread& thread) {
    PyThreadState* state = PyGILState_GetThisThreadState();  // thread-local: valid without the GIL
    return state ? walk(log, thread, state) : 0;
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
  uint32_t known_id(const SiteKey& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = ids_.find(key);
    return found == ids_.end() ? 0 : found->second;
  }
  uint32_t declare(Log* log, const SiteKey& key, const std::string& file, int line, const std::string& function,
                   const std::string& api, const std::string& package) {
    uint32_t id;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto slot = ids_.emplace(key, static_cast<uint32_t>(ids_.size() + 1));
      id = slot.first->second;
      if (!slot.second) return id;
    }
    log->write_line("{\"k\":\"site\",\"id\":" + std::to_string(id) + ",\"file\":" + quoted(file) +
                    ",\"line\":" + std::to_string(line) + ",\"function\":" + quoted(function) + ",\"api\":" + quoted(api) +
                    (package.empty() ? "" : ",\"package\":" + quoted(package)) + "}");
    return id;
  }

#ifdef DTPROF_READS_FRAMES
  // The frames of this thread cannot change while it is in here, so they are read without the GIL. The last way from a
  // line to an operation comes again more often than not.
  uint32_t walk(Log* log, Thread& thread, PyThreadState* state) {
    const Frame* innermost = innermost_frame(state);
    auto& last = thread.last_path;
    uint32_t depth = 0;
    const Frame* f = innermost;
    while (f && depth < last.depth && code_of(f) == last.tools[depth]) {
      f = caller_of(f);
      depth++;
    }
    if (f && depth == last.depth && last.key == key_of(f)) return last.id;
    return walk_far(log, thread, innermost);
  }

  static SiteKey key_of(const Frame* f) { return {code_of(f), instruction_of(f)}; }

  [[gnu::noinline]] uint32_t walk_far(Log* log, Thread& thread, const Frame* innermost) {
    SiteKey library{nullptr, 0};
    decltype(thread.last_path) path;
    bool fits = true;
    uint32_t depth = 0;
    for (const Frame* f = innermost; f && depth < 512; f = caller_of(f), depth++) {
      const SiteKey key = key_of(f);
      const Owner owner = owner_of(thread, code_of(f));
      if (owner == Owner::kUser) {
        const uint32_t id = identify(log, innermost, {key.code, key.instruction, library.code});
        if (fits) {
          path.key = key;
          path.id = id;
          path.depth = depth;
          thread.last_path = path;
        }
        return id;
      }
      if (owner == Owner::kLibrary && !library.code) library = key;
      fits = fits && owner != Owner::kUnknown && depth < std::size(path.tools);
      if (fits) path.tools[depth] = code_of(f);
    }
    return library.code ? identify(log, innermost, {library.code, library.instruction, library.code}) : 0;
  }

  [[gnu::noinline]] uint32_t identify(Log* log, const Frame* innermost, const SiteKey& key) {
    if (const uint32_t id = known_id(key)) return id;
    auto* code = static_cast<PyCodeObject*>(key.code);
    std::string file, function, api, package;
    int line;
    {
      py::gil_scoped_acquire gil;
      line = PyCode_Addr2Line(code, key.instruction * static_cast<int>(sizeof(_Py_CODEUNIT)));
      file = utf8(code->co_filename);
      function = utf8(name_of(code));
      for (const Frame* f = innermost; f; f = caller_of(f)) {
        if (package.empty() && classify(code_of(f)) == Owner::kLibrary && !is_transparent(code_of(f)))
          package = package_of(utf8(code_of(f)->co_filename));
        if (code_of(f) == key.code && instruction_of(f) == key.instruction) break;
        if (!is_transparent(code_of(f))) api = utf8(name_of(code_of(f)));
      }
    }
    return declare(log, key, file, line, function, api, package);
  }
#else
  // Other interpreters: the public frame API, under the GIL.
  uint32_t walk(Log* log, Thread& thread, PyThreadState*) {
    py::gil_scoped_acquire gil;
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    SiteKey found{nullptr, 0};
    void* library = nullptr;
    int line = 0;
    std::string api, inner, package;
    bool user = false;
    for (int depth = 0; frame && depth < 512 && !user; depth++) {
      PyCodeObject* code = PyFrame_GetCode(frame);
      const Owner owner = owner_of(thread, code);  // keeps the code object alive
      user = owner == Owner::kUser;
      if (user || (owner == Owner::kLibrary && !found.code)) {
        found = SiteKey{code, PyFrame_GetLasti(frame)};
        line = PyFrame_GetLineNumber(frame);
        api = inner;
      }
      if (!library && owner == Owner::kLibrary) library = code;
      if (package.empty() && owner == Owner::kLibrary && !is_transparent(code)) package = package_of(utf8(code->co_filename));
      if (!user && !is_transparent(code)) inner = utf8(name_of(code));
      Py_DECREF(code);
      PyFrameObject* back = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = back;
    }
    Py_XDECREF(frame);
    if (!found.code) return 0;
    found.library = library;
    if (const uint32_t id = known_id(found)) return id;
    auto* code = static_cast<PyCodeObject*>(found.code);
    return declare(log, found, utf8(code->co_filename), line, utf8(name_of(code)), api, package);
  }
#endif

  static constexpr size_t kMostCodes = 100000;  // code objects are kept for ever: a program may make them without end
  std::vector<std::string> tool_, library_, transparent_;
  std::mutex mutex_;  // never held while waiting for the GIL
  std::unordered_map<void*, Owner> owners_;
  std::unordered_map<SiteKey, uint32_t, SiteHash> ids_;
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
