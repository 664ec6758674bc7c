// Where the warps of a kernel of this family meet: a warp group, or a block. No block waits for all others of its rank.
//
// A warp that has nothing to do between two barriers arrives at once, holds up nobody, and records no wait: with few
// tokens nearly all warps are such. What a warp does record has the wait in front of it, and that behind it, on record.
#pragma once

#include "comm/barrier.h"
#include "moe/low_latency/put.h"

namespace tracekern {

// All sub-warps of the warp group have come as far as this. num_shared: of what they share one by one, in turns.
template <class Context>
TK_DEVICE void wait_sub_warps(Context& context, [[maybe_unused]] uint32_t num_shared) {
    const WarpGroup group = context.warp_group();
    const bool has_part = context.is_recorded(context.sub_warp_id() < num_shared);
    traced_barrier_if<LowLatencyEvent::wait_sub_warps>(has_part, context, group, group.id);
}

// The same, for the rows of a pair that one of them claims; returns how many. Only behind the barrier it is known which
// sub-warps have a row; for the second one all waited.
template <class Context>
TK_DEVICE uint32_t wait_claimed(Context& context, ExpertPair from) {
    TK_TIME(context.recorder, LowLatencyEvent::wait_group, arrived);
    context.warp_group().block_sync();
    const uint32_t count = context.group().count, sub_warp = context.sub_warp_id();
    if (context.is_recorded(sub_warp < count || sub_warp == 1)) {
        TK_WAIT_SINCE(context.recorder, arrived, LowLatencyEvent::wait_group, from.rank, from.local_expert);
        TK_END(context.group().begin);
    }
    return count;
}

// One warp of each block calls it, once in a kernel. True in that of the block that comes last: what warps of all
// blocks did before, and told theirs behind a barrier, is done. All have read what the kernel found in the slot, each
// before it came to begin_kernel()'s barrier.
template <class Context>
TK_DEVICE bool is_last_block(Context& context) {
    uint32_t* blocks_passed = &context.args.state->blocks_passed;
    const uint32_t before = take_ticket<CommChannel::grid>(context.warp, blocks_passed);
    if (before != context.warp.num_blocks - 1) return false;
    context.warp.leader([&] { *blocks_passed = 0; });
    return true;
}

// Tells all ranks that this rank's calls of the slot are over as far as combine `number` of the handle of `epoch`, or
// its dispatch where that is 0, and waits until they are at each of them. All warps of a block share the peers; false:
// one gave up. A flag only goes on, so what it says holds however far a peer has come since.
template <class Context>
TK_DEVICE bool exchange_acks(Context& context, uint64_t epoch, uint32_t number) {
    constexpr auto kChannel = LowLatencyChannel::ack;
    const auto& args = context.args;
    Warp& warp = context.warp;
    const auto tell = [&](uint32_t peer) {
        TK_SIGNAL(context.recorder, LowLatencyEvent::signal_ack, peer, number & kCombineMask);
        if (is_far(context, peer)) return put_ack(context, peer, epoch, number);
        signal<kChannel>(warp, args.ack(peer, context.comm.rank), epoch, number);
    };
    const auto wait_for_peer = [&](uint32_t peer) {
        const auto wait_now = [&] {
            const uint64_t* flag = args.ack(context.comm.rank, peer);
            return wait_reached<kChannel>(warp, context.comm, flag, epoch, number, wait_for(context, peer));
        };
        if (record_wait<LowLatencyEvent::wait_ack>(context, wait_now, peer, number & kCombineMask).ok) return;
        warp.leader([&] { context.shared().failed = 1; });
    };
    if (warp.block == 0) for_peers_of_warp(context, tell);
    for_peers_of_warp(context, wait_for_peer);
    warp.block_sync();
    return context.shared().failed == 0;
}

// All warps of the block, or those of them that share its tokens.
template <class Context>
TK_DEVICE void wait_token_warps([[maybe_unused]] Context& context, const WarpGroup& warps) {
    TK_WAIT(context.recorder, LowLatencyEvent::wait_sub_warps, warps.id);
    TK_END_AFTER_BARRIER(warps);
}

// What all kernels but that of experts begin with: shared memory as zeros. False if some rank gave up, the same in all
// warps of a block: what an earlier kernel of this rank waited for may never have come, and then nothing says that the
// peers' buffers are free. number: of a combine. is_ready: what the first warp waits for before all go on; false: gave
// up.
template <class Context, class IsReady>
TK_DEVICE bool begin_kernel(Context& context, uint32_t number, IsReady is_ready) {
    Warp& warp = context.warp;
    LowLatencyShared& shared = context.shared();
    if (warp.warp == 0) {
        const WaitFor nobody{context.stage, context.comm.rank, 0};
        const bool gives_up =
            gives_up_with_others(warp, context.comm, channel_number(CommChannel::grid), nobody) || !is_ready();
        warp.leader([&] {
            shared.failed = gives_up;
            shared.number = number;
        });
    }
    constexpr uint32_t kNumSet = 2, kNumWords = sizeof(LowLatencyShared) / sizeof(uint32_t);
    auto* words = reinterpret_cast<uint32_t*>(&shared);
    warp.block_strided(kNumWords - kNumSet, [&](uint32_t i) { words[kNumSet + i] = 0; });
    warp.block_sync();
    return shared.failed == 0;
}

}  // namespace tracekern
