// The native tap: records every c10d operation of this process without taking the GIL.
//
// A boxed kernel at DispatchKey::BackendSelect sees each operation once, on its way to whatever back end, writes a
// record into a memory-mapped segment, redispatches, and completes the record in place. Nothing here may change what
// the job computes, raise into it, or block it. Layout and codes: run_format/schema.py, through schema.h.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030C0000 && __has_include(<internal/pycore_frame.h>)
#define DTPROF_FAST_FRAMES 1
#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#endif
#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cxxabi.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include "schema.h"

namespace py = pybind11;

namespace dtprof {
namespace {

uint64_t clock_ns(clockid_t id) {
  timespec t;
  clock_gettime(id, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}
uint64_t now() { return clock_ns(CLOCK_MONOTONIC); }

// ---- the record and the segments that hold it ----------------------------------------------------------------------

struct Record {
  std::atomic<uint8_t> state;
  uint8_t kind, dtype, reduce_op;
  uint16_t op, thread, group;
  uint8_t flags, waits;
  uint32_t seq;
  int32_t peer, tag;
  uint32_t site, step;
  uint64_t issued_ns, numel;
  float returned_after, waited_from, waited_for, done_after;
};
static_assert(sizeof(Record) == RECORD_SIZE);
#define DTPROF_AT(field, at) static_assert(offsetof(Record, field) == at)
DTPROF_AT(op, AT_OP);
DTPROF_AT(group, AT_GROUP);
DTPROF_AT(flags, AT_FLAGS);
DTPROF_AT(waits, AT_WAITS);
DTPROF_AT(seq, AT_SEQ);
DTPROF_AT(tag, AT_TAG);
DTPROF_AT(step, AT_STEP);
DTPROF_AT(issued_ns, AT_ISSUED_NS);
DTPROF_AT(numel, AT_NUMEL);
DTPROF_AT(done_after, AT_DONE_AFTER);

// What is kept of events whose segment is dropped: sums by what was done where.
struct Sums {
  uint64_t events = 0, failed = 0, numel = 0, waited_ns = 0, took_ns = 0;
};
using SumKey = std::tuple<uint8_t, uint16_t, uint16_t, uint8_t, uint32_t>;  // kind, op, group, dtype, site
using Totals = std::map<SumKey, Sums>;

// Counts the forks from the first recorded process to this one. What a forked process inherits is its parent's to write.
std::atomic<uint32_t> g_process{0};

struct Segment {
  char* base = nullptr;
  uint32_t process = 0;
  uint32_t number = 0;
  bool sealed = false;  // nothing writes to it again; guarded by the log's mutex, as are the totals
  Totals totals;
  std::atomic<uint32_t> generation{0};
  // Records that nothing writes to any more; a segment is sealed once all are. On a line of its own: threads of the back
  // end count here, and the thread that issues must not wait for that line.
  alignas(64) std::atomic<uint64_t> closed{0};
  alignas(64) char end_[1] = {};

  template <class T>
  T& at(uint64_t offset) {
    return *reinterpret_cast<T*>(base + offset);
  }
  std::atomic<uint64_t>& head() { return at<std::atomic<uint64_t>>(HEAD_AT_HEAD); }
  std::atomic<uint64_t>& capture_ns() { return at<std::atomic<uint64_t>>(HEAD_AT_CAPTURE_NS); }
  std::atomic<uint64_t>& dropped() { return at<std::atomic<uint64_t>>(HEAD_AT_DROPPED); }
  std::atomic<uint64_t>& errors() { return at<std::atomic<uint64_t>>(HEAD_AT_ERRORS); }
  std::atomic<uint32_t>& marks() { return at<std::atomic<uint32_t>>(HEAD_AT_MARKS); }
  Record* record(uint64_t i) { return reinterpret_cast<Record*>(base + HEADER_SIZE + i * RECORD_SIZE); }

  void add_up() {
    totals.clear();
    for (uint64_t i = 0; i < SEGMENT_CAPACITY; i++) {
      const Record& r = *record(i);
      const uint8_t state = r.state.load(std::memory_order_acquire);
      if (state == STATE_EMPTY) continue;
      const bool operation = r.kind == KIND_COLLECTIVE || r.kind == KIND_P2P;
      Sums& sums = totals[{r.kind, r.op, operation ? r.group : uint16_t{0}, r.dtype, r.site}];
      sums.events++;
      sums.failed += state == STATE_FAILED;
      sums.numel = operation ? sums.numel + r.numel : std::max(sums.numel, r.numel);  // samples: the largest value
      sums.waited_ns += static_cast<uint64_t>(r.waited_for);
      if (state >= STATE_DONE) sums.took_ns += static_cast<uint64_t>(r.done_after);
    }
  }
};

// A sealed segment that the launcher has compressed.
struct Archive {
  uint32_t number;
  uint64_t bytes;
  Totals totals;
};

// One event being recorded. It stays valid for ever: segments are recycled, never unmapped, and a recycled one has
// another generation.
struct Event {
  Record* record = nullptr;
  Segment* segment = nullptr;
  uint32_t generation = 0;

  explicit operator bool() const { return record != nullptr; }
  bool current() const {
    return is_ours(segment) && segment->generation.load(std::memory_order_acquire) == generation;
  }
  static bool is_ours(const Segment* segment) {
    return segment->process == g_process.load(std::memory_order_relaxed);
  }

  // Move to done or failed once; whoever comes first decides.
  void complete(uint8_t state, uint64_t at = 0) const { complete(record, segment, state, at); }
  static void complete(Record* record, Segment* segment, uint8_t state, uint64_t at = 0) {
    uint8_t seen = record->state.load(std::memory_order_acquire);
    if (seen != STATE_ISSUED && seen != STATE_RETURNED) return;
    const float after = static_cast<float>((at ? at : now()) - record->issued_ns);
    while (seen == STATE_ISSUED || seen == STATE_RETURNED) {
      std::atomic_ref(record->done_after).store(after, std::memory_order_relaxed);
      if (record->state.compare_exchange_weak(seen, state, std::memory_order_acq_rel)) {
        segment->closed.fetch_add(1, std::memory_order_acq_rel);
        return;
      }
    }
  }
};

class Log {
 public:
  // Open the first segment; throws with errno's text when even that fails.
  Log(std::string folder, std::string header, uint32_t max_segments)
      : folder_(std::move(folder)), header_(std::move(header)), max_segments_(std::max<uint32_t>(max_segments, 3)) {
    if (!open_strings()) throw std::runtime_error(std::string("cannot open strings.jsonl: ") + strerror(errno));
    Segment* first = create();
    if (!first) throw std::runtime_error(std::string("cannot allocate the first segment: ") + strerror(errno));
    current_.store(first, std::memory_order_release);
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);  // the job's signals are not ours to take
    std::thread([this] { keep_a_spare(); }).detach();
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
  }

  Event claim() {
    for (;;) {
      Segment* segment = current_.load(std::memory_order_acquire);
      const uint64_t i = segment->head().fetch_add(1, std::memory_order_acq_rel);
      if (i < SEGMENT_CAPACITY) [[likely]]
        return {segment->record(i), segment, segment->generation.load(std::memory_order_relaxed)};
      if (!move_on(segment)) {
        segment->dropped().fetch_add(1, std::memory_order_relaxed);
        return {};
      }
    }
  }

  bool write_line(std::string line) {
    line.push_back('\n');
    {
      std::lock_guard<std::mutex> lock(strings_mutex_);
      // A program may have closed all descriptors, as daemons do, and given ours to a file of its own.
      struct stat seen;
      const bool is_ours = ::fstat(strings_, &seen) == 0 && seen.st_dev == strings_device_ && seen.st_ino == strings_inode_;
      if ((is_ours || open_strings()) &&
          ::write(strings_, line.data(), line.size()) == static_cast<ssize_t>(line.size()))
        return true;
    }
    mark(MARK_TRUNCATED);
    return false;
  }

  void mark(uint32_t bits) { current_.load(std::memory_order_acquire)->marks().fetch_or(bits); }
  Segment* current() { return current_.load(std::memory_order_acquire); }

 private:
  bool open_strings() {
    struct stat opened;
    strings_ = ::open((folder_ + "/strings.jsonl").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (strings_ < 0 || ::fstat(strings_, &opened) != 0) return false;
    strings_device_ = opened.st_dev;
    strings_inode_ = opened.st_ino;
    return true;
  }

  // Allocate the file of the next segment and map it; null with errno where that cannot be.
  char* map_new_file(char* at) {
    const std::string path = path_of(next_number_);
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0) return nullptr;
    // Allocated, not sparse: a full disk must be an error here and not a SIGBUS in the job.
    const int failed = posix_fallocate(fd, 0, SEGMENT_SIZE);
    const int flags = MAP_SHARED | MAP_POPULATE | (at ? MAP_FIXED : 0);
    void* base = failed ? MAP_FAILED : mmap(at, SEGMENT_SIZE, PROT_READ | PROT_WRITE, flags, fd, 0);
    ::close(fd);
    if (base != MAP_FAILED) return static_cast<char*>(base);
    ::unlink(path.c_str());
    errno = failed ? failed : errno;
    return nullptr;
  }

  Segment* create() {
    char* base = map_new_file(nullptr);
    if (!base) return nullptr;
    auto* segment = new Segment;
    segment->base = base;
    start(segment);
    segments_.push_back(segment);
    return segment;
  }

  // Write the header of a zeroed segment under its new number.
  void start(Segment* segment) {
    segment->number = next_number_++;
    memcpy(segment->base, header_.data(), std::min<size_t>(header_.size(), HEADER_SIZE));
    segment->at<uint32_t>(HEAD_AT_SEGMENT) = segment->number;
    segment->at<uint64_t>(HEAD_AT_OPENED_MONOTONIC_NS) = now();
    segment->at<uint64_t>(HEAD_AT_OPENED_REALTIME_NS) = clock_ns(CLOCK_REALTIME);
    segment->dropped().store(dropped_);
    segment->closed.store(0, std::memory_order_relaxed);
    segment->process = g_process.load(std::memory_order_relaxed);
    segment->head().store(0, std::memory_order_release);
  }

  std::string path_of(uint32_t number, const char* ending = "") const {
    char name[32];
    snprintf(name, sizeof name, "/events.%05u%s", number, ending);
    return folder_ + name;
  }

  // Put a new file in the place of an archived one.
  Segment* reopen() {
    Segment* segment = free_.back();
    if (!map_new_file(segment->base)) return nullptr;
    free_.pop_back();
    start(segment);
    return segment;
  }

  // Segments that nothing writes to again are added up and marked. The newest full one is left a while: handles of its
  // operations may still be waited for.
  void seal() {
    for (Segment* s : segments_) {
      if (s->sealed || s == spare_ || s->number + 1 >= current()->number) continue;
      if (s->closed.load(std::memory_order_acquire) < SEGMENT_CAPACITY) continue;
      s->generation.fetch_add(1, std::memory_order_acq_rel);
      s->add_up();
      s->sealed = true;
      s->marks().fetch_or(MARK_SEALED);
      give_back(s);  // adding up has read all of it
    }
  }

  // The pages leave the process, not the file.
  static void give_back(const Segment* segment) { madvise(segment->base, SEGMENT_SIZE, MADV_DONTNEED); }

  // What the launcher has compressed is given back: the file is gone, and holds its blocks only by our mapping.
  void release_archived() {
    for (Segment* s : segments_) {
      struct stat archive;
      if (!s->sealed || ::access(path_of(s->number).c_str(), F_OK) == 0 ||
          ::stat(path_of(s->number, ".z").c_str(), &archive) != 0)
        continue;
      archives_.push_back({s->number, static_cast<uint64_t>(archive.st_size), std::move(s->totals)});
      mmap(s->base, SEGMENT_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
      s->sealed = false;
      s->number = UINT32_MAX;
      free_.push_back(s);
    }
  }

  uint64_t bytes_used() const {
    uint64_t bytes = (segments_.size() - free_.size()) * SEGMENT_SIZE;
    for (const Archive& archive : archives_) bytes += archive.bytes;
    return bytes;
  }

  // Drop the oldest segment at rest behind the first quarter of the room. A plain one starts anew under its next number
  // and is returned: that needs no room on the disk.
  std::pair<bool, Segment*> drop_oldest() {
    std::map<uint32_t, std::pair<Segment*, const Archive*>> kept;
    for (Segment* s : segments_)
      if (s->number != UINT32_MAX) kept[s->number] = {s, nullptr};
    for (const Archive& archive : archives_) kept[archive.number] = {nullptr, &archive};
    uint64_t room = max_segments_ * SEGMENT_SIZE / 4;
    uint32_t next = 0;
    for (const auto& [number, what] : kept) {
      const auto& [segment, archive] = what;
      const uint64_t bytes = archive ? archive->bytes : SEGMENT_SIZE;
      if (number == next && bytes <= room) {  // among the first
        next++;
        room -= bytes;
        continue;
      }
      room = 0;
      if (archive) {
        ::unlink(path_of(number, ".z").c_str());
        forget(archive->totals);
        archives_.erase(archives_.begin() + (archive - archives_.data()));
        return {true, nullptr};
      }
      if (!segment->sealed) continue;
      if (::rename(path_of(number).c_str(), path_of(next_number_).c_str()) != 0) continue;  // being archived right now
      ::unlink(path_of(number, ".z").c_str());
      forget(segment->totals);
      memset(segment->base, 0, SEGMENT_SIZE);
      segment->sealed = false;
      start(segment);
      return {true, segment};
    }
    return {false, nullptr};
  }

  // Count events that are being dropped, and keep their sums in dropped.json.
  void forget(const Totals& totals) {
    for (const auto& [key, sums] : totals) {
      Sums& sum = forgotten_[key];
      dropped_ += sums.events;
      sum.events += sums.events;
      sum.failed += sums.failed;
      sum.numel = std::get<0>(key) == KIND_SAMPLE ? std::max(sum.numel, sums.numel) : sum.numel + sums.numel;
      sum.waited_ns += sums.waited_ns;
      sum.took_ns += sums.took_ns;
    }
    std::string text = "{\"events\":" + std::to_string(dropped_) + ",\"totals\":[";
    const char* comma = "\n";
    for (const auto& [key, sums] : forgotten_) {
      const auto& [kind, op, group, dtype, site] = key;
      char row[256];
      snprintf(row, sizeof row, "%s[%u,%u,%u,%u,%u,%lu,%lu,%lu,%lu,%lu]", comma, kind, op, group, dtype, site,
               sums.events, sums.failed, sums.numel, sums.waited_ns, sums.took_ns);
      text += row;
      comma = ",\n";
    }
    text += "]}\n";
    const std::string file = folder_ + "/dropped.json", draft = folder_ + "/.dropped.json";
    const int fd = ::open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) return;
    const bool whole = ::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
    ::close(fd);
    if (whole) ::rename(draft.c_str(), file.c_str());
  }

  Segment* prepare() {
    seal();
    release_archived();
    for (;;) {
      if (bytes_used() + SEGMENT_SIZE <= max_segments_ * SEGMENT_SIZE)
        if (Segment* segment = free_.empty() ? create() : reopen()) return segment;
      const auto [dropped, segment] = drop_oldest();
      if (segment || !dropped) return segment;  // else an archive went: there may be room now
    }
  }

  [[gnu::cold]] bool move_on(Segment* full) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (current_.load(std::memory_order_acquire) != full) return true;
    if (stopped_) return false;
    Segment* next = spare_ ? spare_ : prepare();
    spare_ = nullptr;
    if (!next) {
      stopped_ = true;
      mark(MARK_TRUNCATED);
      return false;
    }
    current_.store(next, std::memory_order_release);
    retired_ = full;
    lock.unlock();
    wake_.notify_one();
    return true;
  }

