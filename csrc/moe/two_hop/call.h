// What the kernels share that move rows, dispatch and combine: when they are called off, how slots of the rings between
// nodes are given back, and how a call ends.
#pragma once

#include "comm/counter.h"
#include "comm/put.h"
#include "moe/rows.h"
#include "moe/two_hop/layout.h"

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

// Gives the slots before `head` back to the node's rank of this place. Released: what was read from them, which its
// readers released to this warp. A later head may overtake it.
template <class Rec, class Comm>
TK_DEVICE void return_credit(TwoHopContext<Rec, Comm>& context, uint32_t node, uint32_t head) {
    const TwoHopArgs<Comm>& args = context.args;
    const uint32_t channel = context.channel(), rank = args.rank_in(node);
    TK_SIGNAL(context.recorder, TwoHopEvent::return_credit, rank, channel, head + args.rings.rdma_slots);
    with_peer(context.comm, rank, [&](const auto& to) {
        signal_max<TwoHopChannel::head>(context.warp, to, args.head_flag(channel, args.node()), context.epoch, head);
    });
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
