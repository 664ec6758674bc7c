// How a CUDA graph records: its arguments are frozen, so the kernels of its traced instance are told a fixed place in
// device memory, and the first node of every replay puts there the descriptors that this replay shall use.
//
// The host lays regions ready in a ring, one set (a descriptor for each launch of the graph) a replay. The first node
// takes the oldest set; where the host came late it takes none, and the kernels of that replay only count what they
// would have recorded. The GPU never waits for the host. docs/graphs.md has the whole of it.
#pragma once

#include "platform/device.h"
#include "trace/record.h"

namespace tracekern {

// Both sides see it: host memory that the device maps.
struct GraphControl {
    uint64_t placed;        // by the host: sets laid ready so far
    uint64_t taken;         // by the device: sets used so far; the host may overwrite the ring up to here
    uint64_t replays;       // of the traced instance, begun so far
    uint64_t lost_replays;  // that found no set
    uint64_t lost_records;  // that those would have written, up to the last replay but one
};

struct GraphTrace {
    GraphControl* control;
    const LaunchDescriptor* ring;   // [num_slots][num_launches], host memory
    LaunchDescriptor* current;      // [num_launches] what the kernels read
    const LaunchDescriptor* spare;  // [num_launches] count only
    uint64_t mirror_offset;         // of a track header: its address less its address in the arena
    uint32_t num_slots;
    uint32_t num_launches;
    uint64_t taken;
    uint64_t replays;
    uint64_t lost_replays;
    uint64_t lost_records;
    uint32_t is_spare;  // the last replay only counted
};

namespace detail {

// What the last replay counted, if it only counted; clears the counts.
TK_DEVICE uint64_t take_counts(Warp& warp, const GraphTrace& graph) {
    uint64_t total = 0;
    for (uint32_t i = 0; graph.is_spare && i < graph.num_launches; ++i) {
        const LaunchDescriptor& spare = graph.spare[i];
        const uint32_t num_blocks = (spare.block_stop - spare.block_first + spare.block_step - 1) / spare.block_step;
        total += warp.sum_over(num_blocks * spare.warps_per_block, [&](uint32_t track) {
            const uint32_t attempted = spare.headers[track].attempted;
            spare.headers[track].attempted = 0;
            return attempted;
        });
    }
    return total;
}

}  // namespace detail

// The first node of a traced replay; one warp. It is also run once at the end, to have the last replay counted.
TK_DEVICE void advance_graph(Warp& warp, GraphTrace& graph, bool begins_replay) {
    const uint64_t lost = detail::take_counts(warp, graph);
    const uint64_t placed = load_acquire_system(&graph.control->placed);
    const uint64_t taken = graph.taken, replays = graph.replays, lost_replays = graph.lost_replays;
    const uint64_t lost_records = graph.lost_records + lost;
    const bool finds_set = begins_replay && taken < placed;
    const bool is_spare = begins_replay && !finds_set;
    if (begins_replay) {
        const LaunchDescriptor* set =
            finds_set ? graph.ring + taken % graph.num_slots * graph.num_launches : graph.spare;
        warp.copy_vectors<Vector16>(
            graph.current, set, graph.num_launches * sizeof(LaunchDescriptor) / sizeof(Vector16));
        // In the arena, for whoever packs it: this region was used, and by which replay.
        warp.strided(finds_set ? graph.num_launches : 0, [&](uint32_t i) {
            auto* headers = reinterpret_cast<char*>(set[i].headers) - graph.mirror_offset;
            (reinterpret_cast<LaunchDescriptor*>(headers) - 1)->replay = static_cast<uint32_t>(replays) + 1;
        });
    }
    warp.leader([&] {
        graph.taken = taken + finds_set;
        graph.replays = replays + begins_replay;
        graph.lost_replays = lost_replays + is_spare;
        graph.lost_records = lost_records;
        graph.is_spare = is_spare;
        graph.control->replays = replays + begins_replay;
        graph.control->lost_replays = lost_replays + is_spare;
        graph.control->lost_records = lost_records;
        store_release_system(&graph.control->taken, taken + finds_set);
    });
}

}  // namespace tracekern