  void keep_a_spare() {
    pthread_setname_np(pthread_self(), "dtprof-log");
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      // The first spare is made when the first segment is half full: short jobs never pay for it.
      while (!retired_ && current_.load()->head().load() < SEGMENT_CAPACITY / 2)
        wake_.wait_for(lock, std::chrono::seconds(1));
      if (!spare_ && !stopped_) spare_ = prepare();
      if (retired_) give_back(retired_);
      retired_ = nullptr;
      seal();
      wake_.wait_for(lock, std::chrono::seconds(1), [this] { return retired_ != nullptr; });
    }
  }

  const std::string folder_, header_;
  const uint32_t max_segments_;
  std::mutex strings_mutex_;  // guards the three below
  int strings_ = -1;
  dev_t strings_device_ = 0;
  ino_t strings_inode_ = 0;
  std::atomic<Segment*> current_{nullptr};
  std::mutex mutex_;  // guards all below; never held while waiting for the GIL
  std::condition_variable wake_;
  std::vector<Segment*> segments_;  // all that were ever mapped
  std::vector<Segment*> free_;      // of them, those whose file has been archived
  std::vector<Archive> archives_;
  Totals forgotten_;
  Segment* spare_ = nullptr;
  Segment* retired_ = nullptr;
  bool stopped_ = false;
  uint32_t next_number_ = 0;
  uint64_t dropped_ = 0;
};

