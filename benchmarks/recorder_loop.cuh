// The loop in which recorder.cu measures: the same instructions around every probe, and none of them the probe's.
#pragma once

#include <cstdint>
#include <type_traits>

#include "platform/device.h"

using namespace tracekern;

namespace {

// Long: with a branch every 25 steps the region itself took up to 50 ns more or less, as its loop lay in the
// instruction cache.
constexpr uint32_t kUnroll = 125;
constexpr uint32_t kPeer = 5;

struct BenchArgs {
    float* sink;
    uint32_t num_regions;  // 1 or more
    uint32_t num_steps;    // dependent FMAs a region, a multiple of kUnroll
    uint32_t peer;
    float factor;
};

// Hides what the values are, so that they stay in registers. An empty asm does that from the compiler but not from
// ptxas, which read parameters, constants and %tid again in each span; it looks through shuffles, too. So they go
// through shared memory, 8 bytes of it for each thread.
template <class... T>
TK_DEVICE void hold(T&... values) {
    extern __shared__ __align__(1024) char shared_bytes[];
    char* const own = shared_bytes + 8 * threadIdx.x;
    const auto hold_one = [own](auto& value) {
        volatile auto& copy = reinterpret_cast<decltype(value)>(*own);
        copy = value;
        value = copy;
    };
    (hold_one(values), ...);
}
// The same of values that all lanes share, as the compiler then knows: around a loop that lanes may leave one by one it
// puts a barrier.
template <class... T>
TK_DEVICE void hold_uniform(T&... values) {
    hold(values...);
    ((values = __shfl_sync(kAllLanes, values, 0)), ...);
}
// Whether this lane writes. It stays in a predicate: the comparison is made here, that of a held word in each span.
TK_DEVICE uint32_t hold_leader(const Warp& warp) {
    uint32_t lane_writes = warp.is_leader();
    hold(lane_writes);
    lane_writes = lane_writes != 0;
    asm volatile("" : "+r"(lane_writes));
    return lane_writes;
}

// `Probe` has Args, a constructor that takes them and the warp, and span(args, i, body), which runs body() as span i.
template <class Probe>
__global__ void __launch_bounds__(1024) run_regions(BenchArgs args, typename Probe::Args trace) {
    Warp warp(LaunchSize{});
    float* const own_sink = args.sink + blockIdx.x * blockDim.x + threadIdx.x;
    float x = *own_sink;
    uint32_t i = 0;
    {
        Probe probe(trace, warp);
        hold_uniform(i, args.num_regions, args.num_steps, args.peer, args.factor);
        do {
            probe.span(args, i, [&] {
                uint32_t step = 0;
#pragma unroll 1
                do {
#pragma unroll
                    for (uint32_t k = 0; k < kUnroll; ++k) x = fmaf(x, args.factor, args.factor);
                    step += kUnroll;
                } while (step < args.num_steps);
            });
        } while (++i < args.num_regions);
    }
    *own_sink = x;
}

// The loop alone.
struct Nothing {
    struct Args {};
    TK_DEVICE Nothing(Args, const Warp&) {}
    template <class F>
    TK_DEVICE void span(const BenchArgs&, uint32_t, F body) {
        body();
    }
};

}  // namespace
