// Combine: what experts made of each row goes back to the token's rank, which adds up a token's results.
//
// send      The warp group of (local expert, rank) copies the rows of that pair to [expert][token] at the rank, then
//           raises one flag there, zero tokens included.
// receive   Each group waits for the flag of one expert; after a grid barrier the blocks share the tokens and add up
//           their results in fp32, in the order of the choices. The last block to end acknowledges to every expert's
//           rank.
//
// Results of epoch e are written only after their rank has acknowledged the last combine that took the slot. A dispatch
// may have taken it in between: a combine may be sent, and its receive be launched later.
#pragma once

#include "moe/low_latency/dispatch.h"
#include "moe/row_sum.h"

namespace tracekern {

// ---- send ----

// The rank has added up what the slot's last combine sent there.
template <class Rec>
TK_DEVICE bool wait_combine_ack(LowLatencyContext<Rec>& context, ExpertPair to) {
    constexpr auto kChannel = LowLatencyChannel::combine_ack;
    const LowLatencyArgs& args = context.args;
    const uint64_t last = args.state->slots[args.call.slot].combined.word;
    const uint64_t* flag = args.combine_ack(context.comm.rank, to.local_expert, to.rank);
    const auto wait_now = [&] {
        const WaitFor whom = wait_for(context, to.rank, to.local_expert);
        return wait<kChannel>(context.warp, context.comm, flag, last, whom);
    };
    return record_wait<LowLatencyEvent::wait_combine_ack>(context, wait_now, to.rank, to.local_expert).ok;
}

template <class Rec>
TK_DEVICE void combine_send(LowLatencyContext<Rec>& context) {
    if (context.is_idle()) return;
    Warp& warp = context.warp;
    const LowLatencyArgs& args = context.args;
    const ExpertPair to = context.pair();
    const uint32_t expert = context.own_expert(to.local_expert);
    const int64_t range = args.call.packed_recv_layout_range[to.local_expert * args.shape.num_ranks + to.rank];
    const uint32_t count = packed_count(range);
    if (context.sub_warp_id() == 0) {
        const bool ok = wait_combine_ack(context, to) && !has_aborted(warp, context.comm);
        warp.leader([&] { context.group().ok = ok; });
    }
    wait_sub_warps(context, count);
    if (!context.group().ok) return;
    TK_NO_UNROLL
    for (uint32_t i = context.sub_warp_id(); i < count; i += args.launch.num_warps_per_group) {
        const uint64_t row = args.packed_row(to.local_expert, packed_begin(range) + i);
        TK_RANGE(context.recorder, LowLatencyEvent::send_result, to.rank, to.local_expert);
        const uint32_t token = args.call.packed_recv_src_info[row];
        const uint32_t row_bytes = args.shape.row_bytes();
        copy_vectors(warp, args.result_row(to.rank, expert, token), args.call.expert_rows + row * row_bytes, row_bytes);
        TK_END(token);
    }
    wait_sub_warps(context, count);
    if (context.sub_warp_id() != 0) return;
    TK_SIGNAL(context.recorder, LowLatencyEvent::signal_results, to.rank, to.local_expert);
    signal_peer<LowLatencyChannel::results>(context, to.rank, args.result_flag(to.rank, expert), count);
    TK_END(count);
}

// ---- receive ----

// Lists a token's results in the order of its choices, a lane each; returns how many.
TK_DEVICE uint32_t list_results(Warp& warp, const LowLatencyArgs& args, uint32_t token, Contribution* list) {
    const auto expert = named_experts(warp, args, token);
    uint32_t followed = 0;
    for (uint32_t choice = 0; choice < args.call.topk; ++choice) {
        followed |= uint32_t{followed_choice(warp, expert, choice) != kNoExpert} << choice;
    }
    warp.sync();  // the list of the token before is read
    warp.each_lane([&](int lane) {
        if (lane >= 32 || !(followed >> lane & 1)) return;
        char* row = args.result_row(args.comm.rank, expert[lane], token);
        const float weight = args.call.topk_weights[uint64_t{token} * args.call.topk + static_cast<uint32_t>(lane)];
        list[count_bits(followed & ((1u << lane) - 1))] = {row, weight, Expert{}, 0, 0};
    });
    warp.sync();
    return count_bits(followed);
}

// out = round(sum over the choices k, in their order, of weight[k] * result[k]), each product and sum rounded on its
// own. The warps of a block share the columns.
TK_DEVICE void reduce_token(Warp& warp, const LowLatencyArgs& args, uint32_t token) {
    auto* lists = reinterpret_cast<Contribution*>(&warp.shared<LowLatencyShared>() + 1);
    Contribution* list = lists + warp.warp * kMaxLowLatencyTopk;
    const uint32_t count = list_results(warp, args, token, list);
    char* out = args.call.out + uint64_t{token} * args.shape.row_bytes();
    const RowPart part = RowPart::of(args.shape.hidden / kPackCount<BFloat16>, warp.warp, warp.num_warps);
    sum_part<BFloat16, kPackCount<BFloat16>, false, false, kFewSumLoads>(warp, out, list, count, part);
}

// The ranks of the experts may send anew. The warps of the last block share them: each tells those of up to 32 experts
// at a time, and a span names the first.
template <class Rec>
TK_DEVICE void acknowledge_combine(LowLatencyContext<Rec>& context) {
    Warp& warp = context.warp;
    const LowLatencyArgs& args = context.args;
    const auto pair_of = [&](uint32_t expert) { return ExpertPair::of(expert, args.shape.num_local_experts()); };
    TK_NO_UNROLL
    for (uint32_t first = warp.warp; first < args.shape.num_experts; first += 32 * warp.num_warps) {
        const uint32_t num_others = (args.shape.num_experts - 1 - first) / warp.num_warps;
        const uint32_t lanes = num_others < 31 ? (2u << num_others) - 1 : ~0u;
        const auto flag_of = [&](int lane) {
            const ExpertPair to = pair_of(first + static_cast<uint32_t>(lane) * warp.num_warps);
            return args.combine_ack(to.rank, to.local_expert, context.comm.rank);
        };
        const ExpertPair to = pair_of(first);
        TK_SIGNAL(context.recorder, LowLatencyEvent::signal_combine_ack, to.rank, to.local_expert);
        signal_all<LowLatencyChannel::combine_ack>(warp, lanes, flag_of, context.epoch, [](int) { return 0u; });
    }
}

// Returns whether all results came, the same in all warps of a block.
template <class Rec>
TK_DEVICE bool combine_recv(LowLatencyContext<Rec>& context) {
    Warp& warp = context.warp;
    const LowLatencyArgs& args = context.args;
    if (!context.is_idle() && context.sub_warp_id() == 0) {
        const ExpertPair of = context.pair();
        const uint64_t* flag = args.result_flag(context.comm.rank, context.responsible_expert_idx());
        traced_wait<LowLatencyChannel::results, LowLatencyEvent::wait_results>(context, flag, of.rank, of.local_expert);
    }
    if (!wait_grid(context, true)) return false;
    TK_NO_UNROLL
    for (uint32_t token = warp.block; token < args.call.num_tokens; token += warp.num_blocks) {
        TK_RANGE(context.recorder, LowLatencyEvent::reduce_token, token);
        reduce_token(warp, args, token);
    }
    return true;
}

// ---- the kernels ----

// Send, receive, or both in one launch.
template <LowLatencyStage kOwnStage>
struct LowLatencyCombine : LowLatencyKernel<kOwnStage> {
    static constexpr bool kSends = kOwnStage != LowLatencyStage::combine_recv;
    static constexpr bool kReceives = kOwnStage != LowLatencyStage::combine_send;