std::atomic<Log*> g_log{nullptr};  // a Log is never deleted: back-end threads may complete events at any time
std::atomic<uint32_t> g_step{0};
std::atomic<uint32_t> g_backward_site{0};

// ---- what a thread remembers -----------------------------------------------------------------------------------------

// Torch and dtprof; other installed code; the user's program; one code object too many to be kept.
enum class Owner : uint8_t { kTool, kLibrary, kUser, kUnknown };

struct SiteKey {
  void* code;
  int instruction;
  bool operator==(const SiteKey& other) const { return code == other.code && instruction == other.instruction; }
};

struct Group;
struct Spare;

// All in one place, found once an operation: the address of a thread-local variable is a call of its own. What every
// operation needs is on the first two lines of the cache.
struct alignas(64) Thread {
  uint16_t id = 0;
  uint16_t num_spares = 0;
  uint32_t label = 0;  // on whose behalf it works, as Python last said; an id of a `label` entry
  uint32_t p2p_labels = 0;  // how many t_p2p_labels holds
  uint32_t operations = 0;
  struct {
    c10d::ProcessGroup* address = nullptr;
    Group* group = nullptr;
  } last_group;
  struct {
    uint64_t key = 0;
    uint32_t id = 0;
  } last_labelled;
  Spare* spares = nullptr;  // places of handles that are gone
  struct alignas(64) {
    void* tools[5] = {};  // code of the frames that called each other, innermost first, none of the user's
    SiteKey key{nullptr, 0};  // the user's frame that called them
    uint32_t id = 0;
    uint32_t depth = 0;  // how many there are
  } last_path;
  struct {
    void* code = nullptr;
    Owner owner{};
  } owners[64];
};
thread_local constinit Thread t_thread;
Thread& this_thread() {
  Thread* thread = &t_thread;
  asm("" : "+r"(thread));  // else the compiler, which knows what it is, finds it anew at each use
  return *thread;
}
thread_local std::deque<uint32_t> t_p2p_labels;  // of the point-to-point operations to come

