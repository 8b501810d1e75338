// What fatal signals leave: the Python stack that they hit, in a file of the rank's folder, before whoever handled them
// earlier does so. The file is written at the end alone, by calls that a signal handler may make.
#pragma once

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "call_sites.h"

namespace dtprof {
namespace {

// A traceback of a thread as faulthandler writes it, by reads of memory and writes to a file alone: Python 3.10 and 3.13 export
// no function for that. Without the layout of frames it is empty.
class TracebackWriter {
 public:
  explicit TracebackWriter(int file) : file_(file) {}

  void write_frames([[maybe_unused]] PyThreadState* state) {
    put("Stack (most recent call first):\n", 32);
#ifdef DTPROF_READS_FRAMES
    int depth = 0;
    for (Frame frame = Frame::innermost(state); frame && depth < kMostFrames; frame = frame.caller(), depth++) {
      PyCodeObject* code = frame.code();
      put("  File \"", 8);
      put_text(code->co_filename);
      char line[32];
      const int number = line_of(code, frame.instruction());
      put(line, number < 0 ? snprintf(line, sizeof line, "\", line ??? in ") : snprintf(line, sizeof line, "\", line %d in ", number));
      put_text(code->co_name);
      put("\n", 1);
    }
#endif
    flush();
  }

 private:
  static constexpr int kMostFrames = 100;
  static constexpr Py_ssize_t kMostCharacters = 500;

  void put(const char* bytes, int size) {
    if (used_ + size > static_cast<int>(sizeof buffer_)) flush();
    std::memcpy(buffer_ + used_, bytes, size);
    used_ += size;
  }

  void put_text(PyObject* text) {
    if (!text || !PyUnicode_Check(text)) return put("???", 3);
    const int kind = PyUnicode_KIND(text);
    const void* data = PyUnicode_DATA(text);
    for (Py_ssize_t i = 0; i < PyUnicode_GET_LENGTH(text) && i < kMostCharacters; i++) {
      const Py_UCS4 c = PyUnicode_READ(kind, data, i);
      char shown[12];
      if (c >= ' ' && c < 127) {
        shown[0] = static_cast<char>(c);
        put(shown, 1);
      } else {
        put(shown, snprintf(shown, sizeof shown, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", c));
      }
    }
  }

  void flush() {
    for (int done = 0; done < used_;) {
      const ssize_t written = write(file_, buffer_ + done, used_ - done);
      if (written <= 0) break;
      done += static_cast<int>(written);
    }
    used_ = 0;
  }

  int file_;
  int used_ = 0;
  char buffer_[1024];
};

class FatalSignals {
 public:
  // GIL held, on the main thread as a rule: its stack is what is left where the signal hits a thread without Python.
  static void install(const std::string& file) {
    if (file.size() >= sizeof path_) return;
    std::strcpy(path_, file.c_str());
    pid_ = getpid();
    ending_ = 0;
    main_ = PyGILState_GetThisThreadState();
    if (installed_) return;
    installed_ = true;
    give_stack();
    for (const int number : kFaults) take(number, false);
    for (const int number : kEnding) take(number, true);
  }

  // The interpreter ends, and its threads' states with it: signals to end it are common then, and tell nothing.
  static void rest() { ending_ = 1; }

 private:
  static void take(int number, bool only_free) {
    struct sigaction before = {};
    if (sigaction(number, nullptr, &before) != 0 || before.sa_handler == SIG_IGN) return;
    if (only_free && before.sa_handler != SIG_DFL) return;
    struct sigaction mine = {};
    mine.sa_sigaction = &FatalSignals::handle;
    mine.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&mine.sa_mask);
    before_[number] = before;
    sigaction(number, &mine, nullptr);
  }

  static bool is_free_one(int number) {
    for (const int one : kEnding) {
      if (one == number) return true;
    }
    return false;
  }

  static bool comes_again(int number, const siginfo_t* info) {
    return info->si_code > 0 && (number == SIGSEGV || number == SIGBUS || number == SIGFPE || number == SIGILL);
  }

  static constexpr int kFaults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
  // End a process as well, where nobody handles them; whoever installs a handler later takes this one's place. Not those
  // that native profilers claim only where they find them free (SIGPROF, SIGVTALRM).
  static constexpr int kEnding[] = {SIGTERM, SIGHUP, SIGQUIT, SIGALRM, SIGUSR1, SIGUSR2, SIGXCPU, SIGSYS};
  static constexpr size_t kStackBytes = 1 << 16;

  // A stack that has overflown leaves no room for a handler.
  static void give_stack() {
    stack_t known = {};
    if (sigaltstack(nullptr, &known) != 0 || !(known.ss_flags & SS_DISABLE)) return;
    void* place = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED) return;
    stack_t own = {};
    own.ss_sp = place;
    own.ss_size = kStackBytes;
    sigaltstack(&own, nullptr);
  }

  // Of a thread that a signal interrupts: whether it was in a system call, which its program counter is just behind.
  static bool is_in_system_call(const void* context) {
    const auto& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    const auto* next = reinterpret_cast<const unsigned char*>(machine.gregs[REG_RIP]);
    return next[-2] == 0x0f && next[-1] == 0x05;
#elif defined(__aarch64__)
    return reinterpret_cast<const uint32_t*>(machine.pc)[-1] == 0xd4000001;
#else
    return true;  // not known: it is not said to compute
#endif
  }

  static void handle(int number, siginfo_t* info, void* context) {
    const int error = errno;
    sigaction(number, &before_[number], nullptr);  // first: what faults in here goes there
    if (getpid() == pid_ && !(ending_ && is_free_one(number))) leave_stack(number, is_free_one(number) && !is_in_system_call(context));
    errno = error;
    // A fault comes again where the handler returns to; a signal that was sent does not.
    if (!comes_again(number, info)) raise(number);
  }

  static void leave_stack(int number, bool computes) {
    const int file = open(path_, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0) return;
    PyThreadState* own = PyGILState_GetThisThreadState();
    char line[96];
    timespec t = {};
    clock_gettime(CLOCK_MONOTONIC, &t);
    const int size = snprintf(line, sizeof line, "signal %d at %lld%09ld in %s thread%s\n", number,
                              static_cast<long long>(t.tv_sec), t.tv_nsec, own ? (own == main_ ? "the main" : "a Python") : "a native",
                              computes ? ", computing" : "");
    bool written = write(file, line, size) == size;
    if (PyThreadState* shown = own ? own : main_; written && shown) TracebackWriter(file).write_frames(shown);
    close(file);
  }

  static inline char path_[PATH_MAX];
  static inline pid_t pid_;
  static inline bool installed_;
  static inline volatile sig_atomic_t ending_;
  static inline PyThreadState* main_;
  static inline struct sigaction before_[NSIG];
};

}  // namespace
}  // namespace dtprof
