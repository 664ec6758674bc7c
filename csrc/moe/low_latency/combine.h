// Combine: what experts made of each row goes back to the token's rank, which adds up a token's results.
//
// send      The warp group of (local expert, rank) copies the rows of that pair to [expert][token] at the rank, then
//           raises one flag there, zero tokens included.
// receive   The blocks share the tokens. The first warp of a block waits for the results of a token, each its own
//           expert's flag, and lists them; then all warps add them up in fp32, in the order of the choices, a part of
//           the columns each. No block waits for the others of its rank.
//
// Nobody acknowledges results. Those of epoch e are written over those of e-2, which had the same slot, so a rank's
// combine of e-2 must have ended before another one sends it results of e. It has: the other one's dispatch of e, which
// came before, ended with that rank's counts of e, which that rank released behind its combine of e-2. Its dispatch
// begins only when the receive of e-2 was launched, see handle.py. A combine that was never received has no reader.
// Where a handle is combined again, with no dispatch in between, the ranks tell each other that the one before is over.
//
// A flag of e-2 that no token of this rank needs may be overwritten unseen. But a flag of every rank is awaited, tokens
// or not: the slot's next dispatch relies on it.
#pragma once

#include "moe/low_latency/dispatch.h"
#include "moe/row_sum.h"

namespace tracekern {

// A token's results in the order of its choices, as one warp lists them for its block.
struct ResultList {
    uint32_t count;
    uint32_t ok;  // all have come
    Contribution results[kMaxLowLatencyTopk];
};

// In turns: the results of the next token are listed while those of one are read.
constexpr uint32_t kNumResultLists = 2;

// Programs look for the name in what a profiler shows, which is that of the type.
namespace low_latency_combine {

// Send, receive, or both in one launch.
template <LowLatencyStage kOwnStage, class Comm>
struct Kernel : LowLatencyKernel<kOwnStage, Comm> {
    static constexpr bool kSends = kOwnStage != LowLatencyStage::combine_recv;
    static constexpr bool kReceives = kOwnStage != LowLatencyStage::combine_send;

    static uint64_t shared_bytes(const LowLatencyArgs&, uint32_t) {
        return sizeof(LowLatencyShared) + (kReceives ? kNumResultLists * sizeof(ResultList) : 0);
    }

    // A send is the first of its handle, or comes behind the one of the epoch `last`, which was received last.
    TK_DEVICE static uint32_t number_of(const LowLatencyArgs& args, uint64_t epoch, uint64_t last) {
        if (!kSends) return static_cast<uint32_t>(args.call.handle->num_combines);
        return last == epoch ? static_cast<uint32_t>(args.slot().num_combines.word) + 1 : 1;
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const LowLatencyArgsOn<Comm>& args, typename Rec::Args trace) {
        const uint64_t epoch = args.call.handle->epoch;
        const uint64_t last = kSends ? args.slot().combined.word : 0;
        LowLatencyContext<Rec, Comm> context(warp, args, trace, kOwnStage, LowLatencyRole::combine, epoch);
        const uint32_t number = number_of(args, epoch, last);      // only now: what it waits for holds up no track
        const int64_t range = kSends ? rows_to_send(context) : 0;  // under way while the block begins
        const auto is_ready = [&] { return !kSends || wait_staging(context, Staged::rows); };
        if (!begin_kernel(context, number, is_ready)) return;
        if (kSends && number > 1 && !exchange_acks(context, epoch, number - 1)) return;
        if (kSends && warp.block == 0 && warp.warp == 0) warp.leader([&] { args.call.handle->num_combines = number; });
        if constexpr (kSends) combine_send(context, range);
        if constexpr (kReceives) combine_recv(context);
    }
};

}  // namespace low_latency_combine

// ---- send ----

// The rows of the group's pair.
template <class Context>
TK_DEVICE int64_t rows_to_send(const Context& context) {
    if (context.is_idle()) return 0;
    const auto& args = context.args;
    const ExpertPair to = context.pair();
    return args.call.packed_recv_layout_range[to.local_expert * args.shape.num_ranks + to.rank];
}

// How sub-warps share the rows of a pair: each row is one's, or, of few rows, that of up to four.
struct RowShare {
    static constexpr uint32_t kMaxSharers = 4;
    uint32_t first, stride;      // rows
    uint32_t part, num_sharers;  // of each