// ---- names ---------------------------------------------------------------------------------------------------------

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

// ---- process groups --------------------------------------------------------------------------------------------------

struct Group {
  uint16_t id;
  bool gloo;  // completions can be observed on CPU tensors
  std::atomic<uint32_t> collectives{0}, p2ps{0};
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
[[gnu::cold]] Group* look_up_group(Log* log, Thread& thread, c10d::ProcessGroup* address) {
  const auto group = c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(address);
  Group* found = known_group(address);
  bool is_new = false;
  if (!found) {
    const bool gloo = uses_gloo(group);
    std::lock_guard<std::mutex> lock(groups().mutex);
    Group*& slot = groups().known[address];
    if (!slot) {
      slot = new Group{static_cast<uint16_t>(std::min<uint64_t>(groups().known.size() - 1, MAX_TABLE_ENTRIES)), gloo,
                       {0}, {0}, c10::weak_intrusive_ptr<c10d::ProcessGroup>(group)};
      is_new = true;
    }
    found = slot;
  }
  thread.last_group = {address, found};
  if (is_new) {
    const std::string name = group->getGroupName();
    log->write_line("{\"k\":\"group\",\"id\":" + std::to_string(found->id) + ",\"name\":" + quoted(name) +
                    ",\"description\":" + quoted(group->getGroupDesc()) + ",\"size\":" + std::to_string(group->getSize()) +
                    ",\"rank\":" + std::to_string(group->getRank()) + "}");
    if (g_on_group && Py_IsInitialized()) {
      py::gil_scoped_acquire gil;
      PyObject* result = PyObject_CallFunction(g_on_group, "is", static_cast<int>(found->id), name.c_str());
      if (!result) throw py::error_already_set();  // none of ours: those are caught in Python
      Py_DECREF(result);
    }
  }
  return found;
}
Group* group_of(Log* log, Thread& thread, c10d::ProcessGroup* address) {
  return thread.last_group.address == address ? thread.last_group.group : look_up_group(log, thread, address);
}

// ---- lines of the user's code ----------------------------------------------------------------------------------------

struct SiteHash {
  size_t operator()(const SiteKey& key) const { return std::hash<void*>()(key.code) * 31 + key.instruction; }
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
                   const std::string& api) {
    uint32_t id;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto slot = ids_.emplace(key, static_cast<uint32_t>(ids_.size() + 1));
      id = slot.first->second;
      if (!slot.second) return id;
    }
    log->write_line("{\"k\":\"site\",\"id\":" + std::to_string(id) + ",\"file\":" + quoted(file) +
                    ",\"line\":" + std::to_string(line) + ",\"function\":" + quoted(function) + ",\"api\":" + quoted(api) + "}");
    return id;
  }

