// Where the warps of a kernel of this family meet: a warp group, or a block. No block waits for all others of its rank.
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

// All warps of the block, or those of them that share its tokens.
template <class Rec>
TK_DEVICE void wait_token_warps([[maybe_unused]] LowLatencyContext<Rec>& context, const WarpGroup& warps) {
    TK_WAIT(context.recorder, LowLatencyEvent::wait_sub_warps, warps.id);
    TK_END_AFTER_BARRIER(warps);
}

// What all kernels but that of experts begin with: shared memory as zeros. False if some rank gave up, the same in all
// warps of a block: what an earlier kernel of this rank waited for may never have come, and then nothing says that the
// peers' buffers are free.
template <class Rec>
TK_DEVICE bool begin_kernel(LowLatencyContext<Rec>& context) {
    Warp& warp = context.warp;
    LowLatencyShared& shared = context.shared();
    if (warp.warp == 0) {
        const WaitFor nobody{context.stage, context.comm.rank, 0};
        const bool gives_up = gives_up_with_others(warp, context.comm, channel_number(CommChannel::grid), nobody);
        warp.leader([&] { shared.failed = gives_up; });
    }
    constexpr uint32_t kNumWords = sizeof(LowLatencyShared) / sizeof(uint32_t);
    auto* words = reinterpret_cast<uint32_t*>(&shared);
    warp.block_strided(kNumWords - 1, [&](uint32_t i) { words[1 + i] = 0; });
    warp.block_sync();
    return shared.failed == 0;
}

}  // namespace tracekern
