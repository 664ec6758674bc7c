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

// That of clock samples: hosts keep it together.
inline int64_t wall_clock_ns() {
    return host_clock_ns(CLOCK_REALTIME);
}

}  // namespace tracekern