#ifdef DTPROF_FAST_FRAMES
  // The frames of this thread cannot change while it is in here, so they are read without the GIL. The last way from a
  // line to an operation comes again more often than not.
  uint32_t walk(Log* log, Thread& thread, PyThreadState* state) {
    if (!state->cframe) return 0;
    _PyInterpreterFrame* innermost = state->cframe->current_frame;
    auto& last = thread.last_path;
    uint32_t depth = 0;
    _PyInterpreterFrame* f = innermost;
    while (f && depth < last.depth && f->f_code == last.tools[depth]) {
      f = f->previous;
      depth++;
    }
    if (f && depth == last.depth && last.key == key_of(f)) return last.id;
    return walk_far(log, thread, innermost);
  }

  static SiteKey key_of(const _PyInterpreterFrame* f) {
    return {f->f_code, static_cast<int>(f->prev_instr - _PyCode_CODE(f->f_code))};
  }

  [[gnu::noinline]] uint32_t walk_far(Log* log, Thread& thread, _PyInterpreterFrame* innermost) {
    SiteKey library{nullptr, 0};
    decltype(thread.last_path) path;
    bool fits = true;
    uint32_t depth = 0;
    for (_PyInterpreterFrame* f = innermost; f && f->f_code && depth < 512; f = f->previous, depth++) {
      const SiteKey key = key_of(f);
      const Owner owner = owner_of(thread, f->f_code);
      if (owner == Owner::kUser) {
        const uint32_t id = identify(log, innermost, key);
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
      if (fits) path.tools[depth] = f->f_code;
    }
    return library.code ? identify(log, innermost, library) : 0;
  }

  [[gnu::noinline]] uint32_t identify(Log* log, _PyInterpreterFrame* innermost, const SiteKey& key) {
    if (const uint32_t id = known_id(key)) return id;
    auto* code = static_cast<PyCodeObject*>(key.code);
    std::string file, function, api;
    int line;
    {
      py::gil_scoped_acquire gil;
      line = PyCode_Addr2Line(code, key.instruction * static_cast<int>(sizeof(_Py_CODEUNIT)));
      file = utf8(code->co_filename);
      function = utf8(code->co_qualname);
      for (_PyInterpreterFrame* f = innermost; f && f->f_code; f = f->previous) {
        const SiteKey here = key_of(f);
        if (here == key) break;
        if (!is_transparent(f->f_code)) api = utf8(f->f_code->co_qualname);
      }
    }
    return declare(log, key, file, line, function, api);
  }
#else
  // Other interpreters: the public frame API, under the GIL.
  uint32_t walk(Log* log, Thread& thread, PyThreadState*) {
    py::gil_scoped_acquire gil;
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    SiteKey found{nullptr, 0};
    int line = 0;
    std::string api, inner;
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
      if (!user && !is_transparent(code)) inner = utf8(code->co_qualname);
      Py_DECREF(code);
      PyFrameObject* back = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = back;
    }
    Py_XDECREF(frame);
    if (!found.code) return 0;
    if (const uint32_t id = known_id(found)) return id;
    auto* code = static_cast<PyCodeObject*>(found.code);
    return declare(log, found, utf8(code->co_filename), line, utf8(code->co_qualname), api);
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

// ---- on whose behalf ---------------------------------------------------------------------------------------------------

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

// ---- sizes that differ between peers ---------------------------------------------------------------------------------

class SizesTable {
 public:
  std::mutex& mutex() { return mutex_; }
  void forget() { ids_.clear(); }  // mutex held

  // Id of the pair of lists, declared at first sight; a negative number from their hash once the table is full.
  int32_t id(Log* log, const std::vector<int64_t>& inputs, const std::vector<int64_t>& outputs) {
    const std::string text = "\"inputs\":" + list(inputs) + ",\"outputs\":" + list(outputs);
    int32_t id;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto known = ids_.find(text);
      if (known != ids_.end()) return known->second;
      if (ids_.size() >= MAX_TABLE_ENTRIES) return -1 - static_cast<int32_t>(std::hash<std::string>()(text) & 0x3fffffff);
      id = static_cast<int32_t>(ids_.size() + 1);
      ids_[text] = id;
    }
    log->write_line("{\"k\":\"sizes\",\"id\":" + std::to_string(id) + "," + text + "}");
    return id;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, int32_t> ids_;
};
SizesTable& sizes() {
  static auto* table = new SizesTable;
  return *table;
}

[[gnu::cold, noreturn]] void refuse_class() { throw std::runtime_error("an argument of another class than the schema says"); }

// The object that an argument of a custom class holds, or null. The operator's schema has fixed its class, so that the
// checks of IValue::toCustomClass, dearer than all the rest, are left out; nothing is counted as one more holder.
template <class T>
T* held(const c10::IValue& value) {
  if (!value.isObject()) [[unlikely]] refuse_class();
  const c10::IValue& capsule = value.toObjectRef().getSlot(0);
  if (!capsule.isCapsule()) [[unlikely]] refuse_class();
  const auto* target = static_cast<const c10::intrusive_ptr_target*>(capsule.internalToPointer());
  return static_cast<T*>(const_cast<c10::intrusive_ptr_target*>(target));
}

int64_t count_of(const at::Tensor& tensor) {
  const auto count = tensor.is_sparse() ? c10::SymInt(tensor._nnz()) : tensor.unsafeGetTensorImpl()->sym_numel();
  return count.maybe_as_int().value_or(0);
}

// What one tensor argument (a tensor, a list, a list of lists) holds.
struct Elements {
  uint64_t total = 0;
  int64_t first = -1;
  int dtype = -1;
  bool device = false, meta = false, uneven = false;

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const int64_t n = count_of(tensor);
    total += n;
    if (dtype < 0) {
      const c10::DeviceType device_type = tensor.device().type();
      dtype = static_cast<int>(tensor.scalar_type());
      meta = device_type == c10::DeviceType::Meta;
      device = device_type != c10::DeviceType::CPU;
    }
    if (first < 0) first = n;
    else uneven |= n != first;
  }
  void add(const c10::IValue& value) {
    if (value.isTensor()) add_tensor(value);
    else if (value.isList()) add_list(value);
  }

 private:
  void add_tensor(const c10::IValue& value) {
    const at::Tensor& tensor = value.toTensor();
    add(tensor);
  }
  void add_list(const c10::IValue& list) {
    if (!list.isList()) __builtin_unreachable();
    for (const c10::IValue& item : list.toListRef()) {
      if (item.isTensor()) [[likely]]
        add_tensor(item);
      else if (item.isList())
        add_list(item);
    }
  }
};

// Append the elements of each tensor of an argument.
void list_counts(const c10::IValue& value, std::vector<int64_t>& counts) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined()) counts.push_back(count_of(tensor));
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) list_counts(item, counts);
  }
}

// ---- the tap -----------------------------------------------------------------------------------------------------------

// The place of a handle that is gone, for one to come in this thread: the general allocator is a good part of a launch.
// A thread that only destroys handles keeps so many places, and gives all others back.
struct Spare {
  Spare* next;
};
constexpr uint16_t kMostSpares = 256;

