// The clock of every stamp: ns of CLOCK_MONOTONIC, which all processes of a host share.
#pragma once

#include <time.h>

#include <cerrno>
#include <cstdint>

namespace sim {

using ns = int64_t;

inline ns now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

inline void sleep_until(ns when) {
  if (now() >= when) return;
  const timespec t{when / 1'000'000'000LL, when % 1'000'000'000LL};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr) == EINTR) {
  }
}

}  // namespace sim
