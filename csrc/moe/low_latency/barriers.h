// Where the warps of a kernel of this family meet: a warp group, a block, the grid.
//
// A warp that has nothing to do between two barriers arrives at once, holds up nobody, and records no wait: with few
// tokens nearly all warps are such. What a warp does record has the wait in front of it, and that behind it, on record.
#pragma once

#include "comm/barrier.h"
#include "moe/low_latency/layout.h"

namespace tracekern {

// All sub-warps of the warp group have come as far as this. num_shared: of what they share one by one, in turns.
template <class Rec>
TK_DEVICE void wait_sub_warps(LowLatencyContext<Rec>& context, [[maybe_unused]] uint32_t num_shared) {
    const WarpGroup group = context.warp_group();
    TK_WAIT_IF(context.recorder,
               context.is_recorded(context.sub_warp_id() < num_shared),
               LowLatencyEvent::wait_sub_warps,
               group.id);
    TK_END_AFTER_BARRIER(group);
}

// The same, for the rows that one of them claims.
template <class Rec>
TK_DEVICE void wait_group(LowLatencyContext<Rec>& context, ExpertPair from) {
    TK_WAIT(context.recorder, LowLatencyEvent::wait_group, from.rank, from.local_expert);
    context.warp_group().block_sync();
    TK_END(context.group().begin);
}

// All warps of all blocks; false when it gave up, the same in all warps of a block, which have barriers to come.
template <class Rec>
TK_DEVICE bool wait_grid(LowLatencyContext<Rec>& context, bool has_part) {
    Warp& warp = context.warp;
    uint64_t* arrivals = &context.args.state->grid_arrivals;
    const bool ok = traced_grid_barrier<LowLatencyEvent::wait_grid>(context, arrivals, context.is_recorded(has_part));
    if (warp.warp == 0) warp.leader([&] { context.shared().failed = !ok; });
    warp.block_sync();
    return context.shared().failed == 0;
}

// What all kernels begin with: shared memory as zeros.
template <class Rec>
TK_DEVICE void clear_shared(LowLatencyContext<Rec>& context) {
    constexpr uint32_t kNumWords = sizeof(LowLatencyShared) / sizeof(uint32_t);
    auto* words = reinterpret_cast<uint32_t*>(&context.shared());
    context.warp.block_strided(kNumWords, [&](uint32_t i) { words[i] = 0; });
    context.warp.block_sync();
}

// Counts the blocks that are through; true in all warps of the last one, which comes after all that the others did.
template <class Rec>
TK_DEVICE bool is_last_block(LowLatencyContext<Rec>& context) {
    Warp& warp = context.warp;
    warp.block_sync();
    if (warp.warp == 0) {
        uint32_t* done = &context.args.state->blocks_done;
        const uint32_t before = take_ticket<CommChannel::grid>(warp, done);
        warp.leader([&] {
            context.shared().is_last_block = before == warp.num_blocks - 1;
            if (before == warp.num_blocks - 1) *done = 0;
        });
    }
    warp.block_sync();
    return context.shared().is_last_block != 0;
}

}  // namespace tracekern
