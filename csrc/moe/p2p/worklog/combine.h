// Combine: every expert's results go back to the token's rank, which adds them up.
//
// After a rank gave up combine_send sends nothing: rows that never came would go out as what the call before left.
//
// combine_send acknowledges the receive buffers that dispatch_recv has read, then copies each row to its source and
// raises its flag. The fused variants scale (the stand-in for the expert) on the way.
//
// combine_recv takes a token a block: its warps wait for one result each, then share the row and add the results in the
// order of the token's choices, in fp32: the same bits in every variant. The last block prepares the next call.
//
// The result buffer needs no acknowledgement of its own: a rank sends results of epoch e+1 to a source only after it
// has the source's counts of e+1, which the source sends after its combine_recv of e.
#pragma once

#include "moe/p2p/dedup_combine.h"
#include "moe/p2p/worklog/dispatch.h"

namespace tracekern {

// Shared memory of a block of combine_recv, in front of the lists of its warps.
struct ReduceShared {
    uint32_t failed[2];  // [parity of the token's turn] a warp waited in vain
};

// The variants that are not fused: the experts as a kernel of their own.
template <class T>
struct P2PScaleExperts : P2PKernel<P2PStage::scale_experts> {
    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        P2PContext<Rec> context(warp, args, trace, kStage, P2PRole::scale);
        const uint32_t num_rows = args.expert_offset[args.shape.num_local_experts()];
        const uint32_t num_warps = warp.num_blocks * warp.num_warps;
        for (uint32_t row = warp.block * warp.num_warps + warp.warp; row < num_rows; row += num_warps) {
            const uint32_t expert = global_expert(args, args.row_origin[row].local_expert);
            TK_RANGE(context.recorder, P2PEvent::scale_token, expert, row);
            args.experts[expert].apply<T>(warp, args.expert_row(row), args.expert_row(row), args.shape.hidden);
        }
    }
};

template <class T, P2PVariant kVariant, class Rec>
TK_DEVICE void send_result(P2PContext<Rec>& context, uint32_t row) {
    Warp& warp = context.warp;
    const P2PArgs& args = context.args;
    const RowOrigin origin = args.row_origin[row];
    const uint32_t peer = origin.src_rank;
    const uint32_t expert = global_expert(args, origin.local_expert);
    TK_SEQUENCE(context.recorder);
    TK_NEXT(P2PEvent::send_result, peer, origin.flat, expert);
    char* result = args.result_row(peer, origin.flat);
    if constexpr (kTraitsOf<kVariant>.fused) {
        args.experts[expert].apply<T>(warp, result, args.expert_row(row), args.shape.hidden);
    } else {
        copy_row(warp, result, args.expert_row(row), args.shape.row_bytes());
    }
    poison(args.expert_row(row), args.shape.row_bytes());
    if constexpr (kTraitsOf<kVariant>.token_flags) {
        TK_NEXT(P2PEvent::signal_result, peer, origin.flat, expert);
        signal_peer<P2PChannel::result>(context, peer, args.result_flag(peer, origin.flat), expert);
    }
}

// All results of this rank are on their way: one flag for each peer. All warps of all blocks.
template <class Rec>
TK_DEVICE void send_results_flags(P2PContext<Rec>& context) {
    uint64_t* arrivals = &context.args.state->combine_arrivals.word;
    if (!traced_grid_barrier<P2PEvent::wait_grid>(context, arrivals) || context.warp.block != 0) return;
    for_peers_of_warp(context, [&](uint32_t peer) {
        TK_SIGNAL(context.recorder, P2PEvent::signal_results, peer);
        uint64_t* flag = context.args.results_flag(peer, context.comm.rank);
        signal<P2PChannel::results>(context.warp, flag, context.epoch, 0);
    });
}

// My peers may overwrite their part of my receive buffer and of my counts. The first block. Relaxed is enough: both
// were read in an earlier kernel, the peer writes in a later one, and its results, which are released, order every row.
template <class Rec>
TK_DEVICE void acknowledge_all(P2PContext<Rec>& context) {
    for_peers_of_warp(context, [&](uint32_t peer) { acknowledge(context, peer); });
}

