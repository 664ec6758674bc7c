// Combine, deduplicated: an expert's rank sends back one row for each choice, or (`reduce`) the sum of its weighted
// results, one row for each token and rank. The token's rank adds up what comes.
//
// One kernel: in every block half of the warps send back, the other half add up, each a part of a token's row. Warps
// that send back wait for nothing that this kernel makes, so every result comes.
//
// Results of epoch e+1 are written only after the rows of e+1 came, which their source sends after it has added up the
// results of e: the result buffer needs no acknowledgement.
#pragma once

#include "moe/p2p/dedup_dispatch.h"

namespace tracekern {

// ---- what comes back to a token's rank, and is added up there ----

// A result of each of the token's choices.
struct ResultOfEachChoice {
    static constexpr P2PChannel kChannel = P2PChannel::result;

    // Sends those of a received row.
    template <class T, class Rec>
    TK_DEVICE static void send(P2PContext<Rec>& context, uint32_t src_rank, char* row) {
        Warp& warp = context.warp;
        const P2PArgs& args = context.args;
        const DedupRowHeader header = *reinterpret_cast<const DedupRowHeader*>(row);
        for (uint32_t i = 0; i < header.num_choices; ++i) {
            const RowChoice choice = P2PArgs::row_choices(row)[i];
            const uint32_t flat = header.token * args.shape.topk + choice.choice;
            const uint32_t expert = global_expert(args, choice.local_expert);
            TK_SEQUENCE(context.recorder);
            TK_NEXT(P2PEvent::send_result, src_rank, flat, expert);
            char* input = args.expert_row(args.row_places(row)[i]);
            args.experts[expert].apply<T>(warp, args.result_row(src_rank, flat), input, args.shape.hidden);
            poison(input, args.shape.row_bytes());
            TK_NEXT(P2PEvent::signal_result, src_rank, flat, expert);
            signal_peer<P2PChannel::result>(context, src_rank, args.result_flag(src_rank, flat), expert);
        }
    }

    // Those that come for a token.
    TK_DEVICE static BitSet<kMaxResults> expected(const P2PArgs& args, uint32_t token) {
        const int32_t* chosen = args.topk_idx + uint64_t{token} * args.shape.topk;
        BitSet<kMaxResults> results;
        for (uint32_t i = 0; i < args.shape.topk; ++i) {
            if (args.shape.is_expert(chosen[i])) results.add(i);
        }
        return results;
    }
    TK_DEVICE static Contribution contribution(const P2PArgs& args, uint32_t first, uint32_t i) {
        const uint32_t peer = args.shape.rank_of(static_cast<uint32_t>(args.topk_idx[first + i]));
        return {args.result_row(args.comm.rank, first + i), args.topk_weights[first + i], Expert{}, peer, first + i};
    }

    template <class Rec, class Wait>
    TK_DEVICE static WaitResult record(
        P2PContext<Rec>& context, Wait wait_now, uint32_t, uint32_t peer, uint32_t result) {
        const uint32_t expert = static_cast<uint32_t>(context.args.topk_idx[result]);
        return record_wait<P2PEvent::wait_result>(context, wait_now, peer, result, expert);
    }
};

// The weighted sum of each rank's results of the token.
struct SumOfEachRank {
    static constexpr P2PChannel kChannel = P2PChannel::partial;

    // Sends this rank's of a received row. kInPlace: experts work on the row where it arrived.
    template <class T, bool kInPlace = false, class Rec>
    TK_DEVICE static void send(P2PContext<Rec>& context, uint32_t src_rank, char* row) {
        Warp& warp = context.warp;
        const P2PArgs& args = context.args;
        const DedupRowHeader header = *reinterpret_cast<const DedupRowHeader*>(row);
        const uint32_t result = header.token * args.layout.results_per_token + args.comm.rank;
        TK_SEQUENCE(context.recorder);
        TK_NEXT(P2PEvent::send_partial, src_rank, header.token, header.num_choices);
        Contribution* list = contributions_of(warp, args);
        warp.sync();  // the list of the row before is read
        warp.strided(header.num_choices, [&](uint32_t i) {
            const RowChoice choice = P2PArgs::row_choices(row)[i];
            char* input = kInPlace ? row + args.layout.header_bytes : args.expert_row(args.row_places(row)[i]);
            list[i] = {input, choice.weight, args.experts[global_expert(args, choice.local_expert)], src_rank, result};
        });
        warp.sync();
        char* partial = args.result_row(src_rank, result);
        sum_rows<T, true, kInPlace>(warp, partial, list, header.num_choices, args.shape.hidden, 0, 1);
        TK_NEXT(P2PEvent::signal_partial, src_rank, header.token);
        signal_peer<P2PChannel::partial>(context, src_rank, args.result_flag(src_rank, result), header.num_choices);
    }

    TK_DEVICE static BitSet<kMaxRanks> expected(const P2PArgs& args, uint32_t token) {
        return destinations(args, token);
    }
    TK_DEVICE static Contribution contribution(const P2PArgs& args, uint32_t first, uint32_t peer) {
        return {args.result_row(args.comm.rank, first + peer), 1.0f, Expert{}, peer, first + peer};
    }

