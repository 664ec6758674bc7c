// Dispatch, deduplicated: a token goes once to each rank that has experts of it, with the list of those experts.
//
// One kernel: in every block half of the warps send, the other half receive. Warps that send never wait, so every
// row comes. The first block counts: it tells each peer how many rows come, waits for the counts that come in and
// raises the layout flag, for which the receiving warps wait. These take rows as they come (moe/p2p/incoming.h).
//
// A row's slot at its receiver is free again when the source has all results of the token: the receiver raises a
// result after it has read the row. Counts alone need an acknowledgement; it is raised as soon as they were read.
#pragma once

#include "moe/bit_set.h"
#include "moe/p2p/counts.h"
#include "moe/p2p/incoming.h"
#include "moe/row_sum.h"

namespace tracekern {

// The choices of a token that `peer` has the experts of, a bit each. A lane a choice: the loads go out together.
TK_DEVICE uint32_t choices_at(Warp& warp, const P2PArgs& args, uint32_t token, uint32_t peer) {
    const int32_t* chosen = args.topk_idx + uint64_t{token} * args.shape.topk;
    const uint32_t num_local = args.shape.num_local_experts();
    return warp.sum_over(args.shape.topk, [&](uint32_t choice) {
        // What is no expert is in no rank's range.
        const bool there = static_cast<uint32_t>(chosen[choice]) - peer * num_local < num_local;
        return uint32_t{there} << choice;
    });
}

// Precedes the row: which token it is, and which of its choices it is for. One store of all lanes together.
TK_DEVICE void write_row_header(
    Warp& warp, const P2PArgs& args, char* row, uint32_t token, uint32_t peer, uint32_t choices) {
    auto* words = reinterpret_cast<uint64_t*>(row);
    warp.strided(args.shape.topk + 1, [&](uint32_t i) {
        uint64_t word;
        uint32_t place = 0;
        if (i == 0) {
            word = bits_as<uint64_t>(DedupRowHeader{token, count_bits(choices)});
        } else {
            const uint32_t choice = i - 1;
            if (!(choices >> choice & 1)) return;
            const uint64_t flat = uint64_t{token} * args.shape.topk + choice;
            const uint32_t local = static_cast<uint32_t>(args.topk_idx[flat]) - peer * args.shape.num_local_experts();
            word = bits_as<uint64_t>(
                RowChoice{static_cast<uint16_t>(local), static_cast<uint16_t>(choice), args.topk_weights[flat]});
            place = 1 + count_bits(choices & ((1u << choice) - 1));
        }
        words[place] = word;
    });
}

// Copies this share of a partition's (token, peer) pairs. Neighbours go to different peers.
template <class Rec>
TK_DEVICE void send_rows(P2PContext<Rec>& context, Share share, uint32_t partition) {
    Warp& warp = context.warp;
    const P2PArgs& args = context.args;
    const uint32_t num_ranks = args.shape.num_ranks;
    const uint32_t begin = partition_begin(args, partition);
    const uint32_t row_bytes = args.shape.row_bytes();
    for (uint32_t pair = share.first; pair < partition_size(args, partition) * num_ranks; pair += share.stride) {
        const uint32_t token = begin + pair / num_ranks;
        // Turned from token to token: a warp whose stride is a multiple of the ranks meets them all.
        const uint32_t peer = (args.comm.rank + pair + token) % num_ranks;
        const uint32_t choices = choices_at(warp, args, token, peer);
        if (choices == 0) continue;
        uint32_t* taken = &args.send_count[partition * num_ranks + peer];
        const uint32_t slot = begin + warp.once([&] { return add_relaxed_device(taken, 1u); });
        TK_SEQUENCE(context.recorder);
        TK_NEXT(P2PEvent::copy_row, peer, slot, count_bits(choices));
        char* row = args.recv_row(peer, args.comm.rank, slot);
        write_row_header(warp, args, row, token, peer, choices);
        copy_row(warp, row + args.layout.header_bytes, args.x + uint64_t{token} * row_bytes, row_bytes);
        TK_NEXT(P2PEvent::signal_row, peer, slot, count_bits(choices));
        uint64_t* flag = args.token_flag(peer, args.comm.rank, slot);
        signal_peer<P2PChannel::row>(context, peer, flag, count_bits(choices));
    }
}

// The ranks that have experts of this token.
TK_DEVICE BitSet<kMaxRanks> destinations(const P2PArgs& args, uint32_t token) {
    const int32_t* chosen = args.topk_idx + uint64_t{token} * args.shape.topk;
    BitSet<kMaxRanks> ranks;
    for (uint32_t choice = 0; choice < args.shape.topk; ++choice) {
        const int32_t expert = chosen[choice];
        if (args.shape.is_expert(expert)) ranks.add(args.shape.rank_of(static_cast<uint32_t>(expert)));
    }
    return ranks;
}

// A token goes once to each rank that has experts of it (moe/p2p/counts.h).
struct RowForEachRank {
    // Counts the rows for each rank and partition.
    TK_DEVICE static void count(Warp& warp, const P2PArgs& args, uint32_t* others) {
        warp.block_strided(args.num_tokens, [&](uint32_t token) {
            const uint32_t partition = token / args.layout.partition_tokens;
            const BitSet<kMaxRanks> ranks = destinations(args, token);
            for (uint32_t peer = 0; peer < args.shape.num_ranks; ++peer) {
                if (ranks.has(peer)) add_relaxed_block(&others[peer * args.layout.num_counts + partition], 1u);
            }
        });
    }

