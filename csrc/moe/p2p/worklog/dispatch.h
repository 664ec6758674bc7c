// Dispatch: every token goes to the ranks of its experts.
//
// In dispatch_send the first block counts and tells each peer how many tokens come for each of its experts, then waits
// for the counts that come in; meanwhile all others copy rows into the peers' receive buffers and raise their flags.
//
// In dispatch_recv rows move from the receive buffer to their expert, in the layout a grouped GEMM reads.
//
// The variants of the worklog: `flag`, `token`, `fused`, `balanced`.
//
// A receive buffer of epoch e is written only after its owner acknowledged epoch e-1: combine_send raises the
// acknowledgement when dispatch_recv is through (a kernel boundary), combine_recv of the writer waits for it. Counts
// are sent to every rank, zero included, and every rank acknowledges, so no pair can run ahead.
#pragma once

#include "moe/p2p/counts.h"
#include "moe/p2p/worklog/variants.h"

namespace tracekern {

// Where a row of the expert input came from and which expert it is for.
struct RowOrigin {
    uint32_t flat;
    uint16_t src_rank;
    uint16_t local_expert;
};

// A token goes once to each of its experts (moe/p2p/counts.h): the counts for experts are those of rows.
struct RowOfEachChoice {
    TK_DEVICE static void count(Warp&, const P2PArgs&, uint32_t*) {}
    TK_DEVICE static void lay_out(Warp&, const P2PArgs&, const uint32_t*) {}

    template <class Rec>
    TK_DEVICE static uint32_t take(P2PContext<Rec>& context, uint32_t src_rank, const uint32_t* counts) {
        const P2PArgs& args = context.args;
        const uint32_t total =
            context.warp.sum_over(args.shape.num_local_experts(), [&](uint32_t local) { return counts[local]; });
        context.warp.leader([&] { args.recv_count[src_rank] = total; });
        return total;
    }
};

// Copies this warp's share of the flat tokens to their peers.
template <P2PVariant kVariant, class Rec>
TK_DEVICE void send_tokens(P2PContext<Rec>& context, Share share) {
    Warp& warp = context.warp;
    const P2PArgs& args = context.args;
    const uint32_t row_bytes = args.shape.row_bytes();
    for (uint32_t flat = share.first; flat < args.num_flat(); flat += share.stride) {
        const int32_t chosen = args.topk_idx[flat];
        if (!args.shape.is_expert(chosen)) continue;
        const uint32_t expert = static_cast<uint32_t>(chosen);
        const uint32_t peer = args.shape.rank_of(expert);
        const uint32_t slot = warp.once([&] { return add_relaxed_device(&args.send_count[peer], 1u); });
        TK_SEQUENCE(context.recorder);
        TK_NEXT(P2PEvent::copy_token, peer, slot, expert);
        char* row = args.recv_row(peer, args.comm.rank, slot);
        if (warp.is_leader()) *reinterpret_cast<RowHeader*>(row) = RowHeader{flat, expert};
        copy_row(
            warp, row + args.layout.header_bytes, args.x + uint64_t{flat / args.shape.topk} * row_bytes, row_bytes);
        if constexpr (kTraitsOf<kVariant>.token_flags) {
            TK_NEXT(P2PEvent::signal_token, peer, slot, expert);
            signal_peer<P2PChannel::token>(context, peer, args.token_flag(peer, args.comm.rank, slot), expert);
        }
    }
}

// All rows of this rank are on their way: one flag for each peer. All warps of all blocks.
template <class Rec>
TK_DEVICE void send_rank_flags(P2PContext<Rec>& context) {
    uint64_t* arrivals = &context.args.state->grid_arrivals.word;
    if (!traced_grid_barrier<P2PEvent::wait_grid>(context, arrivals) || context.warp.block != 0) return;
    for_peers_of_warp(context, [&](uint32_t peer) {
        const uint32_t tokens = context.args.send_count[peer];
        TK_SIGNAL(context.recorder, P2PEvent::signal_rank, peer, tokens);
        uint64_t* flag = context.args.rank_flag(peer, context.comm.rank);
        signal<P2PChannel::rank>(context.warp, flag, context.epoch, tokens);
    });
}

template <P2PVariant kVariant>
struct P2PDispatchSend : P2PKernel<P2PStage::dispatch_send> {
    TK_DEVICE static P2PRole role_of(bool counts) { return counts ? P2PRole::count : P2PRole::send; }

    // Counts and sums.
    static uint64_t shared_bytes(const P2PArgs& args, uint32_t) { return args.layout.shared.contributions; }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        const bool counts = is_count_block(warp);
        P2PContext<Rec> context(warp, args, trace, kStage, role_of(counts));
        if (counts) send_counts<RowOfEachChoice>(context);
        if (is_working_block(warp)) {
            const uint32_t first = working_block(warp) * warp.num_warps + warp.warp;
            send_tokens<kVariant>(context, {first, num_working_blocks(warp) * warp.num_warps});
        }
        if constexpr (!kTraitsOf<kVariant>.token_flags) send_rank_flags(context);
        if (counts) receive_counts<RowOfEachChoice>(context);
    }
};

// Moves the row in `slot` of `src_rank` to its expert.
template <class Rec>
TK_DEVICE void receive_token(P2PContext<Rec>& context, uint32_t src_rank, uint32_t slot) {
    Warp& warp = context.warp;
    const P2PArgs& args = context.args;
    char* row = args.recv_row(args.comm.rank, src_rank, slot);
    const RowHeader header = *reinterpret_cast<const RowHeader*>(row);
    TK_RANGE(context.recorder, P2PEvent::receive_token, src_rank, slot, header.expert);
    const uint32_t local = header.expert - args.comm.rank * args.shape.num_local_experts();
    const uint32_t at = warp.once([&] {
        const uint32_t free_row = add_relaxed_device(&args.expert_cursor[local], 1u);
        args.row_origin[free_row] = {header.flat, static_cast<uint16_t>(src_rank), static_cast<uint16_t>(local)};
        return free_row;
    });
    copy_row(warp, args.expert_row(at), row + args.layout.header_bytes, args.shape.row_bytes());
    poison(row, args.layout.row_stride);
}

template <P2PVariant kVariant>
struct P2PDispatchRecv : P2PKernel<P2PStage::dispatch_recv> {
    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        P2PContext<Rec> context(warp, args, trace, kStage, P2PRole::receive);
        const auto tokens_from = [&](uint32_t src_rank) { return args.recv_count[src_rank]; };
        uint32_t waited_for = args.shape.num_ranks;  // no rank
        bool ok = true;
        for_rows<kTraitsOf<kVariant>.balanced>(
            warp, args.shape.num_ranks, tokens_from, [&](uint32_t src_rank, uint32_t slot) {
                if constexpr (kTraitsOf<kVariant>.token_flags) {
                    const uint64_t* flag = args.token_flag(args.comm.rank, src_rank, slot);
                    ok = traced_wait<P2PChannel::token, P2PEvent::wait_token>(context, flag, src_rank, slot).ok;
                } else if (src_rank != waited_for) {
                    waited_for = src_rank;
                    const uint64_t* flag = args.rank_flag(args.comm.rank, src_rank);
                    ok = traced_wait<P2PChannel::rank, P2PEvent::wait_rank>(context, flag, src_rank).ok;
                }
                if (ok) receive_token(context, src_rank, slot);
            });
    }
};

}  // namespace tracekern
