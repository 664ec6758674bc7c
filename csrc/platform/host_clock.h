// Clocks of the host, in ns.
#pragma once

#include <time.h>

#include <cstdint>

namespace tracekern {

inline int64_t host_clock_ns(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// That of clock samples: setting the wall clock does not move it.
inline int64_t monotonic_ns() {
    return host_clock_ns(CLOCK_MONOTONIC);
}

// What host time is ahead of it: the wall clock's lead when it was read last (tracekern/host_clock.py).
inline int64_t read_anchor_ns() {
    const int64_t before = monotonic_ns(), wall = host_clock_ns(CLOCK_REALTIME);
    return wall - (before + monotonic_ns()) / 2;
}

}  // namespace tracekern
