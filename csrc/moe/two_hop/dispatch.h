// Dispatch: each token goes once to each node that wants it, and there to each rank that does. Two blocks have a
// channel, one that sends and receives and one that forwards. Who waits for whom, and why that ends: docs/two_hop.md.
#pragma once

#include "moe/two_hop/call.h"
#include "moe/two_hop/forwarder.h"
#include "moe/two_hop/receiver.h"
#include "moe/two_hop/sender.h"

namespace tracekern {

// A block that sends has kNumSenders, their coordinator, and a team for each peer: it receives in dispatch, and sends
// in combine. One that forwards has a team for each node.
constexpr uint32_t kFirstReceiver = kNumSenders + 1;

TK_DEVICE bool is_forwarder_block(const Warp& warp) {
    return warp.block % 2 == 0;
}
// The team's peer: the first team begins with another one in each channel, so that not all go for the same at once.
template <class Args>
TK_DEVICE uint32_t peer_of_team(const Warp& warp, const Args& args, const Teams& teams) {
    return (teams.team_of(warp.warp) + warp.block / 2) % args.nodes.peers;
}

// Shared memory of a block that sends. Senders find theirs at its beginning.
struct DispatchShared {
    SenderShared senders;
    NodeTurnFlags received;
};

// The teams of a warp's block.
struct BlockTeams {
    bool is_forwarder;
    Teams teams;
    uint32_t count;

    template <class Args>
    TK_DEVICE static BlockTeams of(const Warp& warp, const Args& args) {
        const uint32_t num_nodes = args.nodes.num_nodes, peers = args.nodes.peers;
        if (is_forwarder_block(warp)) return {true, Teams::of(warp, num_nodes), num_nodes};
        return {false, {kFirstReceiver, (warp.num_warps - kFirstReceiver) / peers}, peers};
    }
    // Not one of those that stand before the teams, nor left over.
    TK_DEVICE bool has(uint32_t warp) const { return warp >= teams.first && teams.team_of(warp) < count; }
};

// All positions at 0, and the lock with the channel's first token. All warps of a block.
template <class Rec, class Comm>
TK_DEVICE void clear_shared(TwoHopContext<Rec, Comm>& context, const Teams& teams) {
    Warp& warp = context.warp;
    const TwoHopArgs<Comm>& args = context.args;
    if (is_forwarder_block(warp)) {
        clear_turns(context, warp.template shared<ForwarderShared>().forwarded, teams);
    } else {
        auto& shared = warp.template shared<DispatchShared>();
        clear_turns(context, shared.received, teams);
        const bool is_at_0 = does_as_published(TwoHopChannel::lock);
        const TaskRange range = TaskRange::of(args.call.num_tokens, args.num_channels, context.channel());
        warp.block_strided(kMaxTwoHopNodes, [&](uint32_t node) {
            shared.senders.rdma_send_channel_tail[node] = make_flag(kNeverEpoch, 0);
            shared.senders.next_tail[node] = 0;
            for (uint32_t& place : shared.senders.next_place[node]) place = 0;
            if (node == 0)
                shared.senders.rdma_send_next_token_idx = make_flag(context.epoch, is_at_0 ? 0 : range.begin);
        });
    }
    warp.block_sync();
}

template <class Comm>
struct TwoHopDispatch {
    using Args = TwoHopArgs<Comm>;
    static constexpr TwoHopStage kStage = TwoHopStage::dispatch;
    static constexpr uint32_t kMaxThreads = 512;

    static uint64_t shared_bytes(const Args&, uint32_t) {
        return sizeof(DispatchShared) > sizeof(ForwarderShared) ? sizeof(DispatchShared) : sizeof(ForwarderShared);
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const Args& args, typename Rec::Args trace) {
        const BlockTeams block = BlockTeams::of(warp, args);
        TwoHopContext<Rec, Comm> context(warp, args, trace, kStage, role_of(warp.warp, block));
        clear_shared(context, block.teams);
        if (!is_called_off(context)) {
            tell_from_first_block(context);
            run_role(context, block.teams);
        }
        end_call(context);
    }

private:
    TK_DEVICE static TwoHopRole role_of(uint32_t warp, const BlockTeams& block) {
        if (!block.is_forwarder && warp < kNumSenders) return TwoHopRole::rdma_sender;
        if (!block.is_forwarder && warp == kNumSenders) return TwoHopRole::sender_coordinator;
        if (!block.has(warp)) return TwoHopRole::spare;
        const bool is_worker = block.teams.place_of(warp).is_worker();
        if (block.is_forwarder) return is_worker ? TwoHopRole::forwarder : TwoHopRole::forwarder_coordinator;
        return is_worker ? TwoHopRole::nvl_receiver : TwoHopRole::receiver_coordinator;
    }

    template <class Rec>
    TK_DEVICE static void run_role(TwoHopContext<Rec, Comm>& context, const Teams& teams) {
        Warp& warp = context.warp;
        switch (context.role) {
            case TwoHopRole::rdma_sender:
                send_tokens(context);
                break;
            case TwoHopRole::sender_coordinator:
                coordinate_sends(context);
                break;
            case TwoHopRole::nvl_receiver:
            case TwoHopRole::receiver_coordinator:
                Receiver<Rec, Comm>(context,
                                    warp.template shared<DispatchShared>().received,
                                    teams,
                                    peer_of_team(warp, context.args, teams))
                    .run();
                break;
            case TwoHopRole::forwarder:
            case TwoHopRole::forwarder_coordinator:
                Forwarder<Rec, Comm>(context, teams).run();
                break;
            default:  // spare
                break;
        }
    }
};

}  // namespace tracekern
