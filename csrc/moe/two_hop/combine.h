// Combine: what the experts' ranks made of their rows goes back the way that tokens came, and is added up on it. Two
// blocks have a channel, one that sends and receives and one that adds up for other nodes. Who waits for whom, and why
// that ends: docs/two_hop.md.
#pragma once

#include "moe/two_hop/dispatch.h"
#include "moe/two_hop/notify.h"
#include "moe/two_hop/return_sender.h"
#include "moe/two_hop/token_reducer.h"

namespace tracekern {

// Shared memory of a block that sends. The token reducers, which find theirs at its beginning, are the warps that send
// in dispatch, with their coordinator: so a block has as many warps as there.
struct CombineShared {
    TokenReducerShared reducers;
    NodeTurnFlags returned;
};
static_assert(kNumReceivers == kNumSenders);

template <class Comm>
struct TwoHopCombine {
    using Args = TwoHopArgs<Comm>;
    static constexpr TwoHopStage kStage = TwoHopStage::combine;
    static constexpr uint32_t kMaxThreads = 512;

    static uint64_t shared_bytes(const Args&, uint32_t) {
        return sizeof(CombineShared) > sizeof(NodeReducerShared) ? sizeof(CombineShared) : sizeof(NodeReducerShared);
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const Args& args, typename Rec::Args trace) {
        const BlockTeams block = BlockTeams::of(warp, args);
        TwoHopContext<Rec, Comm> context(warp, args, trace, kStage, role_of(warp.warp, block));
        // Those that take tokens in turns begin with the first one of theirs.
        if (block.is_forwarder) {
            clear_turns(context, warp.template shared<NodeReducerShared>().summed, block.teams);
        } else {
            auto& shared = warp.template shared<CombineShared>();
            clear_turns(context, shared.returned, block.teams);
            warp.block_strided(kNumReceivers,
                               [&](uint32_t i) { shared.reducers.reduced[i] = make_flag(context.epoch, i); });
        }
        warp.block_sync();
        if (!is_called_off(context)) {
            tell_from_first_block(context);
            run_role(context, block.teams);
        }
        end_call(context);
    }

private:
    TK_DEVICE static TwoHopRole role_of(uint32_t warp, const BlockTeams& block) {
        if (!block.is_forwarder && warp < kNumReceivers) return TwoHopRole::rdma_receiver;
        if (!block.is_forwarder && warp == kNumReceivers) return TwoHopRole::receiver_coordinator;
        if (!block.has(warp)) return TwoHopRole::spare;
        if (block.is_forwarder) return TwoHopRole::node_reducer;
        return block.teams.place_of(warp).is_worker() ? TwoHopRole::nvl_sender : TwoHopRole::sender_coordinator;
    }

    template <class Rec>
    TK_DEVICE static void run_role(TwoHopContext<Rec, Comm>& context, const Teams& teams) {
        Warp& warp = context.warp;
        switch (context.role) {
            case TwoHopRole::rdma_receiver:
                TokenReducer<Rec, Comm>(context, warp.warp).run();
                break;
            case TwoHopRole::receiver_coordinator:
                ReceiverCoordinator<Rec, Comm>(context).run();
                break;
            case TwoHopRole::nvl_sender:
            case TwoHopRole::sender_coordinator:
                ReturnSender<Rec, Comm>(context,
                                        warp.template shared<CombineShared>().returned,
                                        teams,
                                        peer_of_team(warp, context.args, teams))
                    .run();
                break;
            case TwoHopRole::node_reducer:
                NodeReducer<Rec, Comm, false>(context, teams).run();
                break;
            default:  // spare
                break;
        }
    }
};

}  // namespace tracekern
