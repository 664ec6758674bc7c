// The recorder's own kernels for GPUs: a graph's first node, and the probe that measures a span. CUDA and HIP compile
// it.
#include "trace/graph.h"
#include "trace/probe.h"

using namespace tracekern;  // NOLINT: entry points have C names

TK_KERNEL graph_advance(GraphTrace* graph, const LaunchSize size, bool begins_replay) {
    Warp warp(size);
    advance_graph(warp, *graph, begins_replay);
}

#define TK_PROBE_KERNEL(suffix, Rec)                                                               \
    TK_KERNEL probe_spans_##suffix(const ProbeArgs args, const LaunchSize size, Rec::Args trace) { \
        Warp warp(size);                                                                           \
        probe_spans<Rec>(warp, args, trace);                                                       \
    }

using RecorderOff = Recorder<false>;
using RecorderWide = Recorder<true, RecordFormat::wide>;
using RecorderRing = Recorder<true, RecordFormat::ring>;
using RecorderCycles = Recorder<true, RecordFormat::cycles>;

TK_PROBE_KERNEL(off, RecorderOff)
TK_PROBE_KERNEL(wide, RecorderWide)
TK_PROBE_KERNEL(ring, RecorderRing)
TK_PROBE_KERNEL(cycles, RecorderCycles)

#ifdef TK_KERNEL_TABLE
    #include "trace/kernel_table.hpp"

const void* tracekern::graph_advance_kernel() {
    return reinterpret_cast<const void*>(graph_advance);
}

const void* tracekern::probe_kernel(bool traced, RecordFormat format) {
    if (!traced) return reinterpret_cast<const void*>(probe_spans_off);
    switch (format) {
        case RecordFormat::wide:
            return reinterpret_cast<const void*>(probe_spans_wide);
        case RecordFormat::ring:
            return reinterpret_cast<const void*>(probe_spans_ring);
        case RecordFormat::cycles:
            return reinterpret_cast<const void*>(probe_spans_cycles);
    }
    return nullptr;
}
#endif