// Gives them back when the thread ends.
struct SparesOfThread {
  Thread* thread = nullptr;
  ~SparesOfThread() {
    while (Spare* spare = thread->spares) {
      thread->spares = spare->next;
      ::operator delete(spare);
    }
    thread->num_spares = kMostSpares;  // handles that are destroyed later still leave none
  }
};
thread_local SparesOfThread t_spares;

// Times every wait, from Python or C++, and completes events whose back end has no future (gloo's send, receive and
// reduce_scatter). Everything else is the back end's own Work.
struct WatchedWork final : c10d::Work {
  WatchedWork(c10d::OpType type, const Event& event, bool has_future)
      : c10d::Work(-1, type), event_(event), has_future_(has_future) {}

  // Take the place of the work in its box, which was made for this call by the kernel below.
  static void replace(Thread& thread, c10::IValue& boxed, c10d::OpType type, const Event& event, bool has_future) {
    auto watched = c10::intrusive_ptr<WatchedWork>::unsafe_steal_from_new(new (thread) WatchedWork(type, event, has_future));
    watched->work_ = c10::static_intrusive_pointer_cast<c10d::Work>(std::move(boxed).toCapsule());
    boxed = c10::IValue::make_capsule(std::move(watched));
  }

  static void* operator new(size_t size, Thread& thread) {
    Spare* spare = thread.spares;
    if (!spare) return ::operator new(size);
    thread.spares = spare->next;
    thread.num_spares--;
    return spare;
  }
  static void operator delete(void* place, Thread&) { operator delete(place); }
  static void operator delete(void* place) {
    Thread& thread = this_thread();
    if (thread.num_spares >= kMostSpares) return ::operator delete(place);
    if (!thread.spares) t_spares.thread = &thread;
    thread.spares = new (place) Spare{thread.spares};
    thread.num_spares++;
  }

  ~WatchedWork() override {
    if (has_future_ || !recording()) return;
    bool completed = false, succeeded = false;
    try {
      completed = work_->isCompleted();
      succeeded = completed && work_->isSuccess();
    } catch (...) {
    }
    if (completed) event_.complete(succeeded ? STATE_DONE : STATE_FAILED);
    else if (event_.record->state.load(std::memory_order_acquire) < STATE_DONE)
      event_.segment->closed.fetch_add(1, std::memory_order_acq_rel);
  }

  bool wait(std::chrono::milliseconds timeout) override {
    if (!recording()) return work_->wait(timeout);
    const uint64_t from = now();
    Record* r = event_.record;
    const std::atomic_ref waits(r->waits);  // two threads may wait for one operation
    const uint8_t before = waits.load(std::memory_order_relaxed);
    if (before == 0) std::atomic_ref(r->waited_from).store(static_cast<float>(from - r->issued_ns), std::memory_order_relaxed);
    if (before < 255) waits.store(before + 1, std::memory_order_relaxed);
    try {
      const bool ok = work_->wait(timeout);
      waited(from, STATE_DONE);
      return ok;
    } catch (...) {
      waited(from, STATE_FAILED);
      throw;
    }
  }
  bool isCompleted() override {
    asked();
    const bool completed = work_->isCompleted();
    if (completed && !has_future_ && recording()) event_.complete(work_->isSuccess() ? STATE_DONE : STATE_FAILED);
    return completed;
  }
  bool isSuccess() const override {
    asked();
    return work_->isSuccess();
  }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override {
    asked();
    return work_->result();
  }
  void synchronize() override {
    asked();
    work_->synchronize();
  }
  void blockCurrentStream() override {
    asked();
    work_->blockCurrentStream();
  }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    asked();
    return work_->getFuture();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    asked();
    return work_->getFutureResult();
  }
  float getDuration() const override { return work_->getDuration(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }

 private:
  bool recording() const { return g_log.load(std::memory_order_acquire) && event_.current(); }
  void asked() const {
    if (recording()) std::atomic_ref(event_.record->flags).fetch_or(FLAG_ASKED, std::memory_order_relaxed);
  }
  void waited(uint64_t from, uint8_t state) {
    if (!recording()) return;
    const uint64_t at = now();
    std::atomic_ref(event_.record->waited_for).fetch_add(static_cast<float>(at - from), std::memory_order_relaxed);
    event_.complete(state, at);
  }

  c10::intrusive_ptr<c10d::Work> work_;
  Event event_;
  bool has_future_;
};

// The cost of recording operations, metered on one in sixteen: reading the clock is a good part of it.
struct Meter {
  static constexpr uint32_t kEvery = 16;
  static bool due(Thread& thread) { return ++thread.operations % kEvery == 0; }
  static void add(Segment* segment, uint64_t ns) {
    segment->capture_ns().fetch_add(ns * kEvery, std::memory_order_relaxed);
  }
};

[[gnu::cold]] void count_error() {
  if (Log* log = g_log.load()) log->current()->errors().fetch_add(1, std::memory_order_relaxed);
}

