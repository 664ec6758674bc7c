// Dispatch: every token goes to the ranks of its experts.
//
// In dispatch_send one block counts and tells each peer how many tokens come for each of its experts, then waits for
// the counts that come in; meanwhile all others copy rows into the peers' receive buffers and raise their flags.
//
// In dispatch_recv rows move from the receive buffer to their expert, in the layout a grouped GEMM reads.
//
// The deduplicated variants (moe/p2p/dedup_dispatch.h) count here too.
//
// A receive buffer of epoch e is written only after its owner acknowledged epoch e-1: combine_send raises the
// acknowledgement when dispatch_recv is through (a kernel boundary), combine_recv of the writer waits for it. Counts
// are sent to every rank, zero included, and every rank acknowledges, so no pair can run ahead.
#pragma once

#include "comm/barrier.h"
#include "comm/signal.h"
#include "moe/p2p/acknowledge.h"
#include "moe/p2p/events.h"
#include "moe/p2p/layout.h"
#include "trace/recorder.h"

namespace tracekern {

// The ranks that have experts of this token, a bit each.
TK_DEVICE uint64_t destinations(const P2PArgs& args, uint32_t token) {
    const int32_t* chosen = args.topk_idx + uint64_t{token} * args.shape.topk;
    uint64_t ranks = 0;
    for (uint32_t choice = 0; choice < args.shape.topk; ++choice) {
        const int32_t expert = chosen[choice];
        if (args.shape.is_expert(expert)) ranks |= uint64_t{1} << args.shape.rank_of(static_cast<uint32_t>(expert));
    }
    return ranks;
}

// Counts this rank's tokens for each expert, deduplicated also the rows for each rank and partition, and tells the
// experts' ranks. All warps of one block.
template <P2PVariant kVariant, class Rec>
TK_DEVICE void send_counts(Warp& warp, const P2PArgs& args, Rec& recorder, uint32_t epoch) {
    const uint32_t num_local = args.shape.num_local_experts();
    const uint32_t num_counts = args.layout.num_counts;
    uint32_t* counts = shared_at<uint32_t>(warp, args.layout.shared.counts);
    {
        TK_RANGE(recorder, P2PEvent::count_tokens, args.num_tokens);
        warp.block_strided(args.shape.num_ranks * num_counts, [&](uint32_t i) { counts[i] = 0; });
        warp.block_sync();
        warp.block_strided(args.num_flat(), [&](uint32_t flat) {
            if (!args.shape.is_expert(args.topk_idx[flat])) return;
            const uint32_t expert = static_cast<uint32_t>(args.topk_idx[flat]);
            add_relaxed_block(&counts[expert / num_local * num_counts + expert % num_local], 1u);
        });
        if constexpr (kTraitsOf<kVariant>.deduplicated) {
            warp.block_strided(args.num_tokens, [&](uint32_t token) {
                const uint32_t partition = token / args.layout.partition_tokens;
                const uint64_t ranks = destinations(args, token);
                for (uint32_t peer = 0; peer < args.shape.num_ranks; ++peer) {
                    if (ranks >> peer & 1) add_relaxed_block(&counts[peer * num_counts + num_local + partition], 1u);
                }
            });
        }
        TK_END_AFTER_BARRIER(warp);
    }
    for (uint32_t i = warp.warp; i < args.shape.num_ranks; i += warp.num_warps) {
        const uint32_t peer = args.comm.nth_peer(i);
        TK_SIGNAL(recorder, P2PEvent::signal_counts, peer);
        perturb(warp);
        // Each flag is its own payload, so relaxed is enough.
        uint64_t* flags = args.count_flags(peer, args.comm.rank);
        warp.strided(num_counts, [&](uint32_t i) {
            store_relaxed_system(&flags[i], make_flag(epoch, counts[peer * num_counts + i]));
        });
    }
}

// The rows that come from this rank, by its counts: of each partition, or one for each choice.
template <P2PVariant kVariant>
TK_DEVICE uint32_t store_recv_counts(Warp& warp, const P2PArgs& args, uint32_t src_rank, const uint32_t* counts) {
    const uint32_t num_local = args.shape.num_local_experts();
    if constexpr (kTraitsOf<kVariant>.deduplicated) {
        const uint32_t* rows = counts + num_local;
        warp.sync();  // other lanes took them
        warp.strided(args.layout.num_partitions, [&](uint32_t partition) {
            args.recv_count[partition * args.shape.num_ranks + src_rank] = rows[partition];
        });
        return warp.sum_over(args.layout.num_partitions, [&](uint32_t partition) { return rows[partition]; });
    } else {
        const uint32_t total = warp.sum_over(num_local, [&](uint32_t local) { return counts[local]; });
        warp.leader([&] { args.recv_count[src_rank] = total; });
        return total;
    }
}

// Waits for everybody's counts and lays out the rows of the local experts. All warps of one block, after send_counts().
template <P2PVariant kVariant, class Rec>
TK_DEVICE void receive_counts(Warp& warp, const P2PArgs& args, Rec& recorder, uint32_t epoch, P2PStage stage) {
    const uint32_t num_local = args.shape.num_local_experts();
    const uint32_t num_counts = args.layout.num_counts;
    uint32_t* incoming = shared_at<uint32_t>(warp, args.layout.shared.counts);
    uint32_t* sums = shared_at<uint32_t>(warp, args.layout.shared.sums);
    // A warp writes over those counts alone that it has sent itself: both loops deal out the ranks alike.
    for (uint32_t i = warp.warp; i < args.shape.num_ranks; i += warp.num_warps) {
        const uint32_t src_rank = args.comm.nth_peer(i);
        TK_WAIT(recorder, P2PEvent::wait_counts, src_rank);
        const uint64_t* flags = args.count_flags(args.comm.rank, src_rank);
        uint32_t* counts = incoming + src_rank * num_counts;
        const WaitFor wait_for{static_cast<uint32_t>(stage), src_rank, 0};
        const auto take = [&](uint32_t i, uint32_t value) { counts[i] = value; };
        const bool ok = wait_all<P2PChannel::counts>(warp, args.comm, flags, num_counts, epoch, wait_for, take);
        // After a failure nothing more may be touched: no rows.
        if (!ok) warp.strided(num_counts, [&](uint32_t i) { counts[i] = 0; });
        const uint32_t total = store_recv_counts<kVariant>(warp, args, src_rank, counts);
        // Here, since rows need no acknowledgement: the counts are acquired and taken.
        if constexpr (kTraitsOf<kVariant>.deduplicated) acknowledge(warp, args, recorder, epoch, src_rank);
        TK_END_IF(ok, total);
    }
    warp.block_sync();
    warp.block_strided(num_local, [&](uint32_t local) {
        uint32_t sum = 0;
        for (uint32_t src_rank = 0; src_rank < args.shape.num_ranks; ++src_rank) {
            sum += incoming[src_rank * num_counts + local];
        }
        sums[local] = sum;
    });
    warp.block_sync();
    if (warp.warp != 0) return;
    warp.leader([&] {
        uint32_t row = 0;
        for (uint32_t local = 0; local < num_local; ++local) {
            args.expert_offset[local] = args.expert_cursor[local] = row;
            row += sums[local];
        }
        args.expert_offset[num_local] = row;
    });
}

// Copies this warp's share of the flat tokens to their peers.
template <P2PVariant kVariant, class Rec>
TK_DEVICE void send_tokens(
    Warp& warp, const P2PArgs& args, Rec& recorder, uint32_t epoch, uint32_t first_warp, uint32_t num_warps) {
    const uint32_t row_bytes = args.shape.row_bytes();
    for (uint32_t flat = first_warp; flat < args.num_flat(); flat += num_warps) {
        const int32_t chosen = args.topk_idx[flat];
        if (!args.shape.is_expert(chosen)) continue;
        const uint32_t expert = static_cast<uint32_t>(chosen);
        const uint32_t peer = args.shape.rank_of(expert);
        const uint32_t slot = warp.once([&] { return add_relaxed_device(&args.send_count[peer], 1u); });
        TK_SEQUENCE(recorder);
        TK_NEXT(P2PEvent::copy_token, peer, slot, expert);
        char* row = args.recv_row(peer, args.comm.rank, slot);
        if (warp.is_leader()) *reinterpret_cast<RowHeader*>(row) = RowHeader{flat, expert};
        copy_row(
            warp, row + args.layout.header_bytes, args.x + uint64_t{flat / args.shape.topk} * row_bytes, row_bytes);
        if constexpr (kTraitsOf<kVariant>.token_flags) {
            TK_NEXT(P2PEvent::signal_token, peer, slot, expert);
            signal<P2PChannel::token>(warp, args.token_flag(peer, args.comm.rank, slot), epoch, expert);
        }
    }
}

// All rows of this rank are on their way: one flag for each peer. All warps of all blocks.
template <class Rec>
TK_DEVICE void send_rank_flags(Warp& warp, const P2PArgs& args, Rec& recorder, uint32_t epoch) {
    {
        TK_WAIT(recorder, P2PEvent::wait_grid);
        const bool ok =
            grid_barrier(warp, args.comm, &args.state->grid_arrivals, static_cast<uint32_t>(P2PStage::dispatch_send));
        TK_END_IF(ok);
        if (!ok) return;
    }
    if (warp.block != 0) return;
    for (uint32_t i = warp.warp; i < args.shape.num_ranks; i += warp.num_warps) {
        const uint32_t peer = args.comm.nth_peer(i);
        const uint32_t tokens = args.send_count[peer];
        TK_SIGNAL(recorder, P2PEvent::signal_rank, peer, tokens);
        signal<P2PChannel::rank>(warp, args.rank_flag(peer, args.comm.rank), epoch, tokens);
    }
}

template <P2PVariant kVariant, class Rec>
TK_DEVICE void dispatch_send(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
    const uint32_t epoch = args.state->epoch;
    // The last block counts; where it is the only one it sends as well.
    const bool counts = warp.block == warp.num_blocks - 1;
    const bool sends = !counts || warp.num_blocks == 1;
    Rec recorder(trace, warp, static_cast<uint32_t>(counts ? P2PRole::count : P2PRole::send), epoch);
    if (counts) send_counts<kVariant>(warp, args, recorder, epoch);
    if (sends) {
        const uint32_t num_blocks = warp.num_blocks == 1 ? 1 : warp.num_blocks - 1;
        send_tokens<kVariant>(
            warp, args, recorder, epoch, warp.block * warp.num_warps + warp.warp, num_blocks * warp.num_warps);
    }
    if constexpr (!kTraitsOf<kVariant>.token_flags) send_rank_flags(warp, args, recorder, epoch);
    if (counts) receive_counts<kVariant>(warp, args, recorder, epoch, P2PStage::dispatch_send);
}

// Moves the row in `slot` of `src_rank` to its expert.
template <class Rec>
TK_DEVICE void receive_token(Warp& warp, const P2PArgs& args, Rec& recorder, uint32_t src_rank, uint32_t slot) {
    char* row = args.recv_row(args.comm.rank, src_rank, slot);
    const RowHeader header = *reinterpret_cast<const RowHeader*>(row);
    TK_RANGE(recorder, P2PEvent::receive_token, src_rank, slot, header.expert);
    const uint32_t local = header.expert - args.comm.rank * args.shape.num_local_experts();
    const uint32_t at = warp.once([&] {
        const uint32_t free_row = add_relaxed_device(&args.expert_cursor[local], 1u);
        args.row_origin[free_row] = {header.flat, static_cast<uint16_t>(src_rank), static_cast<uint16_t>(local)};
        return free_row;
    });
    copy_row(warp, args.expert_row(at), row + args.layout.header_bytes, args.shape.row_bytes());
    poison(row, args.layout.row_stride);
}

template <P2PVariant kVariant, class Rec>
TK_DEVICE void dispatch_recv(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
    const uint32_t epoch = args.state->epoch;
    Rec recorder(trace, warp, static_cast<uint32_t>(P2PRole::receive), epoch);
    const auto tokens_from = [&](uint32_t src_rank) { return args.recv_count[src_rank]; };
    uint32_t waited_for = args.shape.num_ranks;  // nobody
    bool ok = true;
    for_rows<kTraitsOf<kVariant>.balanced>(
        warp, args.shape.num_ranks, tokens_from, [&](uint32_t src_rank, uint32_t slot) {
            const WaitFor wait_for{static_cast<uint32_t>(P2PStage::dispatch_recv), src_rank, slot};
            if constexpr (kTraitsOf<kVariant>.token_flags) {
                TK_WAIT(recorder, P2PEvent::wait_token, src_rank, slot);
                const uint64_t* flag = args.token_flag(args.comm.rank, src_rank, slot);
                const WaitResult result = wait<P2PChannel::token>(warp, args.comm, flag, epoch, wait_for);
                ok = result.ok;
                TK_END_IF(ok, result.value);
            } else if (src_rank != waited_for) {
                waited_for = src_rank;
                TK_WAIT(recorder, P2PEvent::wait_rank, src_rank);
                const uint64_t* flag = args.rank_flag(args.comm.rank, src_rank);
                const WaitResult result = wait<P2PChannel::rank>(warp, args.comm, flag, epoch, wait_for);
                ok = result.ok;
                TK_END_IF(ok, result.value);
            }
            if (ok) receive_token(warp, args, recorder, src_rank, slot);
        });
}

}  // namespace tracekern
