// Dispatch: each token goes as one message to each of its experts, and each expert's rank learns how many came.
//
// send      Blocks share the tokens. All warps of a block but the last cast a token into rdma_x, then warp k copies the
//           message of choice k to its place at the expert's rank. Meanwhile the last warp counts the tokens of those
//           experts whose counts this block's groups send. Once all messages for an expert are out, its group sends
//           their number to the expert's rank alone.
// receive   A warp group is responsible for one (local expert, source rank): it waits for the count, claims as many
//           rows of the expert, and copies the messages there. No block waits for the others of its rank: one may
//           receive while another still sends.
//
// A count of epoch e is released after the messages of e: each was counted as out with a release, which the group's
// acquire of the finish counter takes up.
//
// Nobody acknowledges messages or counts. Those of e are written over those of e-2, which had the same slot, so the
// dispatch of e-2 must be over at all ranks, with all counts seen and all messages copied:
//   - A rank sends results of e-2 in a kernel behind its dispatch of e-2, zero rows included. The combine of e-2 waited
//     for a result flag of every rank, and this kernel is behind it on the stream.
//   - No combine of e-2 was received: its handle was dropped, on all ranks alike. Then each rank tells the others that
//     its dispatch of e-2 is over, and waits for what they tell. This is seen from the slot's two epochs alone, which
//     are on the device, since a graph may drop a handle each time that it is replayed.
// Stream order is part of both: kernels of a buffer never overlap.
#pragma once

#include "moe/low_latency/barriers.h"
#include "moe/low_latency/cast.h"
#include "moe/low_latency/choices.h"
#include "moe/roles.h"

