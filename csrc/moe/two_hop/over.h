// That a call is over at others, so that the next one may write over what they read.
//
// A rank raises a flag at all that write to it, those of its place in every node and the peers of its own, when its
// kernels of call e - 1 have ended: with its counts in notify_dispatch of call e, or, where no counts are needed, in
// the first block of the kernel itself. Who writes first to a rank in call e waits for that flag. Credits need no wait:
// they answer what has come from there. Flags are there twice, for even epochs and for odd ones, as what comes with
// them is.
//
// Their value is TwoHopCall::told: two ranks that write to each other learn it first if they make different calls, or
// have handles of different dispatches. Flags join all ranks, so that no difference is between others alone.
#pragma once

#include "moe/two_hop/call.h"

namespace tracekern {

template <class Rec, class Comm>
TK_DEVICE uint32_t parity_of(const TwoHopContext<Rec, Comm>& context) {
    return static_cast<uint32_t>(context.epoch % 2);
}

// Calls visit(i) for this warp's share of i below `count`, beginning with `first`.
template <class Visit>
TK_DEVICE void for_share_of_warp(const Warp& warp, uint32_t count, uint32_t first, Visit visit) {
    for (uint32_t i = warp.warp; i < count; i += warp.num_warps) visit((first + i) % count);
}

// Whether `rank` has come, and makes the same call as this rank. If it makes another one, refuses the call.
template <class Rec, class Comm>
TK_DEVICE bool makes_same_call(const TwoHopContext<Rec, Comm>& context, uint32_t rank, const WaitResult& came) {
    if (came.ok && came.value != context.args.call.told) context.refuse(TwoHopRefusal::other_call, rank);
    return came.ok && came.value == context.args.call.told;
}

template <class Rec, class Comm>
TK_DEVICE bool wait_peer_counts(TwoHopContext<Rec, Comm>& context, uint32_t peer) {
    const TwoHopArgs<Comm>& args = context.args;
    const uint32_t rank = args.neighbour(peer);
    const auto* flag = args.template own<uint64_t>(args.peer_counts_flag(parity_of(context), peer));
    const WaitResult came = traced_wait<TwoHopChannel::peer_counts, TwoHopEvent::wait_peer_counts>(context, flag, rank);
    return makes_same_call(context, rank, came);
}

// In a call without notify: tells others that the call before is over. All warps; those of the first block do it.
template <class Rec, class Comm>
TK_DEVICE void tell_from_first_block(TwoHopContext<Rec, Comm>& context) {
    const TwoHopArgs<Comm>& args = context.args;
    if (!args.call.told || context.warp.block != 0) return;
    const uint32_t num_nodes = args.nodes.num_nodes, parity = parity_of(context);
    for_share_of_warp(context.warp, num_nodes == 1 ? 0 : num_nodes, args.node(), [&](uint32_t node) {
        const uint32_t rank = args.rank_in(node);
        TK_SIGNAL(context.recorder, TwoHopEvent::signal_counts, rank);
        with_peer(context.comm, rank, [&](const auto& to) {
            const uint64_t flag = args.counts_flag(parity, args.node());
            put_signal<TwoHopChannel::counts>(context.warp, to, 0, nullptr, 0, flag, context.epoch, args.call.told);
        });
    });
    for_share_of_warp(context.warp, args.nodes.peers, args.peer(), [&](uint32_t peer) {
        const uint32_t rank = args.neighbour(peer);
        TK_SIGNAL(context.recorder, TwoHopEvent::signal_peer_counts, rank);
        auto* flag = context.comm.template at<uint64_t>(rank, args.peer_counts_flag(parity, args.peer()));
        signal_peer<TwoHopChannel::peer_counts>(context, rank, flag, args.call.told);
    });
}

// Waits until the call before is over at a peer, or at the node's rank of this place. Behind a notify it is.
template <class Rec, class Comm>
TK_DEVICE bool wait_peer_over(TwoHopContext<Rec, Comm>& context, uint32_t peer) {
    return !context.args.call.told || wait_peer_counts(context, peer);
}
template <class Rec, class Comm>
TK_DEVICE bool wait_node_over(TwoHopContext<Rec, Comm>& context, uint32_t node) {
    const TwoHopArgs<Comm>& args = context.args;
    if (!args.call.told) return true;
    const uint32_t rank = args.rank_in(node);
    const auto wait_now = [&] {
        const auto* flag = args.template own<uint64_t>(args.counts_flag(parity_of(context), node));
        const WaitFor whom = wait_for(context, rank);
        const WaitResult came = wait<TwoHopChannel::counts>(context.warp, context.comm, flag, context.epoch, whom);
        return WaitResult{makes_same_call(context, rank, came), 0};
    };
    return record_wait<TwoHopEvent::wait_counts>(context, wait_now, rank).ok;
}

}  // namespace tracekern
