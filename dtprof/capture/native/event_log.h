// The log of one process: 64-byte records in memory-mapped segments, and the lines that explain their codes.
//
// An event is claimed, filled and completed without a lock: a record is one slot of the current segment, and its state
// byte is what readers trust. Segments are allocated ahead of need by a thread of their own, and of a log that has
// reached its limit the oldest are dropped, their sums kept. Layout and codes: records/schema.py, through schema.h.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "schema.h"

namespace dtprof {
namespace {

uint64_t clock_ns(clockid_t id) {
  timespec t;
  clock_gettime(id, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}
uint64_t now() { return clock_ns(CLOCK_MONOTONIC); }

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

// Sums of the events of dropped segments, by kind, operation, group, dtype and site.
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

  void sum_events() {
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

  // Move to done or failed once; the first caller decides.
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
    std::thread([this] { maintain_segments(); }).detach();
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
  }

  Event claim() {
    for (;;) {
      Segment* segment = current_.load(std::memory_order_acquire);
      const uint64_t i = segment->head().fetch_add(1, std::memory_order_acq_rel);
      if (i < SEGMENT_CAPACITY) [[likely]]
        return {segment->record(i), segment, segment->generation.load(std::memory_order_relaxed)};
      if (!switch_segment(segment)) {
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

  std::string path_of(uint32_t number, const char* suffix = "") const {
    char name[32];
    snprintf(name, sizeof name, "/events.%05u%s", number, suffix);
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
      s->sum_events();
      s->sealed = true;
      s->marks().fetch_or(MARK_SEALED);
      release_pages(s);  // adding up has read all of it
    }
  }

  // The pages leave the process, not the file.
  static void release_pages(const Segment* segment) { madvise(segment->base, SEGMENT_SIZE, MADV_DONTNEED); }

  // Release segments that the launcher has archived: their files are deleted, and only our mapping holds the blocks.
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

  // Drop the oldest sealed segment behind the first quarter of the segments. A plain one is reused under its next number
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
        add_dropped(archive->totals);
        archives_.erase(archives_.begin() + (archive - archives_.data()));
        return {true, nullptr};
      }
      if (!segment->sealed) continue;
      if (::rename(path_of(number).c_str(), path_of(next_number_).c_str()) != 0) continue;  // being archived right now
      ::unlink(path_of(number, ".z").c_str());
      add_dropped(segment->totals);
      memset(segment->base, 0, SEGMENT_SIZE);
      segment->sealed = false;
      start(segment);
      return {true, segment};
    }
    return {false, nullptr};
  }

  // Count events that are being dropped, and keep their sums in dropped.json.
  void add_dropped(const Totals& totals) {
    for (const auto& [key, sums] : totals) {
      Sums& sum = dropped_totals_[key];
      dropped_ += sums.events;
      sum.events += sums.events;
      sum.failed += sums.failed;
      sum.numel = std::get<0>(key) == KIND_SAMPLE ? std::max(sum.numel, sums.numel) : sum.numel + sums.numel;
      sum.waited_ns += sums.waited_ns;
      sum.took_ns += sums.took_ns;
    }
    std::string text = "{\"events\":" + std::to_string(dropped_) + ",\"totals\":[";
    const char* comma = "\n";
    for (const auto& [key, sums] : dropped_totals_) {
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

  [[gnu::cold]] bool switch_segment(Segment* full) {
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

  void maintain_segments() {
    pthread_setname_np(pthread_self(), "dtprof-log");
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      // The first spare is made when the first segment is half full: short jobs never pay for it.
      while (!retired_ && current_.load()->head().load() < SEGMENT_CAPACITY / 2)
        wake_.wait_for(lock, std::chrono::seconds(1));
      if (!spare_ && !stopped_) spare_ = prepare();
      if (retired_) release_pages(retired_);
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
  Totals dropped_totals_;
  Segment* spare_ = nullptr;
  Segment* retired_ = nullptr;
  bool stopped_ = false;
  uint32_t next_number_ = 0;
  uint64_t dropped_ = 0;
};

std::atomic<Log*> g_log{nullptr};  // a Log is never deleted: back-end threads may complete events at any time
std::atomic<uint32_t> g_step{0};
std::atomic<uint32_t> g_backward_site{0};

}  // namespace
}  // namespace dtprof
