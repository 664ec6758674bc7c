// Dispatch and combine on one node, where rows go straight into the rings of peers. Two blocks have a channel, one that
// sends and one that receives. Every wait ends: receivers and reducers wait for rows alone, so those that they were
// told of are read, and a sender gets room.
//
// A rank writes to a peer when that has ended the call before, and said so with a flag: in notify_dispatch, or, of a
// call that needs no counts, in the first block of the kernel itself. Receivers and reducers write to none before it
// has sent them rows.
#pragma once

#include "moe/two_hop/combine.h"
#include "moe/two_hop/peer_sender.h"
#include "moe/two_hop/receiver.h"

namespace tracekern {

// The team's peer: the first team begins with another one in each channel, so that not all go for the same at once.
template <class Args>
TK_DEVICE uint32_t peer_of_team(const Warp& warp, const Args& args, const Teams& teams) {
    return (teams.team_of(warp.warp) + warp.block / 2) % args.nodes.peers;
}

template <class Rec, class Comm>
TK_DEVICE void tell_from_first_block(TwoHopContext<Rec, Comm>& context) {
    if (context.args.call.tells_peers && context.warp.block == 0) tell_peers(context);
}

template <class Comm>
struct TwoHopOneNodeDispatch {
    using Args = TwoHopArgs<Comm>;
    static constexpr TwoHopStage kStage = TwoHopStage::dispatch;
    static constexpr uint32_t kMaxThreads = 32 * kMaxTeamWarps;

    static uint64_t shared_bytes(const Args&, uint32_t) { return sizeof(TurnFlags); }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const Args& args, typename Rec::Args trace) {
        const Teams teams = Teams::of(warp, args.nodes.peers);
        TwoHopContext<Rec, Comm> context(warp, args, trace, kStage, role_of(warp, teams));
        const bool is_off = is_called_off(context);
        if (!is_off) tell_from_first_block(context);
        clear_turns(context, warp.template shared<TurnFlags>(), teams);
        warp.block_sync();
        const uint32_t peer = peer_of_team(warp, args, teams);
        if (is_off) {
        } else if (is_forwarder_block(warp)) {
            PeerSender<Rec, Comm, false>(context, teams, peer).run();
        } else {
            Receiver<Rec, Comm>(context, peer).run(teams);
        }
        end_call(context);
    }

private:
    TK_DEVICE static TwoHopRole role_of(const Warp& warp, const Teams& teams) {
        if (is_forwarder_block(warp)) {
            return teams.is_coordinator(warp.warp) ? TwoHopRole::forwarder_coordinator : TwoHopRole::forwarder;
        }
        return teams.is_coordinator(warp.warp) ? TwoHopRole::receiver_coordinator : TwoHopRole::nvl_receiver;
    }
};

template <class Comm>
struct TwoHopOneNodeCombine {
    using Args = TwoHopArgs<Comm>;
    static constexpr TwoHopStage kStage = TwoHopStage::combine;
    static constexpr uint32_t kMaxThreads = 32 * kMaxTeamWarps;

    static uint64_t shared_bytes(const Args&, uint32_t) {
        static_assert(sizeof(NodeReducerShared) >= sizeof(TurnFlags));
        return sizeof(NodeReducerShared);
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const Args& args, typename Rec::Args trace) {
        const bool is_reducer = is_forwarder_block(warp);
        const Teams teams = Teams::of(warp, is_reducer ? 1 : args.nodes.peers);
        TwoHopContext<Rec, Comm> context(warp, args, trace, kStage, role_of(warp, teams));
        const bool is_off = is_called_off(context);
        if (!is_off) tell_from_first_block(context);
        clear_turns(context,
                    is_reducer ? warp.template shared<NodeReducerShared>().summed : warp.template shared<TurnFlags>(),
                    teams);
        warp.block_sync();
        if (is_off) {
        } else if (is_reducer) {
            NodeReducer<Rec, Comm, true>(context, teams).run();
        } else {
            PeerSender<Rec, Comm, true>(context, teams, peer_of_team(warp, args, teams)).run();
        }
        end_call(context);
    }

private:
    TK_DEVICE static TwoHopRole role_of(const Warp& warp, const Teams& teams) {
        if (is_forwarder_block(warp)) return TwoHopRole::node_reducer;
        return teams.is_coordinator(warp.warp) ? TwoHopRole::sender_coordinator : TwoHopRole::nvl_sender;
    }
};

}  // namespace tracekern
