// The recorder's own kernels for GPUs: two nodes of a graph, and the probe that measures a span. CUDA and HIP compile
// it.
#include "trace/graph.h"
#include "trace/probe.h"

using namespace tracekern;  // NOLINT: entry points have C names

TK_KERNEL graph_begin_replay(GraphTrace* graph, const LaunchSize size) {
    Warp warp(size);
    begin_replay(warp, *graph);
}

TK_KERNEL graph_prepare_replay(GraphTrace* graph, const LaunchSize size, bool is_last) {
    Warp warp(size);
    prepare_replay(warp, *graph, is_last);
}

#define TK_PROBE_KERNEL(suffix, Rec)                                                               \
    TK_KERNEL probe_spans_##suffix(const ProbeArgs args, const LaunchSize size, Rec::Args trace) { \
        Warp warp(size);                                                                           \
        probe_spans<Rec>(warp, args, trace);                                                       \
    }

using RecorderOff = Recorder<false>;
using RecorderSpan = Recorder<true, RecordFormat::span>;
using RecorderRing = Recorder<true, RecordFormat::ring>;
using RecorderCycles = Recorder<true, RecordFormat::cycles>;

TK_PROBE_KERNEL(off, RecorderOff)
TK_PROBE_KERNEL(span, RecorderSpan)
TK_PROBE_KERNEL(ring, RecorderRing)
TK_PROBE_KERNEL(cycles, RecorderCycles)

#ifdef TK_KERNEL_TABLE
    #include "trace/kernel_table.hpp"

const void* tracekern::begin_replay_kernel() {
    return reinterpret_cast<const void*>(graph_begin_replay);
}

const void* tracekern::prepare_replay_kernel() {
    return reinterpret_cast<const void*>(graph_prepare_replay);
}

const void* tracekern::probe_kernel(bool traced, RecordFormat format) {
    if (!traced) return reinterpret_cast<const void*>(probe_spans_off);
    switch (format) {
        case RecordFormat::span:
            return reinterpret_cast<const void*>(probe_spans_span);
        case RecordFormat::ring:
            return reinterpret_cast<const void*>(probe_spans_ring);
        case RecordFormat::cycles:
            return reinterpret_cast<const void*>(probe_spans_cycles);
    }
    return nullptr;
}
#endif
