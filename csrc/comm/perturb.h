// For the tests that attack the protocol: random delays at every signal and wait (-DTK_RANDOM_DELAYS), and buffers
// turned to NaN as soon as they were read (-DTK_POISON_CONSUMED). Elsewhere both are nothing.
#pragma once

#include "platform/device.h"

namespace tracekern {

#ifdef TK_RANDOM_DELAYS
inline void perturb(Warp& warp) {
    static thread_local uint64_t state = 0x9e3779b97f4a7c15u ^ reinterpret_cast<uintptr_t>(&state);
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    // Most are nothing; a few let everybody else run for a while.
    const uint32_t turns = state % 16 ? state % 4 : state % 257;
    uint32_t spins = 0;
    for (uint32_t turn = 0; turn < turns; ++turn) warp.relax(spins);
}
#else
TK_DEVICE void perturb(Warp&) {}
#endif

#ifdef TK_POISON_CONSUMED
inline void poison(void* consumed, uint64_t bytes) {
    memset(consumed, 0xff, bytes);
}
#else
TK_DEVICE void poison(void*, uint64_t) {}
#endif

}  // namespace tracekern
