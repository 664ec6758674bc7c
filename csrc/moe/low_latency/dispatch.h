// Dispatch: each token goes as one message to each of its experts, and each expert's rank learns how many came.
//
// send      Blocks share the tokens. All warps of a block but the last cast a token into shared memory, then warp k
//           copies the message of choice k to its place at the expert's rank, and raises the flag of that place. Before
//           that all warps count the tokens of those experts whose counts this block tells, and the last one tells
//           them.
// receive   A warp group is responsible for one (local expert, source rank): it waits for the count, claims as many
//           rows of the expert, and copies the messages there, each as soon as its flag was raised. No block waits for
//           the others of its rank: one may receive while another still sends.
//
// A flag is released behind its message. A count says nothing of messages. It is released all the same, since it
// acknowledges: see combine.h.
//
// Nobody acknowledges messages, their flags or counts. Those of e are written over those of e-2, which had the same
// slot, so the dispatch of e-2 must be over at all ranks, with all counts and flags seen and all messages copied:
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

namespace tracekern {

template <LowLatencyStage kOwnStage, class OwnComm>
struct LowLatencyKernel {
    using Comm = OwnComm;
    using Args = LowLatencyArgsOn<Comm>;
    static constexpr LowLatencyStage kStage = kOwnStage;
    static constexpr uint32_t kMaxThreads = 1024;

    static uint64_t shared_bytes(const LowLatencyArgs&, uint32_t) { return sizeof(LowLatencyShared); }
};

// Messages that follow LowLatencyShared: one is cast while the other is sent. That of the token before the last
// was sent, since the warps that sent it have met since.
constexpr uint32_t kNumMessages = 2;
template <bool kFp8, class Context>
TK_DEVICE char* staged_message(Context& context, uint32_t turn) {
    const MessageLayout layout = MessageLayout::of(context.args.shape.hidden, kFp8);
    return reinterpret_cast<char*>(&context.shared() + 1) + turn % kNumMessages * layout.bytes;
}

// The last warp of a block tells counts, the others cast and send.
TK_DEVICE bool is_count_warp(const Warp& warp) {
    return warp.warp == warp.num_warps - 1;
}

// Programs look for the name in what a profiler shows, which is that of the type.
namespace low_latency_dispatch {

// Send, receive, or both in one launch.
template <LowLatencyStage kOwnStage, bool kFp8, class Comm>
struct Kernel : LowLatencyKernel<kOwnStage, Comm> {
    static constexpr bool kSends = kOwnStage != LowLatencyStage::dispatch_recv;
    static constexpr bool kReceives = kOwnStage != LowLatencyStage::dispatch_send;

    static uint64_t shared_bytes(const LowLatencyArgs& args, uint32_t) {
        return sizeof(LowLatencyShared) +
               (kSends ? kNumMessages * MessageLayout::of(args.shape.hidden, kFp8).bytes : 0);
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const LowLatencyArgsOn<Comm>& args, typename Rec::Args trace) {
        const uint64_t last = kSends ? args.slot().dispatched.word : args.call.handle->epoch;
        const uint64_t last_combined = kSends ? args.slot().combined.word : 0;
        const auto epoch_of = [&] { return kSends ? epoch_behind(last, args.call.slot) : last; };
        const auto role = kSends && is_count_warp(warp) ? LowLatencyRole::count : LowLatencyRole::dispatch;
        LowLatencyContext<Rec, Comm> context(warp, args, trace, kOwnStage, role, epoch_of);
        const bool was_dropped = kSends && last != last_combined;
        const auto is_ready = [&] { return !kSends || wait_staging(context, Staged::messages); };
        if (begin_kernel(context, 0, is_ready) && (!was_dropped || exchange_acks(context, last, 0))) {
            if constexpr (kSends) {
                count_sends(context);
                // Not else, with which the compiler lays out the code of sends behind that of counts.
                if (is_count_warp(warp)) signal_counts(context);
                if (!is_count_warp(warp)) send_tokens<kFp8>(context);
            }
            if constexpr (kReceives) dispatch_recv<kFp8>(context);
        } else if constexpr (kReceives) {
            receive_nothing(context);
        }
    }
};

}  // namespace low_latency_dispatch

// ---- send ----

// The experts whose counts this block tells their ranks: those of its groups.
struct OwnExperts {
    uint32_t first, count;

