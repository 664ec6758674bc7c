// Dispatch: each token goes once to each node that wants it, and there to each rank that does. Two blocks have a
// channel, one that sends and receives and one that forwards. Who waits for whom, and why that ends: docs/two_hop.md.
#pragma once

#include "comm/signal.h"
#include "moe/two_hop/call.h"
#include "moe/two_hop/forwarder.h"
#include "moe/two_hop/sender.h"
#include "moe/two_hop/turns.h"

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

template <class Rec, class Comm>
class Receiver;

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

// Dispatch, second hop, at the destination: a team of warps for each peer of the node copies rows from its ring to
// where they belong in recv_x, and gives their slots back.
//
// A peer hands on tokens of the ranks of its place in all nodes. Rows of recv_x are in the order of those ranks, and of
// tokens; so are they in the part of the ring that is a node's. Warps take the rows of each node in turns, of whatever
// node some have come.
template <class Rec, class Comm>
class Receiver {
    using Context = TwoHopContext<Rec, Comm>;

public:
    TK_DEVICE Receiver(Context& context, NodeTurnFlags& flags, const Teams& teams, uint32_t source_peer)
        : context_(context),
          warp_(context.warp),
          args_(context.args),
          channel_(context.channel()),
          peer_(source_peer),
          rank_(context.args.neighbour(source_peer)),
          turns_(context, flags, teams, source_peer, TwoHopRing::nvl) {}

    TK_DEVICE bool run() {
        first_row_ = count_ = returned_ = warp_.lanes([](int) { return 0u; });
        for (uint32_t i = 0; i < args_.nodes.num_nodes; ++i) {
            if (!wait_prefix((args_.node() + i) % args_.nodes.num_nodes)) return false;
        }
        if (turns_.place().is_coordinator()) note_first_rows();
        if (turns_.place().is_worker()) return receive_rows();
        return turns_.follow(count_, [&](uint32_t node, uint32_t end) { return_credit(node, end); });
    }

private:
    // ---- which rows come ----

    // Waits for what the peer says of this channel and a node: its rows, and how many there are.
    TK_DEVICE bool wait_prefix(uint32_t node) {
        auto sums = warp_.lanes([](int) { return 0u; });
        const auto wait_now = [&] {
            const auto take = [&](uint32_t i, uint32_t value) { sums[static_cast<int>(i)] = value; };
            const auto* flags = args_.template own<uint64_t>(args_.prefix_flags(channel_, peer_, node));
            const RingWait whom = context_.ring_wait(TwoHopRing::nvl, rank_, 0, 0);
            return WaitResult{
                wait_all<TwoHopChannel::prefix>(warp_, context_.comm, flags, 2, context_.epoch, whom, take), 0};
        };
        if (!record_wait<TwoHopEvent::wait_prefix>(context_, wait_now, rank_, channel_, node).ok) return false;
        const uint32_t start = warp_.shuffle(sums, 0), end = warp_.shuffle(sums, 1);
        const uint32_t source = args_.nodes.rank_at(node, peer_);
        const auto before = static_cast<uint32_t>(source == 0 ? 0 : args_.call.recv_gbl_rank_prefix_sum[source - 1]);
        set_lane(warp_, first_row_, node, before + start);
        set_lane(warp_, count_, node, end - start);
        return context_.has_rows(uint64_t{before} + start, uint64_t{before} + end, args_.call.recv_capacity);
    }

    TK_DEVICE void note_first_rows() {
        warp_.each_lane([&](int lane) {
            const auto node = static_cast<uint32_t>(lane);
            if (node >= args_.nodes.num_nodes) return;
            const uint32_t source = args_.nodes.rank_at(node, peer_);
            args_.call.recv_gbl_channel_prefix_matrix[source * args_.num_channels + channel_] =
                static_cast<int32_t>(first_row_[lane]);
        });
    }

    // ---- those that copy ----

    TK_DEVICE bool receive_rows() {
        auto next = warp_.lanes([&](int) { return turns_.place().index; }), tail = warp_.lanes([](int) { return 0u; });
        for (uint32_t turn = channel_ % args_.nodes.num_nodes;;) {
            const uint32_t left = warp_.ballot([&](int lane) { return next[lane] < count_[lane]; });
            if (!left) return true;
            const uint32_t came = wait_peer_tail(left, next, tail, turn);
            if (!came) return false;
            const uint32_t node = first_in_turn(came, turn);
            const int lane_of_node = static_cast<int>(node);
            const uint64_t first_row = warp_.shuffle(first_row_, lane_of_node);
            const uint32_t count = warp_.shuffle(count_, lane_of_node), told = warp_.shuffle(tail, lane_of_node);
            // The tail says no more than is to come, unless a fault was planted.
            const uint32_t end = told < count ? told : count;
            uint32_t place = warp_.shuffle(next, lane_of_node);
            TK_NO_UNROLL
            do {
                receive_token(node, place, first_row + place);
                if (turns_.place().is_coordinator()) {
                    return_credit(node, place + 1);
                } else {
                    turns_.done(node, place);  // released: the slot was read
                }
                place += turns_.place().num_workers();
            } while (place < end);
            set_lane(warp_, next, node, place);
            turn = (node + 1) % args_.nodes.num_nodes;
        }
    }

