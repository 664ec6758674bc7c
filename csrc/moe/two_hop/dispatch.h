// Dispatch: each token goes once to each node that wants it, and there to each rank that does. Two blocks have a
// channel, one that sends and receives and one that forwards. Who waits for whom, and why that ends: docs/two_hop.md.
#pragma once

#include "moe/two_hop/call.h"
#include "moe/two_hop/forwarder.h"
#include "moe/two_hop/receiver.h"
#include "moe/two_hop/sender.h"

namespace tracekern {

// Warps of a block by the design: 7 senders, their coordinator, and a receiver for each peer. A block that forwards has
// as many, of which peers + 1 have a role. On one node they are teams for the peers.
TK_HOST_DEVICE constexpr uint32_t two_hop_warps(uint32_t num_nodes, uint32_t peers) {
    return num_nodes == 1 ? kMaxTeamWarps : kNumSenders + 1 + peers;
}
TK_DEVICE uint32_t peers_of_block(const Warp& warp) {
    return warp.num_warps - kNumSenders - 1;
}
TK_DEVICE bool is_forwarder_block(const Warp& warp) {
    return warp.block % 2 == 0;
}
// The peer that a forwarder or a receiver is for: the first of their warps begins with another one in each channel, so
// that not all go for the same peer at once.
TK_DEVICE uint32_t target_peer(const Warp& warp) {
    const uint32_t turned = warp.warp + warp.block / 2;
    return (is_forwarder_block(warp) ? turned : turned - kNumSenders) % peers_of_block(warp);
}

struct SenderWarps {
    TK_DEVICE static bool has(const Warp& warp, const OwnPart&) {
        return !is_forwarder_block(warp) && warp.warp < kNumSenders;
    }
};
struct SenderCoordinatorWarp {
    TK_DEVICE static bool has(const Warp& warp, const OwnPart&) {
        return !is_forwarder_block(warp) && warp.warp == kNumSenders;
    }
};
struct ReceiverWarps {
    TK_DEVICE static bool has(const Warp& warp, const OwnPart&) {
        return !is_forwarder_block(warp) && warp.warp > kNumSenders;
    }
};
struct ForwarderWarps {
    TK_DEVICE static bool has(const Warp& warp, const OwnPart&) {
        return is_forwarder_block(warp) && warp.warp < peers_of_block(warp);
    }
};
struct ForwarderCoordinatorWarp {
    TK_DEVICE static bool has(const Warp& warp, const OwnPart&) {
        return is_forwarder_block(warp) && warp.warp == peers_of_block(warp);
    }
};

struct ReceiveTokens {
    template <class Rec, class Comm>
    TK_DEVICE static bool run(TwoHopContext<Rec, Comm>& context, Share) {
        return Receiver<Rec, Comm>(context, target_peer(context.warp)).run();
    }
};
struct ForwardTokens {
    template <class Rec, class Comm>
    TK_DEVICE static bool run(TwoHopContext<Rec, Comm>& context, Share) {
        return Forwarder<Rec, Comm>(context, target_peer(context.warp)).run();
    }
};
struct ReturnCredits {
    template <class Rec, class Comm>
    TK_DEVICE static bool run(TwoHopContext<Rec, Comm>& context, Share) {
        return ForwarderCoordinator<Rec, Comm>(context).run();
    }
};

using DispatchRoles = RoleTable<EveryBlock,
                                Role<TwoHopRole::rdma_sender, SenderWarps, SendTokens>,
                                Role<TwoHopRole::sender_coordinator, SenderCoordinatorWarp, CoordinateSends>,
                                Role<TwoHopRole::nvl_receiver, ReceiverWarps, ReceiveTokens>,
                                Role<TwoHopRole::forwarder, ForwarderWarps, ForwardTokens>,
                                Role<TwoHopRole::forwarder_coordinator, ForwarderCoordinatorWarp, ReturnCredits>,
                                Role<TwoHopRole::spare, AllWarps>>;

// All positions at 0, and the lock with the channel's first token. All warps of a block.
template <class Rec, class Comm>
TK_DEVICE void clear_shared(TwoHopContext<Rec, Comm>& context) {
    Warp& warp = context.warp;
    const TwoHopArgs<Comm>& args = context.args;
    if (is_forwarder_block(warp)) {
        auto* words = reinterpret_cast<uint64_t*>(&warp.template shared<ForwarderShared>());
        constexpr uint32_t kNumWords = sizeof(ForwarderShared) / sizeof(uint64_t);
        warp.block_strided(kNumWords, [&](uint32_t i) { words[i] = make_flag(kNeverEpoch, 0); });
    } else {
        auto& shared = warp.template shared<SenderShared>();
        const bool is_at_0 = does_as_published(TwoHopChannel::lock);
        const TaskRange range = TaskRange::of(args.call.num_tokens, args.num_channels, context.channel());
        warp.block_strided(kMaxTwoHopNodes, [&](uint32_t node) {
            shared.rdma_send_channel_tail[node] = make_flag(kNeverEpoch, 0);
            shared.next_tail[node] = 0;
            if (node == 0) shared.rdma_send_next_token_idx = make_flag(context.epoch, is_at_0 ? 0 : range.begin);
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
        return sizeof(SenderShared) > sizeof(ForwarderShared) ? sizeof(SenderShared) : sizeof(ForwarderShared);
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const Args& args, typename Rec::Args trace) {
        const DispatchRoles roles(warp);
        TwoHopContext<Rec, Comm> context(warp, args, trace, kStage, roles.name());
        clear_shared(context);
        if (!is_called_off(context)) roles.run(context);
        end_call(context);
    }
};

}  // namespace tracekern
