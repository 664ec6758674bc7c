// The exchange of counts: each rank tells each other one how many tokens come for each of its cells (P2PLayout), and
// lays out the rows of its own by what it was told. All warps of the block that counts.
//
// For whom a variant sends rows is a type, Rows:
//   count(warp, args, others)           adds what else is told to each rank: behind the counts for its experts
//   take(context, src_rank, counts)     keeps which rows come from a rank, by its counts; returns how many. One warp
//   lay_out(warp, args, incoming)       lays out the rows of all ranks by the counts of all
#pragma once

#include "moe/p2p/call.h"

namespace tracekern {

// Counts this rank's tokens for each cell, and its rows, and tells the experts' ranks.
template <class Rows, class Rec>
TK_DEVICE void send_counts(P2PContext<Rec>& context) {
    Warp& warp = context.warp;
    const P2PArgs& args = context.args;
    const uint32_t num_local = args.shape.num_local_experts();
    const uint32_t num_counts = args.layout.num_counts;
    uint32_t* counts = shared_at<uint32_t>(warp, args.layout.shared.counts);
    {
        TK_RANGE(context.recorder, P2PEvent::count_tokens, args.num_tokens);
        warp.block_strided(args.shape.num_ranks * num_counts, [&](uint32_t i) { counts[i] = 0; });
        warp.block_sync();
        warp.block_strided(args.num_flat(), [&](uint32_t flat) {
            if (!args.shape.is_expert(args.topk_idx[flat])) return;
            const uint32_t expert = static_cast<uint32_t>(args.topk_idx[flat]);
            const uint32_t cell = args.cell(args.is_cut() ? args.partition_of(flat) : 0, expert % num_local);
            add_relaxed_block(&counts[expert / num_local * num_counts + cell], 1u);
        });
        Rows::count(warp, args, counts + args.layout.num_cells);
        TK_END_AFTER_BARRIER(warp);
    }
    for_peers_of_warp(context, [&](uint32_t peer) {
        TK_SIGNAL(context.recorder, P2PEvent::signal_counts, peer);
        // Each flag is its own payload, so relaxed is enough.
        const auto count_of = [&](uint32_t i) { return counts[peer * num_counts + i]; };
        signal_all_relaxed(warp, args.count_flags(peer, args.comm.rank), num_counts, context.epoch, count_of);
    });
}

// Waits for the counts of one rank and takes them. The value of the result is how many rows come from there.
template <class Rows, class Rec>
TK_DEVICE WaitResult wait_counts(P2PContext<Rec>& context, uint32_t src_rank, uint32_t* counts) {
    Warp& warp = context.warp;
    const P2PArgs& args = context.args;
    const uint32_t num_counts = args.layout.num_counts;
    const uint64_t* flags = args.count_flags(args.comm.rank, src_rank);
    const auto take = [&](uint32_t i, uint32_t value) { counts[i] = value; };
    const WaitFor whom = wait_for(context, src_rank);
    const bool ok = wait_all<P2PChannel::counts>(warp, args.comm, flags, num_counts, context.epoch, whom, take);
    // After a failure nothing more may be touched: no rows.
    if (!ok) warp.strided(num_counts, [&](uint32_t i) { counts[i] = 0; });
    return {ok, Rows::take(context, src_rank, counts)};
}

// Waits for everybody's counts and lays out the rows of all cells. After send_counts().
template <class Rows, class Rec>
TK_DEVICE void receive_counts(P2PContext<Rec>& context) {
    Warp& warp = context.warp;
    const P2PArgs& args = context.args;
    const uint32_t num_cells = args.layout.num_cells;
    const uint32_t num_counts = args.layout.num_counts;
    uint32_t* incoming = shared_at<uint32_t>(warp, args.layout.shared.counts);
    uint32_t* sums = shared_at<uint32_t>(warp, args.layout.shared.sums);
    // A warp writes over those counts alone that it has sent itself: the ranks are dealt out as in send_counts().
    for_peers_of_warp(context, [&](uint32_t src_rank) {
        const auto wait_now = [&] { return wait_counts<Rows>(context, src_rank, incoming + src_rank * num_counts); };
        record_wait<P2PEvent::wait_counts>(context, wait_now, src_rank);
    });
    wait_block(context);
    Rows::lay_out(warp, args, incoming);
    warp.block_strided(num_cells, [&](uint32_t cell) {
        uint32_t sum = 0;
        for (uint32_t src_rank = 0; src_rank < args.shape.num_ranks; ++src_rank) {
            sum += incoming[src_rank * num_counts + cell];
        }
        sums[cell] = sum;
    });
    warp.block_sync();
    if (warp.warp != 0) return;
    warp.leader([&] {
        uint32_t row = 0;
        for (uint32_t cell = 0; cell < num_cells; ++cell) {
            args.expert_offset[cell] = args.expert_cursor[cell] = row;
            row += sums[cell];
        }
        args.expert_offset[num_cells] = row;
    });
}

}  // namespace tracekern
