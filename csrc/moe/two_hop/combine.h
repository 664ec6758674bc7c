// Combine: what the experts' ranks made of their rows goes back the way that tokens came, and is added up on it. Two
// blocks have a channel, one that sends and receives and one that adds up for other nodes. Who waits for whom, and why
// that ends: docs/two_hop.md.
#pragma once

#include "moe/rows.h"
#include "moe/two_hop/dispatch.h"
#include "moe/two_hop/notify.h"
#include "moe/two_hop/reducers.h"
#include "moe/two_hop/turns.h"

namespace tracekern {

// Shared memory of a block that sends. The token reducers, which find theirs at its beginning, are the warps that send
// in dispatch, with their coordinator: so a block has as many warps as there.
struct CombineShared {
    TokenReducerShared reducers;
    NodeTurnFlags returned;
};
static_assert(kNumReceivers == kNumSenders);

template <class Rec, class Comm>
class ReturnSender;

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

// Combine, first hop, at the rank of the experts: a team of warps for each peer of the node gives back the rows that
// came through it, whichever node they came from.
//
// The ring to a peer is divided by those nodes. Warps take the rows of each in turns, and never wait for one part while
// another has room for a row of theirs: see docs/two_hop.md for why that matters. The coordinator tells the peer of
// whole chunks, behind the slowest of them.
template <class Rec, class Comm>
class ReturnSender {
    using Context = TwoHopContext<Rec, Comm>;

public:
    TK_DEVICE ReturnSender(Context& context, NodeTurnFlags& flags, const Teams& teams, uint32_t target_peer)
        : context_(context),
          warp_(context.warp),
          args_(context.args),
          channel_(context.channel()),
          peer_(target_peer),
          rank_(context.args.neighbour(target_peer)),
          slots_(context.args.rings.part_slots),
          turns_(context, flags, teams, target_peer, TwoHopRing::nvl) {}

    TK_DEVICE bool run() {
        if (!wait_peer_over(context_, peer_)) return false;
        if (!read_ranges()) return false;
        if (turns_.place().is_worker()) return send_rows();
        return turns_.follow(count_, [&](uint32_t node, uint32_t tail) { pass(node, tail); });
    }

private:
    // The rows of this channel, a lane a node: those of the rank of the peer's place there. False: the call is refused.
    TK_DEVICE bool read_ranges() {
        const auto of_nodes = [&](auto of_rank) {
            return warp_.lanes([&](int lane) {
                const uint32_t node = static_cast<uint32_t>(lane);
                if (node >= args_.nodes.num_nodes) return 0u;
                return static_cast<uint32_t>(of_rank(args_.nodes.rank_at(node, peer_)));
            });
        };
        const int32_t* first_rows = args_.call.recv_gbl_channel_prefix_matrix;
        first_row_ = of_nodes([&](uint32_t rank) { return first_rows[rank * args_.num_channels + channel_]; });
        const auto end = of_nodes([&](uint32_t rank) {
            const bool is_last = channel_ + 1 == args_.num_channels;
            return is_last ? args_.call.recv_gbl_rank_prefix_sum[rank]
                           : first_rows[rank * args_.num_channels + channel_ + 1];
        });
        count_ = warp_.lanes([&](int lane) { return end[lane] - first_row_[lane]; });
        told_ = warp_.lanes([](int) { return 0u; });
        const uint32_t wrong = warp_.ballot(
            [&](int lane) { return first_row_[lane] > end[lane] || end[lane] > args_.call.recv_capacity; });
        if (wrong) context_.refuse(TwoHopRefusal::out_of_bounds, 0);
        return !wrong;
    }

    // ---- those that copy ----

    TK_DEVICE bool send_rows() {
        auto next = warp_.lanes([&](int) { return turns_.place().index; }), head = warp_.lanes([](int) { return 0u; });
        TK_NO_UNROLL
        for (uint32_t turn = channel_ % args_.nodes.num_nodes;;) {
            const uint32_t left = warp_.ballot([&](int lane) { return next[lane] < count_[lane]; });
            if (!left) return true;
            const uint32_t open = wait_return_ring(left, next, head, turn);
            if (!open) return false;
            const uint32_t node = first_in_turn(open, turn);
            const int lane_of_node = static_cast<int>(node);
            const uint32_t first_row = warp_.shuffle(first_row_, lane_of_node);
            const uint32_t count = warp_.shuffle(count_, lane_of_node);
            // One row of each node in turn: with all that there is room for, reducers of other nodes have nothing to
            // do.
            const uint32_t end_of_room = warp_.shuffle(head, lane_of_node) + slots_;
            const uint32_t end = args_.nodes.num_nodes > 1 ? 0 : count < end_of_room ? count : end_of_room;
            uint32_t place = warp_.shuffle(next, lane_of_node);
            TK_NO_UNROLL
            do {
                send_row(node, first_row + place, place);
                if (turns_.place().is_coordinator()) {
                    pass(node, place + 1);
                } else {
                    turns_.done(node, place);  // released: the row
                }
                place += turns_.place().num_workers();
            } while (place < end);
            set_lane(warp_, next, node, place);
            turn = (node + 1) % args_.nodes.num_nodes;
        }
    }

