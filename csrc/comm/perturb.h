// For the tests that attack the protocol: random delays at every signal and wait (-DTK_RANDOM_DELAYS), buffers turned
// to NaN as soon as they were read (-DTK_POISON_CONSUMED), and a rank that gives up at a chosen moment
// (-DTK_PLANTED_FAULTS). Elsewhere all are nothing.
#pragma once

#include "platform/device.h"

namespace tracekern {

#ifdef TK_RANDOM_DELAYS
    #if TK_GPU
TK_DEVICE void perturb(Warp& warp) {
    uint64_t state = warp.once([] { return read_clock(); }) * 0x9e3779b97f4a7c15u + warp.block * 37 + warp.warp;
    state ^= state >> 29;
    // Most are nothing, a few last longer than a flag takes to arrive, and fewer longer than a kernel.
    const uint64_t limit = state % 16 ? 64 : state % 64 ? 8192 : 500'000;
    const uint64_t ticks = (state >> 8) % limit;
    for (const uint64_t started = read_clock(); read_clock() - started < ticks;) {
    }
}
    #else
inline bool has_delays = true;  // set before anything is launched
inline void perturb(Warp& warp) {
    if (!has_delays) return;
    // Every thread of every launch draws delays of its own. Relaxed: the counter must order nothing.
    static std::atomic<uint64_t> num_threads = 0;
    static thread_local uint64_t state =
        (num_threads.fetch_add(1, std::memory_order_relaxed) + 1) * 0x9e3779b97f4a7c15u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    // Most are nothing, a few let everybody else run for a while, and fewer last longer than a kernel: threads sleep in
    // the turns behind the 512th.
    const uint32_t turns = state % 16 ? state % 4 : state % 128 ? state % 257 : 600;
    uint32_t spins = 0;
    for (uint32_t turn = 0; turn < turns; ++turn) warp.relax(spins);
}
    #endif
#else
TK_DEVICE void perturb(Warp&) {}
#endif

#if defined(TK_POISON_CONSUMED) && !TK_GPU
inline void poison(void* consumed, uint64_t bytes) {
    memset(consumed, 0xff, bytes);
}
#else
TK_DEVICE void poison(void*, uint64_t) {}
#endif

// Whether another rank gives up just before this look at the abort word, counted over all ranks of the process.
#if defined(TK_PLANTED_FAULTS) && !TK_GPU
inline std::atomic<int64_t> looks_until_abort = -1;
inline bool aborts_at_this_look() {
    if (looks_until_abort.load(std::memory_order_relaxed) < 0) return false;
    return looks_until_abort.fetch_sub(1, std::memory_order_relaxed) == 0;
}
#else
TK_DEVICE constexpr bool aborts_at_this_look() {
    return false;
}
#endif

}  // namespace tracekern