template <class T, P2PVariant kVariant>
struct P2PCombineSend : P2PKernel<P2PStage::combine_send> {
    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        const auto aborted = warp.lanes([&](int) { return uint32_t{lane_sees_abort(args.comm)}; });
        P2PContext<Rec> context(warp, args, trace, kStage, P2PRole::send);
        if (warp.block == 0) acknowledge_all(context);
        const auto rows_of = [&](uint32_t local) { return args.expert_offset[local + 1] - args.expert_offset[local]; };
        const auto send_row = [&](uint32_t local, uint32_t i) {
            send_result<T, kVariant>(context, args.expert_offset[local] + i);
        };
        // An abort may come between the looks of two warps, so all of them go to the barrier. Its release and acquire
        // make a look before it happen before the one behind it: where one warp left its rows out, no flag is raised.
        if (!warp.shuffle(aborted, 0)) {
            for_rows<kTraitsOf<kVariant>.balanced>(warp, args.shape.num_local_experts(), rows_of, send_row);
        }
        if constexpr (!kTraitsOf<kVariant>.token_flags) send_results_flags(context);
    }
};

// Waits for the results of one token, a choice a warp; false when this warp's choices gave up.
template <class Rec>
TK_DEVICE bool wait_results_of(P2PContext<Rec>& context, uint32_t token) {
    const P2PArgs& args = context.args;
    bool ok = true;
    for (uint32_t choice = context.warp.warp; choice < args.shape.topk; choice += context.warp.num_warps) {
        const uint32_t flat = token * args.shape.topk + choice;
        const int32_t chosen = args.topk_idx[flat];
        if (!args.shape.is_expert(chosen)) continue;
        const uint32_t expert = static_cast<uint32_t>(chosen);
        const uint32_t peer = args.shape.rank_of(expert);
        const uint64_t* flag = args.result_flag(args.comm.rank, flat);
        ok = traced_wait<P2PChannel::result, P2PEvent::wait_result>(context, flag, peer, flat, expert).ok && ok;
    }
    return ok;
}

// All warps of the block: true when every one of them has what it waited for. `failed` is zero and this token's alone:
// a warp that is fast enough to fail the next token before a slow one has looked here marks another word.
template <class Rec>
TK_DEVICE bool all_warps_ok(P2PContext<Rec>& context, bool ok, uint32_t* failed) {
    if (!ok && context.warp.is_leader()) add_relaxed_block(failed, 1u);
    wait_block(context);
    return *failed == 0;
}

// Waits for the results of all ranks; false when it gave up.
template <class Rec>
TK_DEVICE bool wait_all_results(P2PContext<Rec>& context) {
    bool ok = true;
    for (uint32_t i = 0; i < context.comm.num_ranks; ++i) {
        const uint32_t peer = context.comm.nth_peer(i);
        const uint64_t* flag = context.args.results_flag(context.comm.rank, peer);
        ok = traced_wait<P2PChannel::results, P2PEvent::wait_results>(context, flag, peer).ok && ok;
    }
    return ok;
}

// Adds up a token's results. All warps of the block, each its share of the row.
template <class T>
TK_DEVICE void reduce_token(Warp& warp, const P2PArgs& args, uint32_t token) {
    Contribution* list = contributions_of(warp, args);
    const uint32_t count = list_results<ResultOfEachChoice>(warp, args, token, list);
    char* out = args.out + uint64_t{token} * args.shape.row_bytes();
    sum_rows<T, false, false, kFewSumLoads>(warp, out, list, count, args.shape.hidden, warp.warp, warp.num_warps);
}

template <class T, P2PVariant kVariant>
struct P2PCombineRecv : P2PKernelWithLists<P2PStage::combine_recv> {
    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        P2PContext<Rec> context(warp, args, trace, kStage, P2PRole::reduce);
        uint32_t* failed = warp.shared<ReduceShared>().failed;
        if (warp.warp == 0) warp.leader([&] { failed[0] = failed[1] = 0; });
        warp.block_sync();
        bool ok = true;
        if constexpr (!kTraitsOf<kVariant>.token_flags) {
            ok = all_warps_ok(context, wait_all_results(context), &failed[0]);
        }
        // A token a block: its warps wait for one choice each, then share the row.
        uint32_t parity = 0;
        for (uint32_t token = warp.block; ok && token < args.num_tokens; token += warp.num_blocks) {
            if constexpr (kTraitsOf<kVariant>.token_flags) {
                ok = all_warps_ok(context, wait_results_of(context, token), &failed[parity]);
                parity ^= 1;
            }
            if (!ok) break;
            TK_RANGE(context.recorder, P2PEvent::reduce_token, token);
            reduce_token<T>(warp, args, token);
        }
        if (warp.block == 0) wait_acknowledged(context);
        prepare_next_call(context);
    }
};

}  // namespace tracekern