    // Acknowledges here, since rows need no acknowledgement: the counts are acquired and taken.
    template <class Rec>
    TK_DEVICE static uint32_t take(P2PContext<Rec>& context, uint32_t src_rank, const uint32_t* counts) {
        Warp& warp = context.warp;
        const P2PArgs& args = context.args;
        const uint32_t* rows = counts + args.layout.num_cells;
        warp.sync();  // other lanes took them
        warp.strided(args.layout.num_partitions, [&](uint32_t partition) {
            args.recv_count[partition * args.shape.num_ranks + src_rank] = rows[partition];
        });
        const uint32_t total =
            warp.sum_over(args.layout.num_partitions, [&](uint32_t partition) { return rows[partition]; });
        acknowledge(context, src_rank);
        return total;
    }

    // The rows of each partition end to end, source by source.
    TK_DEVICE static void lay_out(Warp& warp, const P2PArgs& args, const uint32_t* incoming) {
        warp.block_strided(args.layout.num_partitions, [&](uint32_t partition) {
            const uint32_t* rows = incoming + args.layout.num_cells + partition;
            uint32_t* begin = args.recv_begin + partition * args.shape.num_ranks;
            uint32_t sum = 0;
            TK_NO_UNROLL
            for (uint32_t src_rank = 0; src_rank < args.shape.num_ranks; ++src_rank) {
                begin[src_rank] = sum;
                sum += rows[src_rank * args.layout.num_counts];
            }
        });
    }
};

// Counts in both directions. All warps of the count block.
template <class Rec>
TK_DEVICE void exchange_counts(P2PContext<Rec>& context) {
    send_counts<RowForEachRank>(context);
    receive_counts<RowForEachRank>(context);
    if (context.warp.warp != 0) return;
    // Orders what all warps of this block wrote before the barriers of receive_counts. For warps of this device alone.
    TK_SIGNAL(context.recorder, P2PEvent::signal_layout);
    signal<P2PChannel::layout>(context.warp, &context.args.state->layout_flag.word, context.epoch, 0, Scope::device);
}

// Waits until it is known which rows come; false when it gave up.
template <class Rec>
TK_DEVICE bool wait_layout(P2PContext<Rec>& context) {
    return traced_wait<P2PChannel::layout, P2PEvent::wait_layout>(context, &context.args.state->layout_flag.word).ok;
}

// The lanes of `rows` whose row has come; 0 when it gave up. Where none has it waits for whichever comes first. The
// span is of the row that is taken first.
template <class Rec>
TK_DEVICE uint32_t wait_rows(P2PContext<Rec>& context, IncomingRows& rows) {
    const P2PArgs& args = context.args;
    const uint32_t left = rows.left();
    const IncomingRows::Row next = rows.first_of(left);
    TK_WAIT(context.recorder, P2PEvent::wait_row, next.source);
    const auto flag_of = [&](int lane) {
        const IncomingRows::Row row = rows.own_row(lane);
        return args.token_flag(args.comm.rank, row.source, row.slot);
    };
    const WaitFor whom = wait_for(context, next.source, next.slot);
    const uint32_t arrived = wait_any<P2PChannel::row>(context.warp, args.comm, left, flag_of, context.epoch, whom);
    const IncomingRows::Row first = arrived ? rows.first_of(arrived) : next;
    TK_END_IF(arrived != 0, first.source, first.slot);
    return arrived;
}

// Calls visit(src_rank, slot) for this share of the rows that come in a partition, each as soon as it is there; false
// when it gave up.
template <class Rec, class Visit>
TK_DEVICE bool for_rows_as_they_come(P2PContext<Rec>& context, Share share, uint32_t partition, Visit visit) {
    IncomingRows rows(context.warp, context.args, share, partition);
    while (rows.left()) {
        const uint32_t arrived = wait_rows(context, rows);
        if (!arrived) return false;
        bool is_on_record = true;
        rows.take(arrived, [&](uint32_t src_rank, uint32_t slot) {
            if (!is_on_record) {
                TK_WAIT(context.recorder, P2PEvent::wait_row, src_rank);
                TK_END(src_rank, slot);
            }
            is_on_record = false;
            visit(src_rank, slot);
        });
    }
    return true;
}

// The list of this warp, in shared memory.
TK_DEVICE Contribution* contributions_of(Warp& warp, const P2PArgs& args) {
    return shared_at<Contribution>(warp, args.layout.shared.contributions) + warp.warp * args.shape.topk;
}

// The kernels in which each warp has a list of what it adds up or copies to.
template <P2PStage kOwnStage>
struct P2PKernelWithLists : P2PKernel<kOwnStage> {
    static uint64_t shared_bytes(const P2PArgs& args, uint32_t warps_per_block) {
        return args.layout.shared.contributions + uint64_t{warps_per_block} * args.shape.topk * sizeof(Contribution);
    }
};

// Copies a row to all rows in `list`.
template <class Unit>
TK_DEVICE void copy_to_all(Warp& warp, const Contribution* list, uint32_t num_rows, const char* src, uint32_t bytes) {
    constexpr uint32_t kColumns = sizeof(Unit) == sizeof(Vector16) ? 8 : 1;
    for_columns<kColumns>(warp, bytes / sizeof(Unit), [&](const Columns<kColumns>& columns) {
        Unit units[kColumns];
        columns.load(units, reinterpret_cast<const Unit*>(src));
        for (uint32_t i = 0; i < num_rows; ++i) columns.store(reinterpret_cast<Unit*>(list[i].row), units);
    });
}

// Copies a row to each of its local experts and notes where.
template <class Rec>
TK_DEVICE void expand_row(P2PContext<Rec>& context, uint32_t src_rank, uint32_t slot) {
    Warp& warp = context.warp;
    const P2PArgs& args = context.args;
    char* row = args.recv_row(args.comm.rank, src_rank, slot);
    const uint32_t num_choices = reinterpret_cast<const DedupRowHeader*>(row)->num_choices;
    TK_RANGE(context.recorder, P2PEvent::expand_row, src_rank, slot, num_choices);
    const RowChoice* choices = P2PArgs::row_choices(row);
    Contribution* copies = contributions_of(warp, args);
    warp.sync();  // the list of the row before is read
    warp.strided(num_choices, [&](uint32_t i) {
        const uint32_t cell = args.cell(args.partition, choices[i].local_expert);
        const uint32_t place = add_relaxed_device(&args.expert_cursor[cell], 1u);
        args.row_places(row)[i] = place;
        copies[i].row = args.expert_row(place);
    });
    warp.sync();
    char* data = row + args.layout.header_bytes;
    const uint32_t bytes = args.shape.row_bytes();
    if (can_pack(data, args.expert_rows, bytes)) {
        copy_to_all<Vector16>(warp, copies, num_choices, data, bytes);
    } else {
        copy_to_all<uint16_t>(warp, copies, num_choices, data, bytes);
    }
    poison(data, bytes);
}

template <class Rec>
TK_DEVICE void receive_rows(P2PContext<Rec>& context, Share share) {
    const auto expand = [&](uint32_t src_rank, uint32_t slot) { expand_row(context, src_rank, slot); };
    if (wait_layout(context)) for_rows_as_they_come(context, share, context.args.partition, expand);
}

// The kernel of `dedup` and `reduce`, and of the first partition of `overlapped`.
struct P2PDispatch : P2PKernelWithLists<P2PStage::dispatch> {
    TK_DEVICE static OwnPart part_of(const Warp& warp) {
        return OwnPart::of(warp, working_block(warp), num_working_blocks(warp));
    }
    TK_DEVICE static P2PRole role_of(const Warp& warp, const OwnPart& own) {
        if (is_count_block(warp)) return P2PRole::count;
        return own.in_first_half ? P2PRole::send : P2PRole::receive;
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        const OwnPart own = part_of(warp);
        P2PContext<Rec> context(warp, args, trace, kStage, role_of(warp, own));
        if (is_count_block(warp) && args.partition == 0) exchange_counts(context);
        if (is_working_block(warp)) {
            if (own.in_first_half) send_rows(context, own.share, args.partition);
            if (own.in_second_half) receive_rows(context, own.share);
        }
    }
};

}  // namespace tracekern
