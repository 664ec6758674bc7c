// How a CUDA graph records: its arguments are frozen, so the kernels of its traced instance get a fixed place in
// device memory, and the first node of every replay puts there the regions that this replay shall use.
//
// The host lays regions ready in a ring, one set (a region for each launch of the graph) a replay. Host memory is a
// microsecond away, so a node beside the kernels fetches the set of the next replay. Where the host came late there is
// none, and the kernels of that replay only count what they would have recorded. The GPU never waits for the host.
// docs/graphs.md has the whole of it.
#pragma once

#include "platform/device.h"
#include "trace/record.h"

namespace tracekern {

// Both sides see it: host memory that the device maps.
struct GraphControl {
    uint64_t placed;        // by the host: sets laid ready so far
    uint64_t fetched;       // by the device: sets fetched so far; the host may overwrite the ring up to here
    uint64_t used;          // sets that replays got so far; the replays of all but the last of them are through
    uint64_t replays;       // of the traced instance, begun so far
    uint64_t lost_replays;  // that found no set
    uint64_t lost_records;  // that those would have written, up to the last replay but one
};

// What the device knows, in its own memory.
struct alignas(16) GraphTrace {
    GraphControl* control;
    const ReplayRegion* ring;   // [num_slots][num_launches], host memory
    ReplayRegion* next;         // [num_launches] the set of the next replay, if has_next
    ReplayRegion* current;      // [num_launches] where the kernels of the replay under way record
    const ReplayRegion* spare;  // [num_launches] count only, into `counters`
    TrackHeader* counters;      // one for each track of all launches
    uint64_t mirror_offset;     // of a track header: its address less its address in the arena
    uint32_t num_slots;
    uint32_t num_launches;
    uint32_t num_counters;  // to add up after a replay that used them
    uint16_t has_next;
    uint16_t is_spare;  // the last replay only counted
    uint64_t fetched;
    uint64_t replays;
    uint64_t lost_replays;
    uint64_t lost_records;
};

namespace detail {

// What the last replay counted, if it only counted; clears the counts.
TK_DEVICE uint64_t take_counts(Warp& warp, const GraphTrace& graph) {
    return warp.sum_over(graph.is_spare ? graph.num_counters : 0, [&](uint32_t track) {
        const uint32_t attempted = graph.counters[track].attempted;
        graph.counters[track].attempted = 0;
        return attempted;
    });
}

// Takes the oldest set out of the ring, if there is one and the last one taken is used.
TK_DEVICE void fetch_set(Warp& warp, GraphTrace& graph) {
    if (graph.has_next) return;
    // Asked once, so that all lanes know the same; acquired before they read the set.
    const uint64_t placed = warp.once([&] { return load_acquire_system(&graph.control->placed); });
    graph.has_next = graph.fetched < placed;
    if (!graph.has_next) return;
    const ReplayRegion* oldest = graph.ring + graph.fetched % graph.num_slots * graph.num_launches;
    warp.strided(graph.num_launches, [&](uint32_t i) { graph.next[i] = oldest[i]; });
    graph.fetched += 1;
}

// Points the kernels of this replay at their regions.
TK_DEVICE void use_set(Warp& warp, const GraphTrace& graph) {
    warp.strided(graph.num_launches, [&](uint32_t i) {
        const ReplayRegion region = graph.has_next ? graph.next[i] : graph.spare[i];
        graph.current[i] = region;
        if (!graph.has_next) return;
        // In the arena, for the process that packs it: this region was used, and by which replay.
        auto* headers = reinterpret_cast<char*>(region.region().headers) - graph.mirror_offset;
        (reinterpret_cast<LaunchDescriptor*>(headers) - 1)->replay = static_cast<uint32_t>(graph.replays);
    });
}

}  // namespace detail

// The first node of a traced replay; one warp, and all kernels wait for it.
TK_DEVICE void begin_replay(Warp& warp, GraphTrace& state) {
    GraphTrace graph = state;
    graph.lost_records += detail::take_counts(warp, graph);
    detail::fetch_set(warp, graph);  // the one beside the last replay came too early, or this replay is the first
    graph.replays += 1;
    detail::use_set(warp, graph);
    graph.is_spare = !graph.has_next;
    graph.lost_replays += graph.is_spare;
    graph.has_next = false;
    warp.leader([&] { state = graph; });
}

// Beside the kernels, also one warp: fetches the set of the next replay, and tells the host how far the graph is. It is
// also run once at the end, to have the last replay counted.
TK_DEVICE void prepare_replay(Warp& warp, GraphTrace& state, bool is_last) {
    GraphTrace graph = state;
    if (is_last) {
        graph.lost_records += detail::take_counts(warp, graph);
        graph.is_spare = false;
    } else {
        detail::fetch_set(warp, graph);
    }
    warp.leader([&] {
        state = graph;
        graph.control->replays = graph.replays;
        graph.control->lost_replays = graph.lost_replays;
        graph.control->lost_records = graph.lost_records;
        // System scope, to the host's acquires in GraphRing: the set was read, and the replay before has stored all.
        store_release_system(&graph.control->fetched, graph.fetched);
        store_release_system(&graph.control->used, graph.replays - graph.lost_replays);
    });
}

}  // namespace tracekern
