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

#include "comm/barrier.h"
#include "comm/signal.h"
#include "moe/p2p/acknowledge.h"
#include "moe/p2p/events.h"
#include "moe/p2p/layout.h"
#include "moe/p2p/rows.h"
#include "trace/recorder.h"

namespace tracekern {

TK_DEVICE uint32_t global_expert(const P2PArgs& args, uint32_t local_expert) {
    return args.comm.rank * args.shape.num_local_experts() + local_expert;
}

// The variants that are not fused: the experts as a kernel of their own.
template <class T, class Rec>
TK_DEVICE void scale_experts(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
    Rec recorder(trace, warp, static_cast<uint32_t>(P2PRole::scale), args.state->epoch);
    const uint32_t num_rows = args.expert_offset[args.shape.num_local_experts()];
    const uint32_t num_warps = warp.num_blocks * warp.num_warps;
    for (uint32_t row = warp.block * warp.num_warps + warp.warp; row < num_rows; row += num_warps) {
        const uint32_t expert = global_expert(args, args.row_origin[row].local_expert);
        TK_RANGE(recorder, P2PEvent::scale_token, expert, row);
        scale_row<T>(warp, args.expert_row(row), args.expert_row(row), args.expert_scale[expert], args.shape.hidden);
    }
}

template <class T, P2PVariant kVariant, class Rec>
TK_DEVICE void send_result(Warp& warp, const P2PArgs& args, Rec& recorder, uint32_t row, uint32_t epoch) {
    const RowOrigin origin = args.row_origin[row];
    const uint32_t peer = origin.src_rank;
    const uint32_t expert = global_expert(args, origin.local_expert);
    TK_SEQUENCE(recorder);
    TK_NEXT(P2PEvent::send_result, peer, origin.flat, expert);
    char* result = args.result_row(peer, origin.flat);
    if constexpr (kTraitsOf<kVariant>.fused) {
        scale_row<T>(warp, result, args.expert_row(row), args.expert_scale[expert], args.shape.hidden);
    } else {
        copy_row(warp, result, args.expert_row(row), args.shape.row_bytes());
    }
    poison(args.expert_row(row), args.shape.row_bytes());
    if constexpr (kTraitsOf<kVariant>.token_flags) {
        TK_NEXT(P2PEvent::signal_result, peer, origin.flat, expert);
        signal<P2PChannel::result>(warp, args.result_flag(peer, origin.flat), epoch, expert);
    }
}

// All results of this rank are on their way: one flag for each peer. All warps of all blocks.
template <class Rec>
TK_DEVICE void send_results_flags(Warp& warp, const P2PArgs& args, Rec& recorder, uint32_t epoch) {
    {
        TK_WAIT(recorder, P2PEvent::wait_grid);
        const bool ok =
            grid_barrier(warp, args.comm, &args.state->grid_arrivals, static_cast<uint32_t>(P2PStage::combine_send));
        TK_END_IF(ok);
        if (!ok) return;
    }
    if (warp.block != 0) return;
    for (uint32_t i = warp.warp; i < args.shape.num_ranks; i += warp.num_warps) {
        const uint32_t peer = args.comm.nth_peer(i);
        TK_SIGNAL(recorder, P2PEvent::signal_results, peer);
        signal<P2PChannel::results>(warp, args.results_flag(peer, args.comm.rank), epoch, 0);
    }
}

template <class T, P2PVariant kVariant, class Rec>
TK_DEVICE void combine_send(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
    const bool aborted = has_aborted(args.comm);  // on its way beside the loads below: 0.3 us (2 H200, 2026-11-22)
    const uint32_t epoch = args.state->epoch;
    Rec recorder(trace, warp, static_cast<uint32_t>(P2PRole::send), epoch);
    if (warp.block == 0) acknowledge_all(warp, args, recorder, epoch);
    const auto rows_of = [&](uint32_t local) { return args.expert_offset[local + 1] - args.expert_offset[local]; };
    const auto send_row = [&](uint32_t local, uint32_t i) {
        send_result<T, kVariant>(warp, args, recorder, args.expert_offset[local] + i, epoch);
    };
    if (aborted) return;
    for_rows<kTraitsOf<kVariant>.balanced>(warp, args.shape.num_local_experts(), rows_of, send_row);
    if constexpr (!kTraitsOf<kVariant>.token_flags) send_results_flags(warp, args, recorder, epoch);
}

// Waits for the results of one token, a choice a warp; false when this warp's choices gave up.
template <class Rec>
TK_DEVICE bool wait_results_of(Warp& warp, const P2PArgs& args, Rec& recorder, uint32_t token, uint32_t epoch) {
    bool ok = true;
    for (uint32_t choice = warp.warp; choice < args.shape.topk; choice += warp.num_warps) {
        const uint32_t flat = token * args.shape.topk + choice;
        const int32_t chosen = args.topk_idx[flat];
        if (!args.shape.is_expert(chosen)) continue;
        const uint32_t expert = static_cast<uint32_t>(chosen);
        const uint32_t peer = args.shape.rank_of(expert);
        TK_WAIT(recorder, P2PEvent::wait_result, peer, flat, expert);
        const uint64_t* flag = args.result_flag(args.comm.rank, flat);
        const WaitFor wait_for{static_cast<uint32_t>(P2PStage::combine_recv), peer, flat};
        const bool arrived = wait<P2PChannel::result>(warp, args.comm, flag, epoch, wait_for).ok;
        TK_END_IF(arrived);
        ok = ok && arrived;
    }
    return ok;
}

// All warps of the block: true when every one of them has what it waited for. `failed` is zero and this token's alone:
// a warp that is fast enough to fail the next token before a slow one has looked here marks another word.
template <class Rec>
TK_DEVICE bool all_warps_ok(Warp& warp, Rec& recorder, bool ok, uint32_t* failed) {
    if (!ok && warp.is_leader()) add_relaxed_block(failed, 1u);
    {
        TK_WAIT(recorder, P2PEvent::wait_block);
        TK_END_AFTER_BARRIER(warp);
    }
    return *failed == 0;
}

// Waits for the results of all ranks; false when it gave up.
template <class Rec>
TK_DEVICE bool wait_all_results(Warp& warp, const P2PArgs& args, Rec& recorder, uint32_t epoch) {
    bool ok = true;
    for (uint32_t i = 0; i < args.shape.num_ranks; ++i) {
        const uint32_t peer = args.comm.nth_peer(i);
        TK_WAIT(recorder, P2PEvent::wait_results, peer);
        const uint64_t* flag = args.results_flag(args.comm.rank, peer);
        const WaitFor wait_for{static_cast<uint32_t>(P2PStage::combine_recv), peer, 0};
        const bool arrived = wait<P2PChannel::results>(warp, args.comm, flag, epoch, wait_for).ok;
        TK_END_IF(arrived);
        ok = ok && arrived;
    }
    return ok;
}

// out[i] = sum over choices of weight * result[i], in fp32 and in the order of the choices, no fused multiply-add.
template <class T, uint32_t kCount>
TK_DEVICE void reduce_packs(Warp& warp, const P2PArgs& args, uint32_t token) {
    using Unit = Pack<T, kCount>;
    const uint32_t first = token * args.shape.topk;
    Unit* out = reinterpret_cast<Unit*>(args.out + uint64_t{token} * args.shape.row_bytes());
    warp.block_strided(args.shape.hidden / kCount, [&](uint32_t i) {
        float sums[kCount] = {};
        for (uint32_t flat = first; flat < first + args.shape.topk; ++flat) {
            if (!args.shape.is_expert(args.topk_idx[flat])) continue;
            const float weight = args.topk_weights[flat];
            Unit* result = reinterpret_cast<Unit*>(args.result_row(args.comm.rank, flat)) + i;
            const Unit unit = *result;
            unit.add_to(sums, weight);
            poison(result, sizeof(Unit));
        }
        out[i] = Unit::of(sums);
    });
}

// All warps of the block, each its share of the row.
template <class T>
TK_DEVICE void reduce_token(Warp& warp, const P2PArgs& args, uint32_t token) {
    if (can_pack(args.out, nullptr, args.shape.row_bytes())) {
        reduce_packs<T, kPackCount<T>>(warp, args, token);
    } else {
        reduce_packs<T, 1>(warp, args, token);
    }
}

// The last block to get here leaves the counters as the next call wants to find them. All warps have read the epoch:
// each block has had a barrier since.
TK_DEVICE void prepare_next_call(Warp& warp, const P2PArgs& args, uint32_t epoch) {
    if (warp.warp != 0) return;
    const uint32_t done = warp.once([&] { return add_acq_rel_device(&args.state->blocks_done, 1u); });
    if (done != warp.num_blocks - 1) return;
    warp.strided(args.layout.num_partitions * args.shape.num_ranks, [&](uint32_t i) { args.send_count[i] = 0; });
    warp.leader([&] {
        args.state->blocks_done = 0;
        args.state->epoch = next_epoch(epoch);
    });
}

template <class T, P2PVariant kVariant, class Rec>
TK_DEVICE void combine_recv(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
    const uint32_t epoch = args.state->epoch;
    Rec recorder(trace, warp, static_cast<uint32_t>(P2PRole::reduce), epoch);
    uint32_t* failed = warp.shared<ReduceShared>().failed;
    if (warp.warp == 0) warp.leader([&] { failed[0] = failed[1] = 0; });
    warp.block_sync();
    bool ok = true;
    if constexpr (!kTraitsOf<kVariant>.token_flags) {
        ok = all_warps_ok(warp, recorder, wait_all_results(warp, args, recorder, epoch), &failed[0]);
    }
    // A token a block: its warps wait for one choice each, then share the row.
    uint32_t parity = 0;
    for (uint32_t token = warp.block; ok && token < args.num_tokens; token += warp.num_blocks) {
        if constexpr (kTraitsOf<kVariant>.token_flags) {
            const bool arrived = wait_results_of(warp, args, recorder, token, epoch);
            ok = all_warps_ok(warp, recorder, arrived, &failed[parity]);
            parity ^= 1;
        }
        if (!ok) break;
        TK_RANGE(recorder, P2PEvent::reduce_token, token);
        reduce_token<T>(warp, args, token);
    }
    if (warp.block == 0) wait_acknowledged(warp, args, recorder, epoch, P2PStage::combine_recv);
    prepare_next_call(warp, args, epoch);
}

}  // namespace tracekern
