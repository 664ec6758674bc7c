// What the kernels of all variants share: which block counts, how warps share work, where a block meets,
// acknowledgements, and the end of a call.
#pragma once

#include "comm/barrier.h"
#include "moe/p2p/events.h"
#include "moe/p2p/layout.h"

namespace tracekern {

// The first block counts; where it is the only one it works as well. It is the first because blocks start in order and
// every rank waits for its counts.
TK_DEVICE bool is_count_block(const Warp& warp) {
    return warp.block == 0;
}
TK_DEVICE bool is_working_block(const Warp& warp) {
    return warp.block != 0 || warp.num_blocks == 1;
}
TK_DEVICE uint32_t num_working_blocks(const Warp& warp) {
    return warp.num_blocks == 1 ? 1 : warp.num_blocks - 1;
}
// The block's place among those that work.
TK_DEVICE uint32_t working_block(const Warp& warp) {
    return warp.num_blocks == 1 ? 0 : warp.block - 1;
}

// ---- how warps share work: all of them, or half by half ----

// One warp's part of items that many share: first, first + stride, ...
struct Share {
    uint32_t first;
    uint32_t stride;

    // Of items that all warps of the grid share. Neighbouring items go to different blocks.
    TK_DEVICE static Share of_all(const Warp& warp) {
        return {warp.warp * warp.num_blocks + warp.block, warp.num_warps * warp.num_blocks};
    }
};

// What a warp has of the work that blocks share half by half. A block of one warp has both halves.
struct OwnPart {
    bool in_first_half;
    bool in_second_half;
    Share share;  // of the items of its half

    // block: of num_blocks that share. Neighbouring items go to different blocks.
    TK_DEVICE static OwnPart of(const Warp& warp, uint32_t block, uint32_t num_blocks) {
        if (warp.num_warps == 1) return {true, true, {block, num_blocks}};
        const uint32_t num_first = warp.num_warps / 2;
        const bool in_first = warp.warp < num_first;
        const uint32_t index = in_first ? warp.warp : warp.warp - num_first;
        const uint32_t count = in_first ? num_first : warp.num_warps - num_first;
        return {in_first, !in_first, {index * num_blocks + block, count * num_blocks}};
    }
};

TK_DEVICE uint32_t global_expert(const P2PArgs& args, uint32_t local_expert) {
    return args.comm.rank * args.shape.num_local_experts() + local_expert;
}

// A block barrier.
template <class Rec>
TK_DEVICE void wait_block(P2PContext<Rec>& context) {
    TK_WAIT(context.recorder, P2PEvent::wait_block);
    TK_END_AFTER_BARRIER(context.warp);
}

// What `peer` sent was read: it may send anew. Relaxed: the flag orders nothing, see its callers.
template <class Rec>
TK_DEVICE void acknowledge(P2PContext<Rec>& context, uint32_t peer) {
    TK_SIGNAL(context.recorder, P2PEvent::signal_ack, peer);
    signal_relaxed(context.warp, context.args.ack_flag(peer, context.comm.rank), context.epoch, 0);
}

// Everybody has read what I sent: the next call may overwrite it. All warps of one block.
template <class Rec>
TK_DEVICE void wait_acknowledged(P2PContext<Rec>& context) {
    for_peers_of_warp(context, [&](uint32_t peer) {
        const uint64_t* flag = context.args.ack_flag(context.comm.rank, peer);
        traced_wait<P2PChannel::ack, P2PEvent::wait_ack>(context, flag, peer);
    });
}

// The last block to get here leaves the counters as the next call wants to find them. All warps have read the epoch:
// each block has had a barrier since.
template <class Rec>
TK_DEVICE void prepare_next_call(P2PContext<Rec>& context) {
    Warp& warp = context.warp;
    const P2PArgs& args = context.args;
    if (warp.warp != 0) return;
    const uint64_t done = take_ticket<CommChannel::grid>(warp, &args.state->blocks_done.word);
    if (done != warp.num_blocks - 1) return;
    warp.strided(args.layout.num_partitions * args.shape.num_ranks, [&](uint32_t i) { args.send_count[i] = 0; });
    warp.leader([&] {
        args.state->blocks_done.word = 0;
        args.state->epoch.word = next_epoch(context.epoch);
    });
}

}  // namespace tracekern