    template <class Context>
    TK_DEVICE static OwnExperts of(const Context& context) {
        const uint32_t groups = context.args.launch.num_warp_groups, first = context.warp.block * groups;
        const uint32_t left = first < context.args.shape.num_experts ? context.args.shape.num_experts - first : 0;
        return {first, left < groups ? left : groups};
    }
};

// All warps of a block: with few tokens a load each, before the stores of messages are in its way.
template <class Context>
TK_DEVICE void count_sends(Context& context) {
    const OwnExperts own = OwnExperts::of(context);
    count_tokens(context.warp, context.args, own.first, own.count, [&](uint32_t group, uint32_t count) {
        context.warp.leader([&] { add_relaxed_block(&context.shared().groups[group].num_sent, count); });
    });
}

// Tells the ranks of these experts how many tokens they get. The last warp.
template <class Context>
TK_DEVICE void signal_counts(Context& context) {
    wait_counted(context);
    Warp& warp = context.warp;
    const auto& args = context.args;
    const OwnExperts own = OwnExperts::of(context);
    const auto pair_of = [&](uint32_t group) {
        return ExpertPair::of(own.first + group, args.shape.num_local_experts());
    };
    const auto* groups = context.shared().groups;
    const uint32_t lanes =
        mapped_lanes(context, own.count, [&](int lane) { return pair_of(static_cast<uint32_t>(lane)).rank; });
    // All at once: each release waits for what is under way, also for messages that other warps send.
    const auto tell = [&] {
        const auto flag_of = [&](int lane) {
            const ExpertPair to = pair_of(static_cast<uint32_t>(lane));
            return args.count_flag(to.rank, to.local_expert, context.comm.rank);
        };
        // -n - 1, as in DeepEP, where 0 is no count. The epoch in front of it says of which call it is.
        const auto value_of = [&](int lane) { return ~groups[lane].num_sent; };
        signal_all<LowLatencyChannel::count>(warp, lanes, flag_of, context.epoch, value_of);
    };
    TK_NO_UNROLL
    for (uint32_t group = 0; group < own.count; ++group) {
        const ExpertPair to = pair_of(group);
        TK_SIGNAL(context.recorder, LowLatencyEvent::signal_count, to.rank, to.local_expert);
        if (!(lanes >> group & 1)) put_count(context, to, groups[group].num_sent);
        if (group + 1 == own.count) tell();
        TK_END(groups[group].num_sent);
    }
}

// All warps of the block have counted, and cast its first token if it has one.
template <class Context>
TK_DEVICE void wait_counted(Context& context) {
    const bool has_part = context.is_recorded(context.has_tokens());
    traced_barrier_if<LowLatencyEvent::wait_sub_warps>(has_part, context, context.warp, 0u);
}

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

// The tokens of this block. All its warps but the last. What a warp sends it looks up while it casts.
template <bool kFp8, class Context>
TK_DEVICE void send_tokens(Context& context) {
    Warp& warp = context.warp;
    const auto& args = context.args;
    const CastShare share{warp.warp, warp.num_warps - 1};
    const WarpGroup casters{1, share.num_warps, warp, context.shared().arrivals};
    if (!context.has_tokens()) wait_counted(context);
    uint32_t turn = 0;
    TK_NO_UNROLL
    for (uint32_t token = warp.block; token < args.call.num_tokens; token += warp.num_blocks, ++turn) {
        const auto named = named_experts(warp, args, token);
        char* message = staged_message<kFp8>(context, turn);
        cast_token<kFp8>(context, message, token, share);
        const SendTarget target = take_place(warp, args, named, warp.warp);
        turn == 0 ? wait_counted(context) : wait_token_warps(context, casters);
        if (has_far_choice(context, named)) {
            stage_message<kFp8>(context, message, token, share);
            wait_token_warps(context, casters);
        }
        if (warp.warp < args.call.topk) send_message<kFp8>(context, message, token, warp.warp, target);
    }
    if (warp.warp == 0) note_dispatch(context);
}

// Copies the message of one choice from shared memory to its expert's rank, and says there that it came.
template <bool kFp8, class Context>
TK_DEVICE void send_message(
    Context& context, const char* message, uint32_t token, uint32_t choice, const SendTarget& target) {
    Warp& warp = context.warp;
    const auto& args = context.args;
    const uint32_t expert = target.expert;
    if (expert == kNoExpert) return warp.leader([&] { report_if_bad(args, token, choice); });
    const ExpertPair to = ExpertPair::of(expert, args.shape.num_local_experts());
    const uint32_t place = warp.shuffle(target.place, 0), own_rank = context.comm.rank;
    const MessageLayout layout = MessageLayout::of(args.shape.hidden, kFp8);
    if (is_far(context, to.rank)) return put_message(context, token, to, place, layout);
    {
        TK_RANGE(context.recorder, LowLatencyEvent::send_message, to.rank, expert, place);
        auto* there = reinterpret_cast<Vector16*>(args.recv_message(to.rank, to.local_expert, own_rank, place, layout));
        const auto* here = reinterpret_cast<const Vector16*>(message);
        warp.strided_rolled(layout.bytes / sizeof(Vector16), [&](uint32_t i) { store_once(there + i, here[i]); });
        TK_END(token);
    }
    TK_SIGNAL(context.recorder, LowLatencyEvent::signal_message, to.rank, to.local_expert, place);
    signal_peer<LowLatencyChannel::message>(
        context, to.rank, args.message_flag(to.rank, to.local_expert, own_rank, place), 0);
}

// Takes the slot's epoch down, and the handle's, and leaves the places for the slot's next dispatch. The first warp of
// a block, behind the barrier of its last token: when it is the last of all blocks, all places were taken.
template <class Context>
TK_DEVICE void note_dispatch(Context& context) {
    if (!is_last_block(context)) return;
    const auto& args = context.args;
    context.warp.strided(args.shape.num_experts, [&](uint32_t expert) { *args.slot_counter(expert) = 0; });
    context.warp.leader([&] {
        args.slot().dispatched.word = context.epoch;
        args.call.handle->epoch = context.epoch;
    });
}

// ---- receive ----

template <bool kFp8, class Context>
TK_DEVICE void dispatch_recv(Context& context) {
    if (context.is_idle()) return;
    const ExpertPair from = context.pair();
    const uint32_t sub_warp = context.sub_warp_id();
    if (sub_warp == 1) claim_rows(context);
    const uint32_t count = wait_claimed(context, from);
    TK_NO_UNROLL
    for (uint32_t place = sub_warp; place < count; place += context.args.launch.num_warps_per_group) {
        if (!wait_message(context, from, place)) return;
        copy_token<kFp8>(context, from, place);
    }
}

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

// How long a warp waited for a rank's flags, added up for callers who ask. In dispatch until a first message was there.
struct WaitStatistic {
    const LowLatencyCall& call;
    const uint64_t started;

