// State that each thread caches between operations, so that the common operation takes no lock and hashes nothing.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <deque>

#include "event_log.h"

namespace dtprof {
namespace {

// Torch and dtprof; other installed code; the user's program; one code object too many to be kept.
enum class Owner : uint8_t { kTool, kLibrary, kUser, kUnknown };

struct Group;
struct Spare;

// All in one place, found once an operation: the address of a thread-local variable is a call of its own. What every
// operation needs is on the first two lines of the cache.
struct alignas(64) Thread {
  uint16_t id = 0;
  uint16_t num_spares = 0;
  uint32_t label = 0;  // attribution that Python last set: the framework that issues its operations, a `label` entry
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
    uint32_t id = 0;     // of the site
    uint32_t depth = 0;  // frames that were read
    bool is_whole = false;  // there are no others
    struct {
      PyCodeObject* code;
      int instruction;  // of the user's frames
    } frames[48] = {};  // innermost first
  } last_path;
  struct {
    void* code = nullptr;
    Owner owner{};
  } owners[64];
};
thread_local constinit Thread t_thread;
Thread& this_thread() {
  Thread* thread = &t_thread;
  asm("" : "+r"(thread));  // else the compiler recomputes the thread-local address at each use
  return *thread;
}
thread_local std::deque<uint32_t> t_p2p_labels;  // of the point-to-point operations to come

}  // namespace
}  // namespace dtprof
