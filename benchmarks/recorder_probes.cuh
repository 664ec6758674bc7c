// The kernels of recorder.cu: the same region of dependent FMAs, with each probe around it.
#pragma once

#include "trace/recorder.h"

#ifdef TK_FLASHINFER
    #define FLASHINFER_ENABLE_PROFILER
    #include <flashinfer/profiler.cuh>
#endif

#define TK_BENCH_EVENTS(EVENT)             \
    EVENT(region, work, issue, "", "", "") \
    EVENT(token, work, issue, "", "peer:10 slot:22 expert:16", "")
TK_DEFINE_EVENTS(BenchEvent, TK_BENCH_EVENTS)

using namespace tracekern;

namespace {

// Long: with a branch every 25 steps the region itself took up to 50 ns more or less, as its loop lay in the
// instruction cache.
constexpr uint32_t kUnroll = 125;
constexpr uint32_t kPeer = 5;
constexpr uint32_t kMaxBlocks = 264;
constexpr uint32_t kMaxTracks = kMaxBlocks * 32;

struct BenchArgs {
    float* sink;
    uint32_t num_regions;
    uint32_t num_steps;  // dependent FMAs a region, a multiple of kUnroll
    uint32_t peer;
    float factor;
};

// ---- probes: span(i, body) runs body() as span i ----

struct Nothing {
    struct Args {};
    TK_DEVICE Nothing(Args, const Warp&) {}
    template <class F>
    TK_DEVICE void span(const BenchArgs&, uint32_t, F body) {
        body();
    }
};

template <bool kFields>
struct Ours {
    using Rec = Recorder<true>;
    using Args = typename Rec::Args;
    TK_DEVICE Ours(Args args, const Warp& warp) : recorder(args, warp) {}
    template <class F>
    TK_DEVICE void span(const BenchArgs& args, uint32_t i, F body) {
        if constexpr (kFields) {
            TK_RANGE(recorder, BenchEvent::token, args.peer, i, i);
            body();
        } else {
            TK_RANGE(recorder, BenchEvent::region);
            body();
        }
    }
    Rec recorder;
};

struct BufferArgs {
    uint64_t* buffer;
};

// What no recorder can do without: the clock at the begin and at the end. One more instruction keeps each of them.
struct Reads {
    using Args = BufferArgs;
    TK_DEVICE Reads(Args args, const Warp& warp) : last(args.buffer + warp.block * warp.num_warps + warp.warp) {}
    TK_DEVICE ~Reads() { *last = seen; }
    template <class F>
    TK_DEVICE void span(const BenchArgs&, uint32_t, F body) {
        seen ^= static_cast<uint32_t>(read_clock());
        body();
        seen ^= static_cast<uint32_t>(read_clock());
    }
    uint64_t* last;
    uint32_t seen = 0;
};

struct TrackArgs {
    uint64_t* buffer;
    uint32_t records_per_track;
};

// What no recorder of 16-byte records can do without: the clock and a store at both ends. It looks for no room, asks
// for no event, and knows that no record comes between the two.
struct Bare {
    using Args = TrackArgs;
    TK_DEVICE Bare(Args args, const Warp& warp)
        : next(args.buffer + (warp.block * warp.num_warps + warp.warp) * uint64_t{2} * args.records_per_track),
          writes(warp.is_leader()) {
        asm volatile("" : "+r"(writes));  // else the lane is asked for again in each span
    }
    template <class F>
    TK_DEVICE void span(const BenchArgs&, uint32_t, F body) {
        put<0>(RecordKind::begin);
        body();
        put<sizeof(WideRecord)>(RecordKind::end);
        // As append_if(): the low word alone.
        asm volatile(
            "{\n\t.reg .b32 %%low, %%high;\n\t"
            "mov.b64 {%%low, %%high}, %0;\n\t"
            "add.u32 %%low, %%low, 32;\n\t"
            "mov.b64 %0, {%%low, %%high};\n\t}"
            : "+l"(next));
    }
    template <uint32_t kOffset>
    TK_DEVICE void put(RecordKind kind) {
        const uint64_t ticks = read_clock();
        asm volatile(
            "{\n\t.reg .pred %%writes;\n\t"
            "setp.ne.u32 %%writes, %1, 0;\n\t"
            "@%%writes st.global.v2.b64 [%0 + %4], {%2, %3};\n\t}" ::"l"(next),
            "r"(writes),
            "l"(ticks),
            "l"(uint64_t{record_word(kind, 0, 0)} << 32),
            "n"(kOffset)
            : "memory");
    }
    uint64_t* next;
    uint32_t writes;
};

// What records of half the size would cost: the low half of the clock and a word, room kept as in a Recorder.
struct Short {
    using Args = TrackArgs;
    TK_DEVICE Short(Args args, const Warp& warp)
        : next(args.buffer + (warp.block * warp.num_warps + warp.warp) * uint64_t{args.records_per_track}),
          free(args.records_per_track),
          wanted(warp.is_leader()) {}
    template <class F>
    TK_DEVICE void span(const BenchArgs&, uint32_t, F body) {
        const bool open = take_if(wanted, 2, free, attempted);
        put(open, 0);
        body();
        put(open, 1);
    }
    TK_DEVICE void put(bool open, uint32_t kind) {
        uint32_t ticks;
        asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(ticks)::"memory");
        asm volatile(
            "{\n\t.reg .pred %%open;\n\t"
            "setp.ne.u32 %%open, %1, 0;\n\t"
            "@%%open st.global.v2.b32 [%0], {%2, %3};\n\t"
            "@%%open add.u64 %0, %0, 8;\n\t}"
            : "+l"(next)
            : "r"(uint32_t{open}), "r"(kind), "r"(ticks)
            : "memory");
    }
    uint64_t* next;
    uint32_t free, attempted = 0;
    bool wanted;
};

