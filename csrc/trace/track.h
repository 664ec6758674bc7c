// Which track of its launch a warp records, and where.
#pragma once

#include "platform/device.h"
#include "trace/record.h"

namespace tracekern::detail {

struct Track {
    TrackHeader* header;
    WideRecord* records;
    uint64_t event_mask;
    uint32_t num_records;  // that there is room for
    uint16_t generation;
    uint16_t state;  // 0: nothing is recorded; else kIsRecorded, in a graph also kTellsEpoch
};
constexpr uint16_t kIsRecorded = 1;
constexpr uint16_t kTellsEpoch = 2;  // elsewhere the host knows it
static_assert((kIsRecorded | kTellsEpoch) < 1 << kGenerationShift, "a ring keeps state and generation in one word");

TK_DEVICE bool is_selected(const LaunchDescriptor& launch, uint32_t block, uint32_t role) {
    return (block - launch.block_first < launch.block_stop - launch.block_first) &
           ((launch.role_mask & 1u << role % 32) != 0);
}

// Of warp `warp` of block `index` of those that are recorded.
TK_DEVICE Track track_at(const LaunchDescriptor& launch, const Region& region, uint32_t index, uint32_t warp) {
    const uint32_t track = index * launch.warps_per_block + warp;
    return {region.headers + track,
            region.records + uint64_t{track} * launch.records_per_track,
            launch.event_mask,
            launch.records_per_track,
            launch.generation,
            kIsRecorded};
}

// The same in a graph.
TK_DEVICE Track track_of_replay(const LaunchDescriptor& launch, uint32_t index, uint32_t warp) {
    const ReplayRegion replay = *launch.of_replay;
    Track track = track_at(launch, replay.region(), index, warp);
    track.generation = replay.generation();
    track.state |= kTellsEpoch;
    if (!replay.records) track.num_records = 0;
    return track;
}

// What the host did not know about, with the generation: a region that is used again still says what an earlier
// launch left there.
TK_DEVICE void tell_blocks(TrackHeader* first_of_launch, uint32_t num_blocks, uint16_t generation) {
    first_of_launch->block = num_blocks;
    store_release_system(&first_of_launch->launch_idx, uint32_t{generation});  // behind it: never one without the other
}
TK_DEVICE void tell_warps(TrackHeader* first_of_block, uint32_t num_warps, uint16_t generation) {
    first_of_block->warps_run = uint32_t{generation} << 16 | num_warps;
}

// The same where a part of the blocks is recorded, and where the host did not know about this warp or block, which it
// is now. A call, out of the way of all other warps: instructions that they jump over slow a kernel down.
TK_DEVICE_CALL Track find_track(LaunchDescriptor launch,
                                uint32_t role,
                                uint32_t block,
                                uint32_t num_blocks,
                                uint32_t warp,
                                uint32_t num_warps,
                                bool is_leader) {
    const bool in_graph = launch.of_replay;
    const Region region = in_graph ? launch.of_replay->region() : launch.region;
    const uint16_t generation = in_graph ? launch.of_replay->generation() : launch.generation;
    const uint32_t step = launch.block_step & ~kInGraph;
    if (!is_selected(launch, block, role)) {
        // The first block that the host did not know about writes how many there are.
        const bool is_surplus = block == launch.num_blocks && block != 0 && warp == 0;
        if (is_surplus && is_leader) tell_blocks(region.headers, num_blocks, generation);
        return {};
    }
    const uint32_t index = block - launch.block_first;
    if (index % step) return {};
    if (warp >= launch.warps_per_block) {  // unknown to the host: the track is another block's
        TrackHeader* const first_of_block = region.headers + index / step * launch.warps_per_block;
        if (is_leader) tell_warps(first_of_block, num_warps, generation);
        return {};
    }
    return in_graph ? track_of_replay(launch, index / step, warp) : track_at(launch, region, index / step, warp);
}

TK_DEVICE_CALL Track find_recorded(LaunchDescriptor launch, uint32_t block, uint32_t warp) {
    const uint32_t index = (block - launch.block_first) / (launch.block_step & ~kInGraph);
    return launch.of_replay ? track_of_replay(launch, index, warp) : track_at(launch, launch.region, index, warp);
}
// The track of a warp that is known to record.
TK_DEVICE Track own_track(const LaunchDescriptor& launch, uint32_t block, uint32_t warp) {
    if (launch.block_step == 1) return track_at(launch, launch.region, block - launch.block_first, warp);
    return find_recorded(launch, block, warp);
}

}  // namespace tracekern::detail