    template <class Rec, class Wait>
    TK_DEVICE static WaitResult record(
        P2PContext<Rec>& context, Wait wait_now, uint32_t token, uint32_t peer, uint32_t) {
        return record_wait<P2PEvent::wait_partial>(context, wait_now, peer, token);
    }
};

// ---- the two roles ----

// Sends back this share of the rows that came; nothing after a rank gave up, since then some may not have.
template <class T, class Results, class Rec>
TK_DEVICE void send_back(P2PContext<Rec>& context, Share share) {
    const P2PArgs& args = context.args;
    const auto send_row = [&](uint32_t src_rank, uint32_t slot) {
        Results::template send<T>(context, src_rank, args.recv_row(args.comm.rank, src_rank, slot));
    };
    const auto aborted = context.warp.lanes([&](int) { return uint32_t{lane_sees_abort(args.comm)}; });
    IncomingRows rows(context.warp, args, share, args.partition);
    if (context.warp.shuffle(aborted, 0)) return;
    while (rows.left()) rows.take(rows.left(), send_row);
}

// Lists the results of a token in the order of their sum; returns how many.
template <class Results>
TK_DEVICE uint32_t list_results(Warp& warp, const P2PArgs& args, uint32_t token, Contribution* list) {
    const uint32_t per_token = args.layout.results_per_token;
    const auto results = Results::expected(args, token);
    warp.sync();  // the list of the token before is read
    warp.strided(per_token, [&](uint32_t i) {
        if (results.has(i)) list[results.count_below(i)] = Results::contribution(args, token * per_token, i);
    });
    warp.sync();
    return results.count();
}

// Waits for the results in `list`; false when it gave up. All flags are looked at side by side first: one after the
// other each would cost a trip to memory, although most have come.
template <class Results, class Rec>
TK_DEVICE bool wait_results_in(P2PContext<Rec>& context, uint32_t token, const Contribution* list, uint32_t count) {
    Warp& warp = context.warp;
    const P2PArgs& args = context.args;
    constexpr P2PChannel kChannel = Results::kChannel;
    static_assert(kMaxResults <= kLanes, "a lane looks at one flag");
    const auto looks = warp.lanes([&](int lane) {
        if (static_cast<uint32_t>(lane) >= count) return uint64_t{0};
        return look_at<kChannel>(args.result_flag(args.comm.rank, list[lane].result));
    });
    warp.sync();  // each lane acquired one flag; from here on every lane may read every result
    bool ok = true;
    for (uint32_t i = 0; i < count; ++i) {
        const uint32_t peer = list[i].peer;
        const uint32_t result = list[i].result;
        const auto wait_now = [&] {
            const uint64_t seen = warp.shuffle(looks, static_cast<int>(i));
            if (is_wanted<kChannel>(seen, context.epoch)) return WaitResult{true, 0};
            const uint64_t* flag = args.result_flag(args.comm.rank, result);
            return wait<kChannel>(warp, args.comm, flag, context.epoch, wait_for(context, peer, result));
        };
        ok = Results::record(context, wait_now, token, peer, result).ok && ok;
    }
    return ok;
}

// How many warps a token's sum is divided between: those that there are for it, but no part is shorter than what a warp
// loads at a time.
TK_DEVICE uint32_t parts_of_a_sum(uint32_t row_bytes, uint32_t num_warps, uint32_t num_tokens) {
    constexpr uint32_t kLeastBytes = kSumLoads.columns * kLanes * sizeof(Vector16);
    const uint32_t most_parts = (row_bytes + kLeastBytes - 1) / kLeastBytes;
    const uint32_t warps_per_token = num_warps / num_tokens;
    const uint32_t wanted = warps_per_token < most_parts ? warps_per_token : most_parts;
    return wanted ? wanted : 1;
}

// Adds up the results of this share of a partition's tokens.
template <class T, class Results, class Rec>
TK_DEVICE bool reduce_tokens(P2PContext<Rec>& context, Share share, uint32_t partition) {
    Warp& warp = context.warp;
    const P2PArgs& args = context.args;
    const uint32_t num_tokens = partition_size(args, partition);
    if (num_tokens == 0) return true;
    const uint32_t num_parts = parts_of_a_sum(args.shape.row_bytes(), share.stride, num_tokens);
    Contribution* list = contributions_of(warp, args);
    bool ok = true;
    for (uint32_t item = share.first; ok && item < num_tokens * num_parts; item += share.stride) {
        const uint32_t token = partition_begin(args, partition) + item / num_parts;
        const uint32_t count = list_results<Results>(warp, args, token, list);
        ok = wait_results_in<Results>(context, token, list, count);
        if (!ok) break;
        TK_RANGE(context.recorder, P2PEvent::reduce_token, token);
        char* out = args.out + uint64_t{token} * args.shape.row_bytes();
        sum_rows<T, false, false>(warp, out, list, count, args.shape.hidden, item % num_parts, num_parts);
    }
    return ok;
}

// The end of a call. All warps: the first block waits until all counts were read, the last one to arrive prepares the
// next call. The barrier: no warp of this block needs what that resets.
template <class Rec>
TK_DEVICE void finish_call(P2PContext<Rec>& context) {
    if (is_count_block(context.warp)) wait_acknowledged(context);
    wait_block(context);
    prepare_next_call(context);
}

// The kernel of `dedup` and `reduce`, and of the last partition of `overlapped`.
template <class T, class Results>
struct P2PCombine : P2PKernelWithLists<P2PStage::combine> {
    TK_DEVICE static OwnPart part_of(const Warp& warp) { return OwnPart::of(warp, warp.block, warp.num_blocks); }
    TK_DEVICE static P2PRole role_of(const OwnPart& own) {
        return own.in_second_half ? P2PRole::send : P2PRole::reduce;
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        const OwnPart own = part_of(warp);
        P2PContext<Rec> context(warp, args, trace, kStage, role_of(own));
        if (own.in_second_half) send_back<T, Results>(context, own.share);
        if (own.in_first_half) reduce_tokens<T, Results>(context, own.share, args.partition);
        if (args.is_last_partition()) finish_call(context);
    }
};

}  // namespace tracekern