// What records that stay in shared memory would cost: 16 bytes into a ring of each warp, which nobody empties.
struct Shared {
    static constexpr uint32_t kRingBytes = 256;
    struct Args {
        uint32_t records_per_track;
    };
    TK_DEVICE Shared(Args args, const Warp& warp) : free(args.records_per_track), wanted(warp.is_leader()) {
        extern __shared__ __align__(1024) char rings[];
        ring = static_cast<uint32_t>(__cvta_generic_to_shared(rings)) + warp.warp * kRingBytes;
        next = ring;
    }
    template <class F>
    TK_DEVICE void span(const BenchArgs&, uint32_t, F body) {
        const bool open = take_if(wanted, 2, free, attempted);
        put(open, 1);
        body();
        put(open, 2);
    }
    TK_DEVICE void put(bool open, uint32_t kind) {
        const uint64_t ticks = read_clock();
        asm volatile(
            "{\n\t.reg .pred %%open;\n\t"
            "setp.ne.u32 %%open, %1, 0;\n\t"
            "@%%open st.shared.v4.b32 [%0], {%2, %3, %4, %5};\n\t"
            "@%%open add.u32 %0, %0, 16;\n\t}"
            : "+r"(next)
            : "r"(uint32_t{open}),
              "r"(static_cast<uint32_t>(ticks)),
              "r"(static_cast<uint32_t>(ticks >> 32)),
              "r"(0),
              "r"(kind)
            : "memory");
        next = ring | (next & (kRingBytes - 1));
    }
    uint32_t ring, next, free, attempted = 0;
    bool wanted;
};

// FlashInfer's scheme without the detours of its header: 8 bytes an event, interleaved over all writers.
struct Clean {
    using Args = BufferArgs;
    TK_DEVICE Clean(Args args, const Warp& warp)
        : next(args.buffer + 1 + warp.block * warp.num_warps + warp.warp),
          stride(warp.num_blocks * warp.num_warps),
          tag(sm_id() << 24 | warp.block << 12),
          writes(warp.is_leader()) {}
    template <class F>
    TK_DEVICE void span(const BenchArgs&, uint32_t, F body) {
        if (writes) put(0);
        __threadfence_block();
        body();
        __threadfence_block();
        if (writes) put(1);
    }
    TK_DEVICE void put(uint32_t kind) {
        uint32_t ticks;
        asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(ticks)::"memory");
        *next = uint64_t{ticks} << 32 | tag | kind;
        next += stride;
    }
    uint64_t* next;
    uint32_t stride, tag;
    bool writes;
};

#ifdef TK_FLASHINFER
using flashinfer::ProfilerEntry;  // the macros name it

struct Flashinfer {
    struct Args {
        uint64_t* profiler_buffer;
    };
    struct Closure {
        PROFILER_CLOSURE_PARAMS_DECL
    };
    TK_DEVICE Flashinfer(Args params, const Warp& warp) {
        using namespace flashinfer;
        PROFILER_INIT(params, 0, closure, warp.warp, warp.num_warps, warp.is_leader())
    }
    template <class F>
    TK_DEVICE void span(const BenchArgs&, uint32_t, F body) {
        using namespace flashinfer;
        PROFILER_EVENT_START(closure, 0)
        body();
        PROFILER_EVENT_END(closure, 0)
    }
    Closure closure;
};
#endif

// An index from one counter for all, then four 64-bit words.
struct Atomic {
    using Args = BufferArgs;
    TK_DEVICE Atomic(Args args, const Warp& warp) : buffer(args.buffer), block(warp.block), writes(warp.is_leader()) {}
    template <class F>
    TK_DEVICE void span(const BenchArgs&, uint32_t, F body) {
        uint64_t* entry = buffer;
        if (writes) {
            entry = buffer + 1 + uint64_t{atomicAdd(reinterpret_cast<uint32_t*>(buffer), 1u)} * 4;
            entry[0] = read_clock();
        }
        body();
        if (writes) {
            entry[1] = read_clock() - entry[0];
            entry[2] = 0;
            entry[3] = block;
        }
    }
    uint64_t* buffer;
    uint32_t block;
    bool writes;
};

template <class Probe>
__global__ void __launch_bounds__(1024) run_regions(const BenchArgs args, typename Probe::Args trace) {
    Warp warp(LaunchSize{});
    const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
    float x = args.sink[thread];
    {
        Probe probe(trace, warp);
        for (uint32_t i = 0; i < args.num_regions; ++i) {
            probe.span(args, i, [&] {
#pragma unroll 1
                for (uint32_t step = 0; step < args.num_steps; step += kUnroll) {
#pragma unroll
                    for (uint32_t k = 0; k < kUnroll; ++k) x = fmaf(x, args.factor, args.factor);
                }
            });
        }
    }
    args.sink[thread] = x;
}

}  // namespace