    TK_DEVICE static RowShare of(uint32_t sub_warp, uint32_t num_sub_warps, uint32_t num_rows, uint32_t max_sharers) {
        const uint32_t of_row = num_rows ? num_sub_warps / num_rows : 0;
        const uint32_t sharers = of_row > max_sharers ? max_sharers : of_row;
        if (sharers < 2) return {sub_warp, num_sub_warps, 0, 1};
        return {sub_warp / sharers, num_sub_warps / sharers, sub_warp % sharers, sharers};
    }
};

template <class Context>
TK_DEVICE void combine_send(Context& context, int64_t range) {
    if (context.is_idle()) return;
    Warp& warp = context.warp;
    const auto& args = context.args;
    const ExpertPair to = context.pair();
    const uint32_t expert = context.own_expert(to.local_expert);
    const uint32_t count = packed_count(range);
    const bool goes_far = is_far(context, to.rank);
    const RowShare share = RowShare::of(
        context.sub_warp_id(), args.launch.num_warps_per_group, count, goes_far ? 1 : RowShare::kMaxSharers);
    constexpr uint32_t kVector = sizeof(Vector16);
    const RowPart part = RowPart::of(args.shape.row_bytes() / kVector, share.part, share.num_sharers);
    TK_NO_UNROLL
    for (uint32_t i = share.first; i < count; i += share.stride) {
        const uint64_t row = args.packed_row(to.local_expert, packed_begin(range) + i);
        TK_RANGE(context.recorder, LowLatencyEvent::send_result, to.rank, to.local_expert);
        const uint32_t token = args.call.packed_recv_src_info[row];
        const char* from = args.call.expert_rows + row * args.shape.row_bytes();
        if (goes_far) {
            if (!put_row(context, to, token, from)) break;
            TK_END(token, part.count);
            continue;
        }
        copy_vectors(warp,
                     args.result_row(to.rank, expert, token) + part.begin * kVector,
                     from + part.begin * kVector,
                     part.count * kVector);
        TK_END(token, part.count);
    }
    wait_sub_warps(context, count * share.num_sharers);
    if (context.sub_warp_id() != 0) return;
    TK_SIGNAL(context.recorder,
              LowLatencyEvent::signal_results,
              to.rank,
              to.local_expert,
              context.shared().number & kCombineMask);
    if (goes_far) {
        put_results(context, to, count);
    } else {
        signal_peer<LowLatencyChannel::results>(
            context, to.rank, args.result_flag(to.rank, expert), context.shared().number);
    }
    TK_END(count);
}

// ---- receive ----

template <class Context>
TK_DEVICE void combine_recv(Context& context) {
    Warp& warp = context.warp;
    const auto& args = context.args;
    if (warp.warp == warp.num_warps - 1) {
        note_combine(context);
        wait_ranks(context);
    }
    auto* lists = reinterpret_cast<ResultList*>(&context.shared() + 1);
    const WarpGroup all_warps{1, warp.num_warps, warp, context.shared().arrivals};
    uint32_t turn = 0;
    TK_NO_UNROLL
    for (uint32_t token = warp.block; token < args.call.num_tokens; token += warp.num_blocks) {
        ResultList& list = lists[turn++ % kNumResultLists];
        if (warp.warp == 0) list_results(context, token, list);
        wait_token_warps(context, all_warps);
        if (!list.ok) return;
        reduce_token(context, token, list);
    }
}

// Waits for a token's results and lists them, a lane each.
template <class Context>
TK_DEVICE void list_results(Context& context, uint32_t token, ResultList& list) {
    Warp& warp = context.warp;
    const auto& args = context.args;
    const auto expert = named_experts(warp, args, token);
    const auto weight = warp.lanes([&](int lane) {
        const auto choice = static_cast<uint32_t>(lane);
        return choice < args.call.topk ? args.call.topk_weights[uint64_t{token} * args.call.topk + choice] : 0.0f;
    });
    const uint32_t followed = followed_choices(warp, expert, args.call.topk);
    const bool ok = followed == 0 || wait_results(context, expert, followed);
    warp.each_lane([&](int lane) {
        if (lane >= 32 || !(followed >> lane & 1)) return;
        char* row = args.result_row(args.comm.rank, expert[lane], token);
        list.results[count_bits(followed & ((1u << lane) - 1))] = {row, weight[lane], Expert{}, 0, 0};
    });
    warp.leader([&] {
        list.count = count_bits(followed);
        list.ok = ok;
    });
}

// Waits until all results of a token have come: those of the lanes in `lanes`, an expert each. The span ends with the
// one that came last.
template <class Context>
TK_DEVICE bool wait_results(Context& context, const PerLane<uint32_t>& expert, uint32_t lanes) {
    const auto& args = context.args;
    const auto pair_of = [&](uint32_t among) {
        const uint32_t chosen = context.warp.shuffle(expert, static_cast<int>(first_bit(among)));
        return ExpertPair::of(chosen, args.shape.num_local_experts());
    };
    const auto flag_of = [&](int lane) { return args.result_flag(context.comm.rank, expert[lane]); };
    const auto least_of = [&](int) { return context.shared().number; };
    ExpertPair of = pair_of(lanes);
    TK_WAIT(context.recorder,
            LowLatencyEvent::wait_results,
            of.rank,
            of.local_expert,
            context.shared().number & kCombineMask);
    const WaitStatistic statistic = WaitStatistic::begin(args.call);
    while (lanes) {
        of = pair_of(lanes);
        const WaitFor whom = wait_for(context, of.rank, of.local_expert);
        const uint32_t came = wait_until_any<LowLatencyChannel::results, Scope::ranks>(
                                  context.warp, context.comm, lanes, flag_of, context.epoch, least_of, whom)
                                  .lanes;
        if (!came) break;
        of = pair_of(came);
        lanes &= ~came;
    }
    statistic.add(context.warp, of.rank);
    TK_END_IF(lanes == 0, of.rank, of.local_expert);
    return lanes == 0;
}

// out = round(sum over the choices k, in their order, of weight[k] * result[k]), each product and sum rounded on its
// own. The warps of a block share the columns.
template <class Context>
TK_DEVICE void reduce_token(Context& context, uint32_t token, const ResultList& list) {
    Warp& warp = context.warp;
    const auto& args = context.args;
    TK_RANGE(context.recorder, LowLatencyEvent::reduce_token, token);
    char* out = args.call.out + uint64_t{token} * args.shape.row_bytes();
    const RowPart part = RowPart::of(args.shape.hidden / kPackCount<BFloat16>, warp.warp, warp.num_warps);
    sum_part<BFloat16, kPackCount<BFloat16>, false, false, kFewSumLoads>(warp, out, list.results, list.count, part);
}

// Waits for a flag of each rank, which says that its dispatch is over. Blocks share the ranks from the last block on,
// which has no token where there are few. The last warp of a block does so while the first one waits for its token.
template <class Context>
TK_DEVICE void wait_ranks(Context& context) {
    Warp& warp = context.warp;
    const auto& args = context.args;
    for (uint32_t rank = warp.num_blocks - 1 - warp.block; rank < args.shape.num_ranks; rank += warp.num_blocks) {
        const uint64_t* flag = args.result_flag(context.comm.rank, rank * args.shape.num_local_experts());
        const auto wait_now = [&] {
            return wait_reached<LowLatencyChannel::any_result>(
                warp, context.comm, flag, context.epoch, context.shared().number, wait_for(context, rank, 0u));
        };
        record_wait<LowLatencyEvent::wait_rank>(context, wait_now, rank, 0u, context.shared().number & kCombineMask);
    }
}

// Takes down in the slot that the handle's combine is received.
template <class Context>
TK_DEVICE void note_combine(Context& context) {
    if (!is_last_block(context)) return;
    context.warp.leader([&] {
        context.args.slot().combined.word = context.epoch;
        context.args.slot().num_combines.word = context.shared().number;
    });
}

}  // namespace tracekern