namespace tracekern {

// ---- send ----

// Where a choice's message goes. The place is its first lane's, and may be under way still.
struct SendTarget {
    uint32_t expert;
    PerLane<uint32_t> place;
};

TK_DEVICE SendTarget take_place(Warp& warp,
                                const LowLatencyArgs& args,
                                const PerLane<uint32_t>& named,
                                uint32_t choice) {
    const uint32_t expert = choice < args.call.topk ? followed_choice(warp, named, choice) : kNoExpert;
    return {expert, warp.lanes([&](int lane) {
                return lane == 0 && expert != kNoExpert ? add_relaxed_device(args.slot_counter(expert), 1u) : 0u;
            })};
}

// Copies the message of one choice to its expert's rank, and counts it as out.
template <bool kFp8, class Rec>
TK_DEVICE void send_message(LowLatencyContext<Rec>& context,
                            uint32_t token,
                            uint32_t choice,
                            const SendTarget& target) {
    Warp& warp = context.warp;
    const LowLatencyArgs& args = context.args;
    const uint32_t expert = target.expert;
    if (expert == kNoExpert) return warp.leader([&] { report_if_bad(args, token, choice); });
    const ExpertPair to = ExpertPair::of(expert, args.shape.num_local_experts());
    const uint32_t place = warp.shuffle(target.place, 0);
    {
        const MessageLayout layout = MessageLayout::of(args.shape.hidden, kFp8);
        TK_RANGE(context.recorder, LowLatencyEvent::send_message, to.rank, expert, place);
        copy_vectors(warp,
                     args.recv_message(to.rank, to.local_expert, context.comm.rank, place, layout),
                     args.own_message(token, layout),
                     layout.bytes);
        TK_END(token);
    }
    // Released for the group that sends the count.
    count_up<LowLatencyChannel::sends>(warp, args.finish_counter(expert));
}

// The tokens of this block. All its warps but the last. What a warp sends it looks up while it casts.
template <bool kFp8, class Rec>
TK_DEVICE void send_tokens(LowLatencyContext<Rec>& context) {
    Warp& warp = context.warp;
    const LowLatencyArgs& args = context.args;
    const CastShare share{warp.warp, warp.num_warps - 1};
    const WarpGroup casters{1, share.num_warps, warp, context.shared().arrivals};
    TK_NO_UNROLL
    for (uint32_t token = warp.block; token < args.call.num_tokens; token += warp.num_blocks) {
        const auto named = named_experts(warp, args, token);
        cast_token<kFp8>(context, token, share);
        const SendTarget target = take_place(warp, args, named, warp.warp);
        wait_token_warps(context, casters);
        if (warp.warp < args.call.topk) send_message<kFp8>(context, token, warp.warp, target);
    }
}

// How many tokens go to each expert that a group of this block tells of it. The last warp.
template <class Rec>
TK_DEVICE void count_sends(LowLatencyContext<Rec>& context) {
    Warp& warp = context.warp;
    const LowLatencyArgs& args = context.args;
    const uint32_t first = warp.block * args.launch.num_warp_groups;
    const uint32_t num_left = first < args.shape.num_experts ? args.shape.num_experts - first : 0;
    const uint32_t num_groups = num_left < args.launch.num_warp_groups ? num_left : args.launch.num_warp_groups;
    count_tokens(warp, args, first, num_groups, [&](uint32_t group, uint32_t count) {
        warp.leader([&] { context.shared().groups[group].num_sent += count; });
    });
}

// Waits until all `wanted` messages for an expert are out: the blocks that send them are on the device.
template <class Rec>
TK_DEVICE WaitResult wait_finished(LowLatencyContext<Rec>& context, uint32_t expert, uint64_t wanted) {
    const uint64_t* finished = context.args.finish_counter(expert);
    const auto whom = [&](uint64_t) { return WaitFor{context.stage, context.comm.rank, expert}; };
    return {wait_for_count<LowLatencyChannel::sends>(context.warp, context.comm, finished, wanted, whom), 0};
}

// Tells the expert's rank how many tokens came from here. Both counters are zero again for the slot's next call.
template <class Rec>
TK_DEVICE void signal_count(LowLatencyContext<Rec>& context) {
    const LowLatencyArgs& args = context.args;
    const uint32_t expert = context.responsible_expert_idx();
    const ExpertPair to = context.pair();
    const uint32_t num_sent = context.group().num_sent;
    const auto wait_now = [&] { return wait_finished(context, expert, num_sent); };
    if (!record_wait_if<LowLatencyEvent::wait_sends>(context.is_recorded(num_sent != 0), context, wait_now, expert)
             .ok) {
        return;
    }
    {
        TK_SIGNAL(context.recorder, LowLatencyEvent::signal_count, to.rank, to.local_expert);
        // -n - 1, as in DeepEP, where 0 is no count. The epoch in front of it says of which call it is.
        uint64_t* flag = args.count_flag(to.rank, to.local_expert, context.comm.rank);
        signal_peer<LowLatencyChannel::count>(context, to.rank, flag, ~num_sent);
        TK_END(num_sent);
    }
    context.warp.leader([&] {
        *args.slot_counter(expert) = 0;
        *args.finish_counter(expert) = 0;
    });
}

// Takes the slot's epoch down, and the handle's. The last warp: nothing waits for it.
template <class Rec>
TK_DEVICE void note_dispatch(LowLatencyContext<Rec>& context) {
    if (!all_have_begun(context)) return;
    context.warp.leader([&] {
        context.args.slot().dispatched.word = context.epoch;
        context.args.call.handle->epoch = context.epoch;
    });
}

// The last warp of a block counts, the others cast and send.
struct LastWarp {
    TK_DEVICE static bool has(const Warp& warp, const OwnPart&) { return warp.warp == warp.num_warps - 1; }
};
struct CountSends {
    template <class Rec>
    TK_DEVICE static bool run(LowLatencyContext<Rec>& context, Share) {
        count_sends(context);
        note_dispatch(context);
        return true;
    }
};
struct AllButLast {
    TK_DEVICE static bool has(const Warp& warp, const OwnPart& own) { return !LastWarp::has(warp, own); }
};
template <bool kFp8>
struct SendTokens {
    template <class Rec>
    TK_DEVICE static bool run(LowLatencyContext<Rec>& context, Share) {
        send_tokens<kFp8>(context);
        return true;
    }
};
template <bool kFp8>
using SendRoles = RoleTable<EveryBlock,
                            Role<LowLatencyRole::count, LastWarp, CountSends>,
                            Role<LowLatencyRole::dispatch, AllButLast, SendTokens<kFp8>>>;

template <bool kFp8, class Rec>
TK_DEVICE void dispatch_send(LowLatencyContext<Rec>& context) {
    SendRoles<kFp8>(context.warp).run(context);
    context.warp.block_sync();
    if (!context.is_idle() && context.sub_warp_id() == 0) signal_count(context);
}

// ---- receive ----

// Takes `count` rows of a local expert, and returns the first. Each source claims once, none if it sent nothing: the
// last one knows how many came from all, and brings the counter back to zero for the slot's next call, which is a later
// launch. So nothing has to be zero before the first claim, and no block waits for another here.
TK_DEVICE uint32_t claim(Warp& warp, const LowLatencyArgs& args, uint32_t local_expert, uint32_t count) {
    return warp.once([&] {
        uint64_t* claims = args.claims(local_expert);
        const uint64_t own = uint64_t{1} << 32 | count;
        const uint64_t before = add_relaxed_device(claims, own);
        if (before >> 32 == args.shape.num_ranks - 1) {
            const auto total = static_cast<uint32_t>(before + own);
            args.call.packed_recv_count[local_expert] = total;
            if (args.call.recv_stats) args.call.recv_stats[local_expert] += total;
            add_relaxed_device(claims, uint64_t{0} - before - own);
        }
        return static_cast<uint32_t>(before);
    });
}

// How long a warp waited for a rank's flags, added up for callers who ask.
struct WaitStatistic {
    const LowLatencyArgs& args;
    const uint64_t started;

