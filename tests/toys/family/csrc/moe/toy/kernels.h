// The smallest kernel that waits: each rank tells all others that it is there, waits until all have told it so, and
// copies its own rows.
#pragma once

#include "comm/mutation.h"
#include "moe/config.h"
#include "moe/context.h"
#include "moe/kernel_list.h"

// clang-format off
#define TK_TOY_EVENTS(EVENT)                                                \
    EVENT(signal_here, signal, completion, "here data", "peer:10",  "")     \
    EVENT(wait_here,   wait,   completion, "here data", "peer:10",  "")     \
    EVENT(copy_token,  work,   issue,      "",          "token:32", "")
// clang-format on
TK_DEFINE_EVENTS(ToyEvent, TK_TOY_EVENTS)

namespace tracekern {

enum class ToyVariant : uint32_t { toy };
enum class ToyStage : uint32_t { echo };
enum class ToyRole : uint32_t { copy };
enum class ToyChannel : uint32_t { here = kFirstOwnChannel };

struct ToyState {
    uint64_t epoch;
};

struct ToyArgs : MoeCall {
    CommArgs comm;
    MoeShape shape;
    ToyState* state;

    TK_DEVICE uint64_t epoch() const { return state->epoch; }
    // In the heap of `at_rank`, written by `of_rank`. Two sets in turns: a rank that is through may raise the next
    // epoch's flag before a slow peer has seen this one's, but not the one after, for which it needs that peer.
    TK_DEVICE uint64_t* here_flag(uint64_t epoch, uint32_t at_rank, uint32_t of_rank) const {
        return comm.at<uint64_t>(at_rank, sizeof(HeapControl)) + epoch % 2 * comm.num_ranks + of_rank;
    }
};

template <class Rec>
TK_DEVICE void echo(Warp& warp, const ToyArgs& args, typename Rec::Args trace) {
    if (warp.block != 0 || warp.warp != 0) return;
    Context<ToyArgs, Rec> context(warp, args, trace, ToyStage::echo, ToyRole::copy);
    bool ok = true;
    for (uint32_t i = 0; i < args.comm.num_ranks; ++i) {
        const uint32_t peer = args.comm.nth_peer(i);
        TK_SIGNAL(context.recorder, ToyEvent::signal_here, peer);
        signal<ToyChannel::here>(warp, args.here_flag(context.epoch, peer, args.comm.rank), context.epoch, 0);
    }
    for (uint32_t i = 0; i < args.comm.num_ranks; ++i) {
        const uint32_t peer = args.comm.nth_peer(i);
        const uint64_t* flag = args.here_flag(context.epoch, args.comm.rank, peer);
        ok = traced_wait<ToyChannel::here, ToyEvent::wait_here>(context, flag, peer).ok && ok;
    }
    for (uint32_t token = 0; ok && token < args.num_tokens; ++token) {
        TK_RANGE(context.recorder, ToyEvent::copy_token, token);
        const uint64_t at = uint64_t{token} * args.shape.row_bytes();
        copy_row(warp, args.out + at, args.x + at, args.shape.row_bytes());
    }
    warp.leader([&] { args.state->epoch = next_epoch(context.epoch); });
}

}  // namespace tracekern