    // The nodes of those in `left` whose part of the ring has room for the next row; 0: gave up. The span ends with the
    // first of them.
    TK_DEVICE uint32_t wait_return_ring(uint32_t left,
                                        const PerLane<uint32_t>& next,
                                        PerLane<uint32_t>& head,
                                        uint32_t turn) {
        const auto has_room = [&](int lane) {
            return lane < 32 && left >> lane & 1 && next[lane] < head[lane] + slots_;
        };
        if (const uint32_t open = warp_.ballot(has_room)) return open;
        const auto flag_of = [&](int lane) {
            return args_.template own<uint64_t>(args_.return_head_flag(channel_, peer_, static_cast<uint32_t>(lane)));
        };
        const auto least_of = [&](int lane) { return next[lane] + 1 - slots_; };
        const int expected = static_cast<int>(first_in_turn(left, turn));
        const RingWait whom =
            context_.ring_wait(TwoHopRing::nvl, rank_, warp_.shuffle(head, expected), warp_.shuffle(next, expected));
        TK_WAIT(context_.recorder, TwoHopEvent::wait_return_ring, rank_, channel_);
        const Arrived came = wait_any_at_least<TwoHopChannel::return_head>(
            warp_, context_.comm, left, flag_of, context_.epoch, least_of, whom);
        const uint32_t node = first_in_turn(came.lanes, turn);
        TK_END_IF(came.lanes != 0, node, warp_.shuffle(next, static_cast<int>(node)) + 1);
        head =
            warp_.lanes([&](int lane) { return lane < 32 && came.lanes >> lane & 1 ? came.value[lane] : head[lane]; });
        return came.lanes;
    }

    // A row of combine_x, with its weights if they come back, to its slot.
    TK_DEVICE void send_row(uint32_t node, uint32_t row, uint32_t place) {
        const TwoHopCall& call = args_.call;
        const RowLayout& layout = args_.row;
        TK_RANGE(context_.recorder, TwoHopEvent::send_row, rank_, node, place % slots_);
        char* to = context_.comm.template at<char>(rank_, args_.nvl_row(channel_, args_.peer(), node, place));
        copy_row(warp_, to, call.combine_x + uint64_t{row} * layout.hidden_bytes, layout.hidden_bytes);
        if (call.has_weights) {
            auto* weights = reinterpret_cast<float*>(layout.words(to) + layout.first_weight());
            warp_.strided_rolled(layout.topk, [&](uint32_t i) {
                weights[i] = call.combine_topk_weights[uint64_t{row} * layout.topk + i];
            });
        }
        TK_END(row);
    }

    // ---- behind the slowest of them ----

    // Tells the peer of a chunk, or of the last rows. Released: the rows, which the team's warps released to this one.
    TK_DEVICE void pass(uint32_t node, uint32_t tail) {
        const uint32_t untold = tail - warp_.shuffle(told_, static_cast<int>(node));
        const bool is_last = tail == warp_.shuffle(count_, static_cast<int>(node));
        if (!is_last && untold < args_.rings.part_chunk) return;
        set_lane(warp_, told_, node, tail);
        TK_SIGNAL(context_.recorder, TwoHopEvent::signal_return_tail, rank_, channel_, node, tail);
        auto* flag = context_.comm.template at<uint64_t>(rank_, args_.return_tail_flag(channel_, args_.peer(), node));
        signal_peer<TwoHopChannel::return_tail>(context_, rank_, flag, tail);
    }

    Context& context_;
    Warp& warp_;
    const TwoHopArgs<Comm>& args_;
    const uint32_t channel_, peer_, rank_;
    const uint32_t slots_;  // of the part of a node
    NodeTurns<Context, TwoHopChannel::returned, TwoHopEvent::signal_returned, TwoHopEvent::wait_returned> turns_;
    PerLane<uint32_t> first_row_, count_;  // rows of combine_x, a lane a node
    PerLane<uint32_t> told_;               // tails that the peer was told of
};

}  // namespace tracekern
