// Dispatch and combine on one node, where rows go straight into the rings of peers. Two blocks have a channel, one that
// sends and one that receives. Every wait ends: receivers and reducers wait for rows alone, so those that they were
// told of are read, and a sender gets room.
#pragma once

#include "moe/two_hop/combine.h"
#include "moe/two_hop/peer_sender.h"
#include "moe/two_hop/receiver.h"

namespace tracekern {

template <class Comm>
struct TwoHopOneNodeDispatch {
    using Args = TwoHopArgs<Comm>;
    static constexpr TwoHopStage kStage = TwoHopStage::dispatch;
    static constexpr uint32_t kMaxThreads = 32 * kMaxTeamWarps;

    static uint64_t shared_bytes(const Args&, uint32_t) {
        static_assert(sizeof(NodeTurnFlags) >= sizeof(TurnFlags));
        return sizeof(NodeTurnFlags);
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const Args& args, typename Rec::Args trace) {
        const Teams teams = Teams::of(warp, args.nodes.peers);
        TwoHopContext<Rec, Comm> context(warp, args, trace, kStage, role_of(warp, teams));
        const bool is_off = is_called_off(context);
        if (!is_off) tell_from_first_block(context);
        const bool is_sender = is_forwarder_block(warp);
        if (is_sender) {
            clear_turns(context, warp.template shared<TurnFlags>(), teams);
        } else {
            clear_turns(context, warp.template shared<NodeTurnFlags>(), teams);
        }
        warp.block_sync();
        const uint32_t peer = peer_of_team(warp, args, teams);
        if (is_off) {
        } else if (is_sender) {
            PeerSender<Rec, Comm>(context, teams, peer).run();
        } else {
            Receiver<Rec, Comm>(context, warp.template shared<NodeTurnFlags>(), teams, peer).run();
        }
        end_call(context);
    }

private:
    TK_DEVICE static TwoHopRole role_of(const Warp& warp, const Teams& teams) {
        if (is_forwarder_block(warp)) {
            return teams.place_of(warp.warp).is_coordinator() ? TwoHopRole::forwarder_coordinator
                                                              : TwoHopRole::forwarder;
        }
        return teams.place_of(warp.warp).is_coordinator() ? TwoHopRole::receiver_coordinator : TwoHopRole::nvl_receiver;
    }
};

template <class Comm>
struct TwoHopOneNodeCombine {
    using Args = TwoHopArgs<Comm>;
    static constexpr TwoHopStage kStage = TwoHopStage::combine;
    static constexpr uint32_t kMaxThreads = 32 * kMaxTeamWarps;

    static uint64_t shared_bytes(const Args&, uint32_t) {
        static_assert(sizeof(NodeReducerShared) >= sizeof(NodeTurnFlags));
        return sizeof(NodeReducerShared);
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const Args& args, typename Rec::Args trace) {
        const bool is_reducer = is_forwarder_block(warp);
        const Teams teams = Teams::of(warp, is_reducer ? 1 : args.nodes.peers);
        TwoHopContext<Rec, Comm> context(warp, args, trace, kStage, role_of(warp, teams));
        const bool is_off = is_called_off(context);
        if (!is_off) tell_from_first_block(context);
        auto& returned = warp.template shared<NodeTurnFlags>();
        if (is_reducer) {
            clear_turns(context, warp.template shared<NodeReducerShared>().summed, teams);
        } else {
            clear_turns(context, returned, teams);
        }
        warp.block_sync();
        const uint32_t peer = peer_of_team(warp, args, teams);
        if (is_off) {
        } else if (is_reducer) {
            NodeReducer<Rec, Comm, true>(context, teams).run();
        } else {
            ReturnSender<Rec, Comm>(context, returned, teams, peer).run();
        }
        end_call(context);
    }

private:
    TK_DEVICE static TwoHopRole role_of(const Warp& warp, const Teams& teams) {
        if (is_forwarder_block(warp)) return TwoHopRole::node_reducer;
        return teams.place_of(warp.warp).is_coordinator() ? TwoHopRole::sender_coordinator : TwoHopRole::nvl_sender;
    }
};

}  // namespace tracekern