    // The nodes of those in `left` of which the next row has come; 0: gave up. The span ends with the first of them.
    TK_DEVICE uint32_t wait_peer_tail(uint32_t left,
                                      const PerLane<uint32_t>& next,
                                      PerLane<uint32_t>& tail,
                                      uint32_t turn) {
        const auto has_row = [&](int lane) { return lane < 32 && left >> lane & 1 && next[lane] < tail[lane]; };
        if (const uint32_t came = warp_.ballot(has_row)) return came;
        const auto flag_of = [&](int lane) {
            return args_.template own<uint64_t>(args_.peer_tail_flag(channel_, peer_, static_cast<uint32_t>(lane)));
        };
        const auto least_of = [&](int lane) { return next[lane] + 1; };
        const uint32_t head = warp_.shuffle(next, static_cast<int>(first_in_turn(left, turn)));
        const RingWait whom = context_.ring_wait(TwoHopRing::nvl, rank_, head, head);
        TK_WAIT(context_.recorder, TwoHopEvent::wait_peer_tail, rank_, channel_);
        const Arrived came = wait_any_at_least<TwoHopChannel::peer_tail>(
            warp_, context_.comm, left, flag_of, context_.epoch, least_of, whom);
        const uint32_t node = first_in_turn(came.lanes, turn);
        TK_END_IF(came.lanes != 0, node, warp_.shuffle(next, static_cast<int>(node)) + 1);
        tail =
            warp_.lanes([&](int lane) { return lane < 32 && came.lanes >> lane & 1 ? came.value[lane] : tail[lane]; });
        return came.lanes;
    }

    TK_DEVICE void receive_token(uint32_t node, uint32_t place, uint64_t row) {
        const TwoHopCall& call = args_.call;
        const RowLayout& layout = args_.row;
        if (row >= call.recv_capacity) return;  // the host reads in moe_recv_counter how many there are
        TK_RANGE(context_.recorder,
                 TwoHopEvent::receive_token,
                 args_.nodes.rank_at(node, peer_),
                 place % args_.rings.part_slots);
        char* slot = args_.template own<char>(args_.nvl_row(channel_, peer_, node, place));
        copy_row(warp_, call.recv_x + row * layout.hidden_bytes, slot, layout.hidden_bytes);
        const uint32_t* words = layout.words(slot);
        warp_.strided_rolled(layout.num_words(), [&](uint32_t i) {
            if (i >= layout.first_weight()) {
                call.recv_topk_weights[row * layout.topk + i - layout.first_weight()] = bits_as<float>(words[i]);
            } else if (i >= layout.first_idx()) {
                call.recv_topk_idx[row * layout.topk + i - layout.first_idx()] = static_cast<int32_t>(words[i]);
            } else if (i >= layout.first_scale()) {
                call.recv_x_scales[row * layout.num_scales + i - layout.first_scale()] = bits_as<float>(words[i]);
            } else if (i < layout.first_place()) {
                reinterpret_cast<uint32_t*>(&call.recv_src_meta[row])[i] = words[i];
            }
        });
        warp_.sync();
        poison(slot, layout.bytes);
        TK_END(static_cast<uint32_t>(row));
    }

    // ---- behind the slowest of them ----

    // Released: these slots were read, and another GPU may now write them.
    TK_DEVICE void return_credit(uint32_t node, uint32_t head) {
        const int lane_of_node = static_cast<int>(node);
        const bool is_last = head == warp_.shuffle(count_, lane_of_node);
        if (!is_last && head - warp_.shuffle(returned_, lane_of_node) < args_.rings.part_credit) return;
        set_lane(warp_, returned_, node, head);
        TK_SIGNAL(
            context_.recorder, TwoHopEvent::return_peer_credit, rank_, channel_, node, head + args_.rings.part_slots);
        auto* flag = context_.comm.template at<uint64_t>(rank_, args_.peer_head_flag(channel_, args_.peer(), node));
        signal_peer<TwoHopChannel::peer_head>(context_, rank_, flag, head);
    }

    Context& context_;
    Warp& warp_;
    const TwoHopArgs<Comm>& args_;
    const uint32_t channel_, peer_, rank_;
    NodeTurns<Context, TwoHopChannel::received, TwoHopEvent::signal_received, TwoHopEvent::wait_received> turns_;
    PerLane<uint32_t> first_row_, count_;  // rows of recv_x, a lane a node
    PerLane<uint32_t> returned_;           // heads that were returned
};

}  // namespace tracekern
