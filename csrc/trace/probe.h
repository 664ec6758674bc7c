// What a span costs on this device: a region of dependent arithmetic, with a span around it and without.
#pragma once

#include "trace/recorder.h"

// clang-format off
#define TK_PROBE_EVENTS(EVENT)              \
    EVENT(region, work, issue, "", "index:32", "")
// clang-format on
TK_DEFINE_EVENTS(ProbeEvent, TK_PROBE_EVENTS)

namespace tracekern {

struct ProbeArgs {
    float* sink;           // [block][warp]; keeps the arithmetic alive
    uint32_t num_regions;  // of each warp
    uint32_t num_steps;    // dependent multiply-adds of a region, a multiple of kProbeUnroll
    float factor;
};
// Long: how a loop lies in the instruction cache changes what its branch takes, and over many branches that is more
// than a span adds.
constexpr uint32_t kProbeUnroll = 125;

template <class Rec>
TK_DEVICE void probe_spans(Warp& warp, const ProbeArgs& args, typename Rec::Args trace) {
    Rec recorder(trace, warp);
    float x = args.factor;
    for (uint32_t region = 0; region < args.num_regions; ++region) {
        TK_RANGE(recorder, ProbeEvent::region, region);
#if TK_GPU
    #pragma unroll 1
#endif
        for (uint32_t step = 0; step < args.num_steps; step += kProbeUnroll) {
            TK_UNROLL
            for (uint32_t k = 0; k < kProbeUnroll; ++k) x = x * args.factor + args.factor;
        }
    }
    warp.leader([&] { args.sink[warp.block * warp.num_warps + warp.warp] = x; });
}

}  // namespace tracekern