class Tap final : public c10::OperatorKernel {
 public:
  Tap(uint16_t op, const std::string& name, const c10::FunctionSchema& schema)
      : op_(op),
        arguments_(static_cast<int>(schema.arguments().size())),
        returns_(static_cast<int>(schema.returns().size())),
        p2p_(name == "send" || name.compare(0, 4, "recv") == 0),
        empty_(name.find("barrier") != std::string::npos) {
    for (int i = 0; i < arguments_; i++) {
      const std::string& argument = schema.arguments()[i].name();
      if (argument == "process_group") group_ = i;
      else if (argument == "reduce_op") reduce_op_ = i;
      else if (argument == "root_rank" || argument == "dst" || argument == "src") peer_ = i;
      else if (argument == "tag") tag_ = i;
      else if (argument == "async_op" || argument == "asyncOp") async_ = i;
      else if (argument == "output_split_sizes") output_splits_ = i;
      else if (argument == "input_split_sizes") input_splits_ = i;
      else if (argument.compare(0, 6, "output") == 0 && outputs_ < 0) outputs_ = i;
      else if (argument.compare(0, 5, "input") == 0 && inputs_ < 0) inputs_ = i;
    }
    if (inputs_ < 0) inputs_ = 0;
  }

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    constexpr c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    Log* log = g_log.load(std::memory_order_acquire);
    Thread* thread = nullptr;
    Event event;
    bool gloo = false, metered = false;
    uint64_t recorded = 0;
    if (log) {
      const uint64_t entered = now();
      thread = &this_thread();
      try {
        event = issue(log, *thread, *stack, entered, gloo);
      } catch (const py::error_already_set&) {
        throw;  // the job's own
      } catch (const abi::__forced_unwind&) {
        throw;  // the interpreter ends, and with it this thread, which asked for the GIL
      } catch (...) {
        count_error();
      }
      metered = event && Meter::due(*thread);
      if (metered) recorded = now() - entered;
    }
    try {
      handle.redispatchBoxed(keys & below, stack);
    } catch (...) {
      if (event) {
        event.record->returned_after = static_cast<float>(now() - event.record->issued_ns);
        event.complete(STATE_FAILED);
      }
      throw;
    }
    if (!event) return;
    const uint64_t returned = now();
    try {
      follow(*thread, event, *stack, gloo, returned);
    } catch (...) {
      count_error();
    }
    if (metered) Meter::add(event.segment, recorded + now() - returned);
  }

 private:
  Event issue(Log* log, Thread& thread, const torch::jit::Stack& stack, uint64_t entered, bool& gloo) const {
    const c10::IValue* arguments = stack.data() + (stack.size() - arguments_);
    if (group_ < 0) return {};
    Elements in, out;
    in.add(arguments[inputs_]);
    if (outputs_ >= 0) out.add(arguments[outputs_]);
    if (in.meta || out.meta) return {};  // fake tensors: nothing is communicated
    Group* group = group_of(log, thread, held<c10d::ProcessGroup>(arguments[group_]));
    const uint16_t thread_number = thread_id(log, thread);
    uint32_t site = sites().here(log, thread);
    uint8_t flags = 0;
    if (async_ >= 0 && arguments[async_].isBool() && arguments[async_].toBool()) flags |= FLAG_ASYNC;
    const bool device = in.dtype >= 0 ? in.device : out.device;
    if (device) flags |= FLAG_DEVICE;
    gloo = group->gloo && !device;
    if (gloo) flags |= FLAG_COMPLETION;
    if (site == 0 && (site = g_backward_site.load(std::memory_order_relaxed)) != 0) flags |= FLAG_INFERRED_SITE;
    uint32_t label = thread.label;
    if (p2p_ && thread.p2p_labels) {
      thread.p2p_labels--;
      label = t_p2p_labels.front();
      t_p2p_labels.pop_front();
    }
    site = labelled_sites().id(log, thread, site, label);
    int32_t tag = 0;
    if (tag_ >= 0) tag = static_cast<int32_t>(arguments[tag_].toInt());
    else if (const bool differ = in.uneven || out.uneven; differ || input_splits_ >= 0 || output_splits_ >= 0)
      tag = uneven(log, arguments, differ);

    // Counted before the record is touched: a locked operation waits for the stores before it.
    const uint32_t seq = p2p_ ? group->p2ps.fetch_add(1) : group->collectives.fetch_add(1);
    Event event = log->claim();
    if (!event) return event;
    Record* r = event.record;
    r->kind = p2p_ ? KIND_P2P : KIND_COLLECTIVE;
    const int dtype = in.dtype >= 0 ? in.dtype : out.dtype;
    r->dtype = empty_ || dtype < 0 ? NO_CODE : static_cast<uint8_t>(dtype);
    r->reduce_op = reduce_op_ >= 0 ? static_cast<uint8_t>(held<c10d::ReduceOp>(arguments[reduce_op_])->op_) : NO_CODE;
    r->op = op_;
    r->thread = thread_number;
    r->group = group->id;
    r->flags = flags;
    r->waits = 0;
    r->seq = seq;
    r->peer = peer_ >= 0 ? static_cast<int32_t>(arguments[peer_].toInt()) : -1;
    r->tag = tag;
    r->site = site;
    r->step = g_step.load(std::memory_order_relaxed);
    r->issued_ns = entered;
    r->numel = empty_ ? 0 : in.total ? in.total : out.total;
    r->returned_after = r->waited_from = r->waited_for = r->done_after = 0;
    r->state.store(STATE_ISSUED, std::memory_order_release);
    return event;
  }

  // Id of the sizes when they differ between peers or tensors, else 0.
  [[gnu::noinline]] int32_t uneven(Log* log, const c10::IValue* arguments, bool differ) const {
    const auto given = [&](int splits) {
      return splits >= 0 && arguments[splits].isIntList() ? arguments[splits].toIntVector() : std::vector<int64_t>();
    };
    std::vector<int64_t> in = given(input_splits_), out = given(output_splits_);
    for (const auto* splits : {&in, &out})
      for (const int64_t n : *splits) differ |= n != splits->front();
    if (!differ) return 0;
    if (in.empty()) list_counts(arguments[inputs_], in);
    if (out.empty() && outputs_ >= 0) list_counts(arguments[outputs_], out);
    return sizes().id(log, in, out);
  }

  // After the call returned: arrange to learn when the operation completes.
  void follow(Thread& thread, const Event& event, torch::jit::Stack& stack, bool gloo, uint64_t returned) const {
    Record* r = event.record;
    r->returned_after = static_cast<float>(returned - r->issued_ns);
    r->state.store(STATE_RETURNED, std::memory_order_release);
    c10d::Work* work = returns_ > 0 && stack.back().isObject() ? held<c10d::Work>(stack.back()) : nullptr;
    if (!work) {
      // monitored_barrier returns nothing and is complete; NCCL's synchronous calls return a null Work and are not.
      if (returns_ == 0) return event.complete(STATE_DONE);
      r->flags |= FLAG_NO_WORK;
    }
    if (!work || !gloo) {
      event.segment->closed.fetch_add(1, std::memory_order_acq_rel);
      return;
    }
    bool has_future = false;
    if (!p2p_ && futureless_.load(std::memory_order_relaxed) != &typeid(*work)) {
      try {
        if (auto future = work->getFuture()) {
          // Two pointers: a callable of this size needs no memory of its own, which the back end's thread would free.
          // It does not use the value, so that no device or stream need be set for it.
          future->addCallback(
              [r, segment = event.segment](c10::ivalue::Future& completed) {
                if (!g_log.load(std::memory_order_acquire) || !Event::is_ours(segment)) return;
                Event::complete(r, segment, completed.hasError() ? STATE_FAILED : STATE_DONE);
              },
              /*uses_future=*/false);
          has_future = true;
        }
      } catch (const std::exception&) {  // gloo's reduce_scatter has no future: the wait tells
        futureless_.store(&typeid(*work), std::memory_order_relaxed);  // an exception costs more than all the rest
      }
    }
    auto& boxed = const_cast<c10::IValue&>(stack.back().toObjectRef().getSlot(0));
    WatchedWork::replace(thread, boxed, work->retrieveOpType(), event, has_future);
  }

  const uint16_t op_;
  const int arguments_, returns_;
  const bool p2p_, empty_;
  int group_ = -1, reduce_op_ = -1, peer_ = -1, tag_ = -1, async_ = -1;
  int inputs_ = -1, outputs_ = -1, input_splits_ = -1, output_splits_ = -1;
  mutable std::atomic<const std::type_info*> futureless_{nullptr};  // works of this class have no future
};

