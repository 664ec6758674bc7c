// What the kernels share: how a call begins, how slots of the rings between nodes are given back, and how it ends.
#pragma once

#include "comm/counter.h"
#include "moe/rows.h"
#include "moe/two_hop/put.h"

namespace tracekern {

// The tokens of the channel.
template <class Rec, class Comm>
TK_DEVICE TaskRange own_tokens(const TwoHopContext<Rec, Comm>& context) {
    return TaskRange::of(context.args.call.num_tokens, context.args.num_channels, context.channel());
}

// One load, as many stores as there are targets.
TK_DEVICE void copy_to_targets(
    Warp& warp, char* const* targets, uint32_t num_targets, const char* row, uint32_t bytes) {
    constexpr uint32_t kColumns = 5;  // UNROLLED_WARP_COPY(5)
    const auto* values = reinterpret_cast<const Vector16*>(row);
    for_columns<kColumns>(warp, bytes / sizeof(Vector16), [&](const Columns<kColumns>& columns) {
        Vector16 units[kColumns];
        columns.load(units, values);
        TK_NO_UNROLL
        for (uint32_t i = 0; i < num_targets; ++i) columns.store(reinterpret_cast<Vector16*>(targets[i]), units);
    });
}

// Whether a handle's dispatch brought more than there was memory for, which cannot be given back or sent again. If so,
// refuses the call before anything is read.
template <class Rec, class Comm>
TK_DEVICE bool lacks_rows(TwoHopContext<Rec, Comm>& context) {
    const TwoHopCall& call = context.args.call;
    const NodeShape& nodes = context.args.nodes;
    if (!call.told) return false;
    const auto num_rows = static_cast<uint32_t>(call.recv_gbl_rank_prefix_sum[nodes.num_ranks() - 1]);
    const auto num_forwarded = static_cast<uint32_t>(call.recv_rdma_rank_prefix_sum[nodes.num_nodes - 1]);
    if (num_rows <= call.recv_capacity && num_forwarded <= call.forward_capacity) return false;
    const uint32_t most = num_rows > num_forwarded ? num_rows : num_forwarded;
    const bool can_be = most <= context.args.shape.num_ranks * context.args.shape.max_tokens;
    context.refuse(can_be ? TwoHopRefusal::overflow : TwoHopRefusal::out_of_bounds, most);
    return true;
}

// Whether some rank gave up. Behind a notify that did, peers may still read what this kernel would write over, and
// would take it for theirs. Of this rank's notify all warps see that. Where another rank gave up some may not; they
// learn it from a wait. Or whether this rank has to give up.
template <class Rec, class Comm>
TK_DEVICE bool is_called_off(TwoHopContext<Rec, Comm>& context) {
    const WaitFor nobody{context.stage, context.comm.rank, context.channel()};
    return gives_up_with_others(context.warp, context.comm, channel_number(TwoHopChannel::counts), nobody) ||
           lacks_rows(context);
}

// ---- that a call is over at others, so that the next one may write over what they read ----
//
// A rank raises a flag at all that write to it, those of its place in every node and the peers of its own, when its
// kernels of call e - 1 have ended: with its counts in notify_dispatch of call e, or, where no counts are needed, in
// the first block of the kernel itself. Who writes first to a rank in call e waits for that flag. Credits need no wait:
// they answer what has come from there. Flags are there twice, for even epochs and for odd ones, as what comes with
// them is.
//
// Their value is TwoHopCall::told: two ranks that write to each other learn it first if they make different calls, or
// have handles of different dispatches. Flags join all ranks, so that no difference is between others alone.

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

// In a call without notify: tells others that the call before is over. All warps; those of the first block do it. Where
// one gives up others learn that from their waits.
template <class Rec, class Comm>
TK_DEVICE void tell_from_first_block(TwoHopContext<Rec, Comm>& context) {
    const TwoHopArgs<Comm>& args = context.args;
    if (!args.call.told || context.warp.block != 0 || !wait_puts(context)) return;
    const uint32_t num_nodes = args.nodes.num_nodes, parity = parity_of(context);
    for_share_of_warp(context.warp, num_nodes == 1 ? 0 : num_nodes, args.node(), [&](uint32_t node) {
        const uint32_t rank = args.rank_in(node);
        TK_SIGNAL(context.recorder, TwoHopEvent::signal_counts, rank);
        put_to_node<TwoHopChannel::counts>(context,
                                           node,
                                           {.kind = PutKind::count, .n = 1},
                                           args.counts_flag(parity, args.node()),
                                           args.call.told,
                                           {.src = args.call.told,
                                            .dst = args.counts_at(parity, args.node()),
                                            .bytes = sizeof(uint64_t),
                                            .carries_value = true});
    });
    for_share_of_warp(context.warp, args.nodes.peers, args.peer(), [&](uint32_t peer) {
        const uint32_t rank = args.neighbour(peer);
        TK_SIGNAL(context.recorder, TwoHopEvent::signal_peer_counts, rank);
        auto* flag = context.comm.template at<uint64_t>(rank, args.peer_counts_flag(parity, args.peer()));
        signal_peer<TwoHopChannel::peer_counts>(context, rank, flag, args.call.told);
    });
}

// Waits until the call before is over at a peer, or at the node's rank of this place, and what was sent there is no
// longer read. Behind a notify it is.
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
        const auto* flag = args.template from_node<uint64_t>(node, args.counts_flag(parity_of(context), node));
        const WaitFor whom = wait_for(context, rank);
        const WaitResult came = wait<TwoHopChannel::counts>(context.warp, context.comm, flag, context.epoch, whom);
        return WaitResult{makes_same_call(context, rank, came), 0};
    };
    return record_wait<TwoHopEvent::wait_counts>(context, wait_now, rank).ok && wait_puts(context);
}

// ---- rings, and the end ----

// Gives the slots before `head` back to the node's rank of this place. Released: what was read from them, which its
// readers released to this warp. A later head may overtake it.
template <class Rec, class Comm>
TK_DEVICE void return_credit(TwoHopContext<Rec, Comm>& context, uint32_t node, uint32_t head) {
    const TwoHopArgs<Comm>& args = context.args;
    const uint32_t channel = context.channel(), rank = args.rank_in(node);
    TK_SIGNAL(context.recorder, TwoHopEvent::return_credit, rank, channel, head + args.rings.rdma_slots);
    const Immediate imm{.kind = PutKind::head, .which = channel, .n = head};
    put_to_node<TwoHopChannel::head>(context, node, imm, args.head_flag(channel, args.node()), head);
}

// The last warp of all leaves the state as the next call wants to find it: every other has read the epoch.
template <class Rec, class Comm>
TK_DEVICE void end_call(TwoHopContext<Rec, Comm>& context) {
    Warp& warp = context.warp;
    TwoHopState& state = *context.args.state;
    const uint64_t done = take_ticket<CommChannel::grid>(warp, &state.warps_done.word);
    if (done != uint64_t{warp.num_blocks} * warp.num_warps - 1) return;
    warp.leader([&] {
        state.warps_done.word = 0;
        state.epoch.word = next_epoch(context.epoch);
    });
}

}  // namespace tracekern