    static uint64_t shared_bytes(const LowLatencyArgs&, uint32_t warps_per_block) {
        const uint64_t lists = uint64_t{warps_per_block} * kMaxLowLatencyTopk * sizeof(Contribution);
        return sizeof(LowLatencyShared) + (kReceives ? lists : 0);
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const LowLatencyArgs& args, typename Rec::Args trace) {
        const uint64_t epoch = *args.call.handle_epoch;
        LowLatencyContext<Rec> context(warp, args, trace, kOwnStage, LowLatencyRole::combine, epoch);
        clear_shared(context);
        if constexpr (kSends) combine_send(context);
        bool all_came = true;
        if constexpr (kReceives) all_came = combine_recv(context);
        const bool is_last = is_last_block(context);
        if constexpr (kReceives) {
            // Only now it is known whether the warp has something to acknowledge.
            const bool has_polled = !context.is_idle() && context.sub_warp_id() == 0;
            const bool has_part = has_polled || context.has_tokens() || is_last || !all_came;
            TK_TAKE_BACK_IF(context.recorder, !context.is_recorded(has_part), LowLatencyEvent::wait_grid);
        }
        if (!is_last) return;
        if constexpr (kSends) {
            LowLatencySlot& slot = args.state->slots[args.call.slot];
            if (warp.warp == 0) warp.leader([&] { slot.combined.word = epoch; });
        }
        if constexpr (kReceives) {
            if (all_came) acknowledge_combine(context);
        }
    }
};

}  // namespace tracekern