// ---- what Python calls -------------------------------------------------------------------------------------------------

void install(const std::vector<std::string>& ops) {
  static bool installed = false;  // also in a forked process, which inherits the kernels
  if (std::exchange(installed, true)) return;
  // Never deleted: the kernels stay until the process ends.
  auto* library = new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  for (const auto& op : ops) {
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(("c10d::" + op).c_str(), "");
    auto tap = std::make_unique<Tap>(names().id(op), op, handle.schema());
    library->impl(op.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(tap)));
  }
}

void open_log(const std::string& folder, const py::bytes& header, uint32_t max_segments) {
  if (g_log.load()) throw std::runtime_error("the log is open already");
  auto* log = new Log(folder, header, max_segments);
  names().declare_all(log);
  g_log.store(log, std::memory_order_release);
}

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

// Spans that have begun, by handles that end each of them once: another use of a handle finds nothing.
class OpenSpans {
 public:
  std::mutex& mutex() { return mutex_; }

  uintptr_t add(const Event& event) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_) free_ = &places_.emplace_back();
    Place* place = std::exchange(free_, free_->next);
    place->event = event;
    return reinterpret_cast<uintptr_t>(place) | static_cast<uintptr_t>(place->turn) << kAddressBits;
  }
  Event take(uintptr_t handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* place = reinterpret_cast<Place*>(handle & ((uintptr_t{1} << kAddressBits) - 1));
    if (place->turn != handle >> kAddressBits) return {};
    place->turn++;
    place->next = free_;
    free_ = place;
    return place->event;
  }

 private:
  static constexpr int kAddressBits = 48;  // of what a process can allocate
  struct Place {
    Event event;
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
  event.segment->capture_ns().fetch_add(now() - entered, std::memory_order_relaxed);
  return open_spans().add(event);
}

void end_span(uintptr_t handle, bool failed, uint8_t flags, bool is_backward) {
  if (!handle) return;
  const uint64_t entered = now();
  if (is_backward) g_backward_site.store(0, std::memory_order_relaxed);
  const Event event = open_spans().take(handle);
  if (event && event.current() && g_log.load(std::memory_order_acquire)) {
    if (flags) event.record->flags |= flags;
    event.complete(failed ? STATE_FAILED : STATE_DONE);
    event.segment->capture_ns().fetch_add(now() - entered, std::memory_order_relaxed);
  }
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

void write_entry(const std::string& line) {
  if (Log* log = g_log.load(std::memory_order_acquire)) log->write_line(line);
}

void close_log() {
  if (Log* log = g_log.load(std::memory_order_acquire)) log->mark(MARK_CLOSED);
}

// A forked child shares the parent's segments: it must never write to them.
void off() { g_log.store(nullptr, std::memory_order_release); }

// Around a fork no table is in the hands of another thread, which the child would not have.
void hold_tables() {
  for (std::mutex* m : {&names().mutex(), &groups().mutex, &sites().mutex(), &labelled_sites().mutex(), &sizes().mutex(),
                        &open_spans().mutex()})
    m->lock();
}
void release_tables() {
  for (std::mutex* m : {&open_spans().mutex(), &sizes().mutex(), &labelled_sites().mutex(), &sites().mutex(),
                        &groups().mutex, &names().mutex()})
    m->unlock();
}

// A child that opens a log of its own declares everything anew. This thread is its only one.
void begin_child() {
  off();
  g_process++;
  groups().known.clear();
  sites().forget();
  labelled_sites().forget();
  sizes().forget();
  g_threads.store(0);
  g_backward_site.store(0);
  Thread& thread = this_thread();
  Spare* const spares = std::exchange(thread.spares, nullptr);
  const uint16_t num_spares = thread.num_spares;
  thread = {};
  thread.spares = spares;
  thread.num_spares = num_spares;
  t_p2p_labels.clear();
  release_tables();
}

}  // namespace

PYBIND11_MODULE(DTPROF_MODULE, m) {
  pthread_atfork(&hold_tables, &release_tables, &begin_child);
  m.attr("torch_version") = DTPROF_TORCH_VERSION;
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
  m.def("advance_step", [] { return ++g_step; });
  m.def("write_entry", &write_entry);
  m.def("close_log", &close_log);
  m.def("off", &off);
}

}  // namespace dtprof
