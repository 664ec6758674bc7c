// How low latency reaches ranks of other hosts: what is sent is staged in memory that the rank's proxy registered, and
// the proxy is asked to write it where a rank of this host would have stored it (comm/proxy_peer.h). Which flag an
// immediate raises there: see inbox.hpp.
//
// A slot's staging is filled anew when all that was written from it before has arrived, which the proxy counts. By then
// the numbers of results have arrived, too. Nobody waits for that of an expert which no token of the rank chose, and in
// a network it could come calls later, when its epoch means another call.
#pragma once

#include "moe/low_latency/cast.h"
#include "moe/row_sum.h"

namespace tracekern {

// Of `count` lanes those whose rank is mapped.
template <class Context, class RankOf>
TK_DEVICE uint32_t mapped_lanes(Context& context, uint32_t count, RankOf rank_of) {
    if constexpr (kIsFar<typename Context::Comm>) {
        return context.warp.ballot(
            [&](int lane) { return static_cast<uint32_t>(lane) < count && !is_far(context, rank_of(lane)); });
    } else {
        return (1u << count) - 1;
    }
}

// ---- commands ----

// What a write takes from this rank's far heap, and where it goes in that of the other rank.
struct StagedBytes {
    uint32_t bytes;
    uint64_t src, dst;
};

template <class Context>
TK_DEVICE bool put(
    Context& context, uint32_t rank, const Immediate& imm, const StagedBytes& from = {}, uint32_t tag = 0) {
    Command command{};
    command.imm = pack_immediate(imm);
    command.bytes = from.bytes;
    command.peer = static_cast<uint16_t>(rank);
    command.tag = static_cast<uint8_t>(tag);
    command.src = from.src;
    command.dst = from.dst;
    return post<LowLatencyEvent::wait_command_room>(context, command, rank);
}

// How many tokens this rank sends to an expert of `to`.
template <class Context>
TK_DEVICE void put_count(Context& context, ExpertPair to, uint32_t num_tokens) {
    if constexpr (kIsFar<typename Context::Comm>) {
        const auto epoch = static_cast<uint32_t>(context.epoch);
        put(context, to.rank, {PutKind::count, 0, epoch, to.local_expert, num_tokens});
    }
}

template <class Context>
TK_DEVICE void put_ack(Context& context, uint32_t rank, uint64_t epoch, uint32_t number) {
    if constexpr (kIsFar<typename Context::Comm>) {
        put(context, rank, {PutKind::word, 0, static_cast<uint32_t>(epoch), kAckWord, number});
    }
}

// What the slot's next call of that kind waits for: a write from what is staged, or that says how many there are.
// False: gave up.
template <class Context>
TK_DEVICE bool put_counted(
    Context& context, PutKind kind, ExpertPair to, uint32_t n, Staged staged, const StagedBytes& from = {}) {
    const auto& args = context.args;
    uint64_t* num_posted = &args.slot().num_posted[static_cast<uint32_t>(staged)].word;
    context.warp.leader([&] { add_relaxed_device(num_posted, uint64_t{1}); });
    const Immediate imm{kind, 0, static_cast<uint32_t>(context.epoch), to.local_expert, n};
    return put(context, to.rank, imm, from, tag_of(staged, args.call.slot));
}

// Waits until what was staged in this slot before is no longer read. One warp's; false: gave up.
template <class Context>
TK_DEVICE bool wait_staging(Context& context, Staged staged) {
    if constexpr (kIsFar<typename Context::Comm>) {
        const uint32_t slot = context.args.call.slot;
        const uint64_t* num_posted = &context.args.slot().num_posted[static_cast<uint32_t>(staged)].word;
        return wait_sent<LowLatencyEvent::wait_sent>(context, tag_of(staged, slot), num_posted, slot);
    } else {
        return true;
    }
}

// ---- dispatch ----

template <class Context>
TK_DEVICE bool has_far_choice(Context& context, const PerLane<uint32_t>& named) {
    if constexpr (kIsFar<typename Context::Comm>) {
        const MoeShape& shape = context.args.shape;
        return context.warp.ballot([&](int lane) {
            return named[lane] < shape.num_experts && is_far(context, shape.rank_of(named[lane]));
        }) != 0;
    } else {
        return false;
    }
}

// The warps that cast a token copy its message, a part each, to where the proxy writes it from, once for all its
// experts.
template <bool kFp8, class Context>
TK_DEVICE void stage_message(Context& context, const char* message, uint32_t token, CastShare share) {
    if constexpr (kIsFar<typename Context::Comm>) {
        const MessageLayout layout = MessageLayout::of(context.args.shape.hidden, kFp8);
        TK_RANGE(context.recorder, LowLatencyEvent::stage_message, token);
        const RowPart part = RowPart::of(layout.bytes / sizeof(Vector16), share.index, share.num_warps);
        char* place = context.comm.far_heap + context.args.staged_message_place(token, layout);
        auto* there = reinterpret_cast<Vector16*>(place) + part.begin;
        const auto* here = reinterpret_cast<const Vector16*>(message) + part.begin;  // in shared memory
        context.warp.strided_rolled(part.count, [&](uint32_t i) { store_once(there + i, here[i]); });
    }
}

template <class Context>
TK_DEVICE void put_message(
    Context& context, uint32_t token, ExpertPair to, uint32_t place, const MessageLayout& layout) {
    if constexpr (kIsFar<typename Context::Comm>) {
        const auto& args = context.args;
        TK_SIGNAL(context.recorder, LowLatencyEvent::signal_message, to.rank, to.local_expert, place);
        const StagedBytes from{layout.bytes,
                               args.staged_message_place(token, layout),
                               args.message_place(to.local_expert, context.comm.rank, place, layout)};
        put_counted(context, PutKind::message, to, place, Staged::messages, from);
    }
}

// ---- combine ----

// The result of a token of `to`. False: gave up.
template <class Context>
TK_DEVICE bool put_row(Context& context, ExpertPair to, uint32_t token, const char* row) {
    if constexpr (kIsFar<typename Context::Comm>) {
        const auto& args = context.args;
        const StagedBytes from{args.shape.row_bytes(),
                               args.staged_row_place(to, token),
                               args.result_place(context.own_expert(to.local_expert), token)};
        copy_vectors(context.warp, context.comm.far_heap + from.src, row, from.bytes);
        return put_counted(context, PutKind::row, to, token, Staged::rows, from);
    } else {
        return false;
    }
}

// How many rows of an expert of this rank there are for `to`.
template <class Context>
TK_DEVICE void put_results(Context& context, ExpertPair to, uint32_t num_rows) {
    if constexpr (kIsFar<typename Context::Comm>) put_counted(context, PutKind::results, to, num_rows, Staged::rows);
}

}  // namespace tracekern
