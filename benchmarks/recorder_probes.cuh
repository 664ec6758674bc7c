// The probes of recorder.cu that record: ours, and the schemes that it is compared with.
#pragma once

#include "recorder_loop.cuh"
#include "trace/trace_choice.h"

#ifdef TK_FLASHINFER
    #define FLASHINFER_ENABLE_PROFILER
    #include <flashinfer/profiler.cuh>
#endif

#define TK_BENCH_EVENTS(EVENT)             \
    EVENT(region, work, issue, "", "", "") \
    EVENT(token, work, issue, "", "peer:10 slot:22 expert:16", "")
TK_DEFINE_EVENTS(BenchEvent, TK_BENCH_EVENTS)

namespace {

template <bool kFields, class Rec>
struct Ours {
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

// FlashInfer's scheme without the detours of its header: 8 bytes an event, interleaved over all writers. Its macros
// are used as they are, and compute the stride for each event; here it is in a register.
struct Clean {
    using Args = BufferArgs;
    TK_DEVICE Clean(Args args, const Warp& warp)
        : stride(warp.num_blocks * warp.num_warps), tag(sm_id() << 24 | warp.block << 12), writes(hold_leader(warp)) {
        hold(stride, tag);
        last = args.buffer + 1 + warp.block * warp.num_warps + warp.warp - stride;
    }
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
        last += stride;  // before the store: behind it, the address is copied first
        *last = uint64_t{ticks} << 32 | tag | kind;
    }
    uint64_t* last;
    uint32_t stride, tag, writes;
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
    TK_DEVICE Atomic(Args args, const Warp& warp) : buffer(args.buffer), block(warp.block), writes(hold_leader(warp)) {
        hold(block);
    }
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
    uint32_t block, writes;
};

}  // namespace
