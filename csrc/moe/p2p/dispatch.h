// Dispatch: every token goes to the ranks of its experts.
//
// In dispatch_send the first block counts and tells each peer how many tokens come for each of its experts, then waits
// for the counts that come in; meanwhile all others copy rows into the peers' receive buffers and raise their flags.
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
// Among those that work.
TK_DEVICE uint32_t working_block(const Warp& warp) {
    return warp.num_blocks == 1 ? 0 : warp.block - 1;
}

// The same for tables of roles.
struct CountBlock {
    TK_DEVICE static bool has(const Warp& warp, const OwnPart&) { return is_count_block(warp); }
};
struct WorkingBlocks {
    TK_DEVICE static uint32_t index(const Warp& warp) { return working_block(warp); }
    TK_DEVICE static uint32_t count(const Warp& warp) { return num_working_blocks(warp); }
};
struct EveryBlock {
    TK_DEVICE static uint32_t index(const Warp& warp) { return warp.block; }
    TK_DEVICE static uint32_t count(const Warp& warp) { return warp.num_blocks; }
};

// What `peer` sent was read: it may send anew. Relaxed: the flag orders nothing, see its callers.
template <class Rec>
TK_DEVICE void acknowledge(P2PContext<Rec>& context, uint32_t peer) {
    TK_SIGNAL(context.recorder, P2PEvent::signal_ack, peer);
    signal_relaxed(context.warp, context.args.ack_flag(peer, context.comm.rank), context.epoch, 0);
}

// My peers may overwrite their part of my receive buffer and of my counts. The first block. Relaxed is enough: both
// were read in an earlier kernel, the peer writes in a later one, and its results, which are released, order every row.
template <class Rec>
TK_DEVICE void acknowledge_all(P2PContext<Rec>& context) {
    for_peers_of_warp(context, [&](uint32_t peer) { acknowledge(context, peer); });
}

// Everybody has read what I sent: the next call may overwrite it. All warps of one block.
template <class Rec>
TK_DEVICE void wait_acknowledged(P2PContext<Rec>& context) {
    for_peers_of_warp(context, [&](uint32_t peer) {
        const uint64_t* flag = context.args.ack_flag(context.comm.rank, peer);
        traced_wait<P2PChannel::ack, P2PEvent::wait_ack>(context, flag, peer);
    });
}

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
    for_peers_of_warp(context, [&](uint32_t peer) {
        TK_SIGNAL(context.recorder, P2PEvent::signal_counts, peer);
        // Each flag is its own payload, so relaxed is enough.
        const auto count_of = [&](uint32_t i) { return counts[peer * num_counts + i]; };
        signal_all_relaxed(warp, args.count_flags(peer, args.comm.rank), num_counts, context.epoch, count_of);
    });
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

// Waits for the counts of one rank and takes them. Its value: how many rows come from there.
template <P2PVariant kVariant, class Rec>
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
    const uint32_t total = store_recv_counts<kVariant>(warp, args, src_rank, counts);
    // Here, since rows need no acknowledgement: the counts are acquired and taken.
    if constexpr (kTraitsOf<kVariant>.deduplicated) acknowledge(context, src_rank);
    return {ok, total};
}

// The rows of each partition end to end, source by source. All warps of one block, which meet afterwards.
TK_DEVICE void lay_out_sources(Warp& warp, const P2PArgs& args, const uint32_t* incoming) {
    warp.block_strided(args.layout.num_partitions, [&](uint32_t partition) {
        const uint32_t* rows = incoming + args.shape.num_local_experts() + partition;
        uint32_t* begin = args.recv_begin + partition * args.shape.num_ranks;
        uint32_t sum = 0;
        TK_NO_UNROLL
        for (uint32_t src_rank = 0; src_rank < args.shape.num_ranks; ++src_rank) {
            begin[src_rank] = sum;
            sum += rows[src_rank * args.layout.num_counts];
        }
    });
}

// A block barrier.
template <class Rec>
TK_DEVICE void wait_block(P2PContext<Rec>& context) {
    TK_WAIT(context.recorder, P2PEvent::wait_block);
    TK_END_AFTER_BARRIER(context.warp);
}

// Waits for everybody's counts and lays out the rows of the local experts. All warps of one block, after send_counts().
template <P2PVariant kVariant, class Rec>
TK_DEVICE void receive_counts(P2PContext<Rec>& context) {
    Warp& warp = context.warp;
    const P2PArgs& args = context.args;
    const uint32_t num_local = args.shape.num_local_experts();
    const uint32_t num_counts = args.layout.num_counts;
    uint32_t* incoming = shared_at<uint32_t>(warp, args.layout.shared.counts);
    uint32_t* sums = shared_at<uint32_t>(warp, args.layout.shared.sums);
    // A warp writes over those counts alone that it has sent itself: the ranks are dealt out as in send_counts().
    for_peers_of_warp(context, [&](uint32_t src_rank) {
        const auto wait_now = [&] {
            return wait_counts<kVariant>(context, src_rank, incoming + src_rank * num_counts);
        };
        record_wait<P2PEvent::wait_counts>(context, wait_now, src_rank);
    });
    wait_block(context);
    if constexpr (kTraitsOf<kVariant>.deduplicated) lay_out_sources(warp, args, incoming);
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

// All blocks have arrived; false when it gave up. All warps of all blocks. `arrivals` are of this kernel alone: a
// barrier counts on multiples of its own grid.
template <class Rec>
TK_DEVICE bool wait_grid(P2PContext<Rec>& context, LineWord& arrivals) {
    const auto wait_now = [&] {
        return WaitResult{grid_barrier(context.warp, context.comm, &arrivals.word, context.stage), 0};
    };
    return record_wait<P2PEvent::wait_grid>(context, wait_now).ok;
}

// All rows of this rank are on their way: one flag for each peer. All warps of all blocks.
template <class Rec>
TK_DEVICE void send_rank_flags(P2PContext<Rec>& context) {
    if (!wait_grid(context, context.args.state->grid_arrivals) || context.warp.block != 0) return;
    for_peers_of_warp(context, [&](uint32_t peer) {
        const uint32_t tokens = context.args.send_count[peer];
        TK_SIGNAL(context.recorder, P2PEvent::signal_rank, peer, tokens);
        uint64_t* flag = context.args.rank_flag(peer, context.comm.rank);
        signal<P2PChannel::rank>(context.warp, flag, context.epoch, tokens);
    });
}

template <P2PVariant kVariant>
struct P2PDispatchSend : P2PKernel<P2PStage::dispatch_send> {
    // Counts and sums.
    static uint64_t shared_bytes(const P2PArgs& args, uint32_t) { return args.layout.shared.contributions; }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        const bool counts = is_count_block(warp);
        P2PContext<Rec> context(warp, args, trace, kStage, counts ? P2PRole::count : P2PRole::send);
        if (counts) send_counts<kVariant>(context);
        if (is_working_block(warp)) {
            const uint32_t first = working_block(warp) * warp.num_warps + warp.warp;
            send_tokens<kVariant>(context, {first, num_working_blocks(warp) * warp.num_warps});
        }
        if constexpr (!kTraitsOf<kVariant>.token_flags) send_rank_flags(context);
        if (counts) receive_counts<kVariant>(context);
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