    TK_DEVICE static WaitStatistic begin(const LowLatencyCall& call) {
        return {call, call.wait_ticks ? read_clock() : 0};
    }
    TK_DEVICE void add(Warp& warp, uint32_t rank) const {
        if (!call.wait_ticks) return;
        warp.leader([&] { add_relaxed_device(call.wait_ticks + rank, read_clock() - started); });
    }
};

// Waits for the count of the pair, claims its rows and tells the group. A wait that failed claims none.
template <class Context>
TK_DEVICE void claim_rows(Context& context) {
    Warp& warp = context.warp;
    const auto& args = context.args;
    const ExpertPair from = context.pair();
    const uint64_t* flag = args.count_flag(context.comm.rank, from.local_expert, from.rank);
    const auto wait_now = [&] {
        const WaitFor whom = wait_for(context, from.rank, from.local_expert);
        const WaitStatistic statistic = WaitStatistic::begin(args.call);
        const WaitResult seen = wait<LowLatencyChannel::count>(warp, context.comm, flag, context.epoch, whom);
        const uint32_t num_tokens = seen.ok ? ~seen.value & kMaxFlagValue : 0;
        if (num_tokens == 0) statistic.add(warp, from.rank);  // else with the first message
        warp.leader([&] { context.group().started = statistic.started; });
        return WaitResult{seen.ok, num_tokens};
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

// The message of a place has come.
template <class Context>
TK_DEVICE bool wait_message(Context& context, ExpertPair from, uint32_t place) {
    const uint64_t* flag = context.args.message_flag(context.comm.rank, from.local_expert, from.rank, place);
    const auto wait_now = [&] {
        const WaitFor whom = wait_for(context, from.rank, from.local_expert);
        return wait<LowLatencyChannel::message>(context.warp, context.comm, flag, context.epoch, whom);
    };
    if (!record_wait<LowLatencyEvent::wait_message>(context, wait_now, from.rank, from.local_expert, place).ok) {
        return false;
    }
    if (place == 0) WaitStatistic{context.args.call, context.group().started}.add(context.warp, from.rank);
    return true;
}

// Copies one message to its row.
template <bool kFp8, class Context>
TK_DEVICE void copy_token(Context& context, ExpertPair from, uint32_t place) {
    Warp& warp = context.warp;
    const auto& args = context.args;
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

// In place of dispatch_recv() where this block leaves out its work: no pair of these experts will ever be complete, so
// nobody else says how many rows they have, and experts that are launched already are not to read what is there.
template <class Context>
TK_DEVICE void receive_nothing(Context& context) {
    if (context.is_idle() || context.sub_warp_id() != 0) return;
    uint32_t* count = context.args.call.packed_recv_count + context.pair().local_expert;
    context.warp.leader([&] { exchange_relaxed_device(count, 0u); });  // other blocks may do the same
}

}  // namespace tracekern
