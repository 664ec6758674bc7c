// Combine: what the experts' ranks made of their rows goes back the way that tokens came, and is added up on it. Two
// blocks have a channel, one that sends and receives and one that adds up for other nodes. Who waits for whom, and why
// that ends: docs/two_hop.md.
#pragma once

#include "moe/two_hop/dispatch.h"
#include "moe/two_hop/notify.h"
#include "moe/two_hop/return_sender.h"
#include "moe/two_hop/token_reducer.h"

namespace tracekern {

struct ReturnSenderWarps {
    TK_DEVICE static bool has(const Warp& warp, const OwnPart&) {
        return !is_forwarder_block(warp) && warp.warp < peers_of_block(warp);
    }
};
struct TokenReducerWarps {
    TK_DEVICE static bool has(const Warp& warp, const OwnPart&) {
        return !is_forwarder_block(warp) && warp.warp >= peers_of_block(warp) && warp.warp + 1 < warp.num_warps;
    }
};
struct ReceiverCoordinatorWarp {
    TK_DEVICE static bool has(const Warp& warp, const OwnPart&) {
        return !is_forwarder_block(warp) && warp.warp + 1 == warp.num_warps;
    }
};
struct NodeReducerWarps {
    TK_DEVICE static bool has(const Warp& warp, const OwnPart&) { return is_forwarder_block(warp); }
};

struct SendBack {
    template <class Rec, class Comm>
    TK_DEVICE static bool run(TwoHopContext<Rec, Comm>& context, Share) {
        const Warp& warp = context.warp;
        const uint32_t peer = (warp.warp + context.channel()) % peers_of_block(warp);
        return ReturnSender<Rec, Comm>(context, peer).run();
    }
};
struct ReduceTokens {
    template <class Rec, class Comm>
    TK_DEVICE static bool run(TwoHopContext<Rec, Comm>& context, Share) {
        const Warp& warp = context.warp;
        return TokenReducer<Rec, Comm>(context, warp.warp - peers_of_block(warp)).run();
    }
};
struct ReturnSlots {
    template <class Rec, class Comm>
    TK_DEVICE static bool run(TwoHopContext<Rec, Comm>& context, Share) {
        return ReceiverCoordinator<Rec, Comm>(context).run();
    }
};
struct SumInNode {
    template <class Rec, class Comm>
    TK_DEVICE static bool run(TwoHopContext<Rec, Comm>& context, Share) {
        const Teams teams = Teams::of(context.warp, context.args.nodes.num_nodes);
        const bool has_node = teams.team_of(context.warp.warp) < context.args.nodes.num_nodes;
        return !has_node || NodeReducer<Rec, Comm, false>(context, teams).run();
    }
};

static_assert(kNumReceivers == kNumSenders);  // a block has as many warps as in dispatch
using CombineRoles = RoleTable<EveryBlock,
                               Role<TwoHopRole::nvl_sender, ReturnSenderWarps, SendBack>,
                               Role<TwoHopRole::rdma_receiver, TokenReducerWarps, ReduceTokens>,
                               Role<TwoHopRole::receiver_coordinator, ReceiverCoordinatorWarp, ReturnSlots>,
                               Role<TwoHopRole::node_reducer, NodeReducerWarps, SumInNode>>;

// All peers and the ranks of this place have ended the call before: this one may write where they read. The flags are
// those of notify_dispatch, without counts.
template <class Comm>
struct TwoHopCachedNotify {
    using Args = TwoHopArgs<Comm>;
    static constexpr TwoHopStage kStage = TwoHopStage::cached_notify;
    static constexpr uint32_t kMaxThreads = 32 * kMaxTeamWarps;

    static uint64_t shared_bytes(const Args&, uint32_t) { return 0; }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const Args& args, typename Rec::Args trace) {
        TwoHopContext<Rec, Comm> context(warp, args, trace, kStage, TwoHopRole::notify);
        const uint32_t num_nodes = args.nodes.num_nodes, peers = args.nodes.peers, parity = parity_of(context);
        for_share_of_warp(warp, num_nodes, args.node(), [&](uint32_t node) {
            const uint32_t rank = args.rank_in(node);
            TK_SIGNAL(context.recorder, TwoHopEvent::signal_counts, rank);
            with_peer(context.comm, rank, [&](const auto& to) {
                put_signal<TwoHopChannel::counts>(
                    warp, to, 0, nullptr, 0, args.counts_flag(parity, args.node()), context.epoch, 0);
            });
        });
        tell_peers(context);
        for_share_of_warp(warp, num_nodes, args.node(), [&](uint32_t node) {
            const uint32_t rank = args.rank_in(node);
            const auto wait_now = [&] {
                const auto* flag = args.template own<uint64_t>(args.counts_flag(parity, node));
                const WaitFor whom = wait_for(context, rank);
                return WaitResult{wait<TwoHopChannel::counts>(warp, context.comm, flag, context.epoch, whom).ok, 0};
            };
            record_wait<TwoHopEvent::wait_counts>(context, wait_now, rank);
        });
        for_share_of_warp(warp, peers, args.peer(), [&](uint32_t peer) { wait_peer_counts(context, peer); });
    }
};

template <class Comm>
struct TwoHopCombine {
    using Args = TwoHopArgs<Comm>;
    static constexpr TwoHopStage kStage = TwoHopStage::combine;
    static constexpr uint32_t kMaxThreads = 512;

    static uint64_t shared_bytes(const Args&, uint32_t) {
        return sizeof(TokenReducerShared) > sizeof(NodeReducerShared) ? sizeof(TokenReducerShared)
                                                                      : sizeof(NodeReducerShared);
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const Args& args, typename Rec::Args trace) {
        const CombineRoles roles(warp);
        TwoHopContext<Rec, Comm> context(warp, args, trace, kStage, roles.name());
        // Those that take tokens in turns begin with the first one of theirs.
        if (is_forwarder_block(warp)) {
            auto& shared = warp.template shared<NodeReducerShared>();
            clear_turns(context, shared.summed, Teams::of(warp, args.nodes.num_nodes));
        } else {
            auto& shared = warp.template shared<TokenReducerShared>();
            warp.block_strided(kNumReceivers, [&](uint32_t i) { shared.reduced[i] = make_flag(context.epoch, i); });
        }
        warp.block_sync();
        if (!is_called_off(context)) roles.run(context);
        end_call(context);
    }
};

}  // namespace tracekern