    TK_DEVICE explicit WaitStatistic(const LowLatencyArgs& own_args)
        : args(own_args), started(own_args.call.wait_ticks ? read_clock() : 0) {}
    TK_DEVICE void add(Warp& warp, uint32_t rank) const {
        if (!args.call.wait_ticks) return;
        warp.leader([&] { add_relaxed_device(args.call.wait_ticks + rank, read_clock() - started); });
    }
};

// Waits for the count of the pair, claims its rows and tells the group. A wait that failed claims none.
template <class Rec>
TK_DEVICE void claim_rows(LowLatencyContext<Rec>& context) {
    Warp& warp = context.warp;
    const LowLatencyArgs& args = context.args;
    const ExpertPair from = context.pair();
    const uint64_t* flag = args.count_flag(context.comm.rank, from.local_expert, from.rank);
    const auto wait_now = [&] {
        const WaitFor whom = wait_for(context, from.rank, from.local_expert);
        const WaitStatistic statistic(args);
        const WaitResult seen = wait<LowLatencyChannel::count>(warp, context.comm, flag, context.epoch, whom);
        statistic.add(warp, from.rank);
        return WaitResult{seen.ok, seen.ok ? ~seen.value & kMaxFlagValue : 0};
    };
    const WaitResult count = record_wait<LowLatencyEvent::wait_count>(context, wait_now, from.rank, from.local_expert);
    const uint32_t begin = claim(warp, args, from.local_expert, count.value);
    warp.leader([&] {
        const uint32_t pair = from.local_expert * args.shape.num_ranks + from.rank;
        args.call.packed_recv_layout_range[pair] = pack2(count.value, begin);
        context.group().count = count.value;
        context.group().begin = begin;
    });
}

// Copies one message to its row.
template <bool kFp8, class Rec>
TK_DEVICE void copy_token(LowLatencyContext<Rec>& context, ExpertPair from, uint32_t place) {
    Warp& warp = context.warp;
    const LowLatencyArgs& args = context.args;
    const MessageLayout layout = MessageLayout::of(args.shape.hidden, kFp8);
    const uint64_t row = args.packed_row(from.local_expert, context.group().begin + place);
    char* message = args.recv_message(context.comm.rank, from.local_expert, from.rank, place, layout);
    TK_RANGE(context.recorder, LowLatencyEvent::copy_token, from.rank, from.local_expert, place);
    const char* values = message + sizeof(MessageHeader);
    if constexpr (kFp8) {
        const auto* scales = reinterpret_cast<const float*>(values + layout.values_bytes);
        const uint32_t own_row = context.group().begin + place;
        warp.strided_rolled(layout.num_scales, [&](uint32_t i) {
            args.put_scale(args.scale_index(from.local_expert, own_row, i), scales[i]);
        });
    }
    copy_vectors(warp, args.call.packed_recv_x + row * layout.values_bytes, values, layout.values_bytes);
    const uint32_t token = reinterpret_cast<const MessageHeader*>(message)->token;
    if (warp.is_leader()) args.call.packed_recv_src_info[row] = token;
    warp.sync();
    poison(message, layout.bytes);
    TK_END(token);
}

template <bool kFp8, class Rec>
TK_DEVICE void dispatch_recv(LowLatencyContext<Rec>& context) {
    if (context.is_idle()) return;
    const ExpertPair from = context.pair();
    const uint32_t sub_warp = context.sub_warp_id();
    if (sub_warp == 1) claim_rows(context);
    wait_group(context, from);
    const uint32_t count = context.group().count;
    // Only now it is known which sub-warps have a message to copy. For the second one all waited.
    const bool has_part = sub_warp < count || sub_warp == 1;
    TK_TAKE_BACK_IF(context.recorder, !context.is_recorded(has_part), LowLatencyEvent::wait_group);
    TK_NO_UNROLL
    for (uint32_t place = sub_warp; place < count; place += context.args.launch.num_warps_per_group) {
        copy_token<kFp8>(context, from, place);
    }
}

// ---- the kernels ----

template <LowLatencyStage kOwnStage>
struct LowLatencyKernel {
    using Args = LowLatencyArgs;
    static constexpr LowLatencyStage kStage = kOwnStage;
    static constexpr uint32_t kMaxThreads = 1024;

    static uint64_t shared_bytes(const LowLatencyArgs&, uint32_t) { return sizeof(LowLatencyShared); }
};

// Programs look for the name in what a profiler shows, which is that of the type.
namespace low_latency_dispatch {

// Send, receive, or both in one launch.
template <LowLatencyStage kOwnStage, bool kFp8>
struct Kernel : LowLatencyKernel<kOwnStage> {
    static constexpr bool kSends = kOwnStage != LowLatencyStage::dispatch_recv;
    static constexpr bool kReceives = kOwnStage != LowLatencyStage::dispatch_send;

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const LowLatencyArgs& args, typename Rec::Args trace) {
        const uint64_t last = args.slot().dispatched.word;
        const bool was_dropped = kSends && last != args.slot().combined.word;
        const uint64_t epoch = kSends ? epoch_behind(last, args.call.slot) : args.call.handle->epoch;
        const auto role = kSends ? SendRoles<kFp8>(warp).name() : LowLatencyRole::dispatch;
        LowLatencyContext<Rec> context(warp, args, trace, kOwnStage, role, epoch);
        if (!begin_kernel(context)) return;
        if (was_dropped && !exchange_acks(context, last, 0)) return;
        if constexpr (kSends) dispatch_send<kFp8>(context);
        if constexpr (kReceives) dispatch_recv<kFp8>(context);
    }
};

}  // namespace low_latency_dispatch

}  // namespace tracekern
