// Combine, first hop, at the rank of the experts: a sender for each peer of the node gives back the rows that came
// through it, whichever node they came from.
//
// The ring to a peer is divided by those nodes, and a sender never waits for one part while another has room and rows
// are left for it: see docs/two_hop.md for why that matters.
#pragma once

#include "moe/roles.h"
#include "moe/rows.h"
#include "moe/two_hop/layout.h"

namespace tracekern {

// A row of combine_x, with its weights if they come back, to a slot of a ring.
template <class Rec, class Comm>
TK_DEVICE void copy_result(
    TwoHopContext<Rec, Comm>& context, char* to, uint32_t row, uint32_t rank, uint32_t node, uint32_t slot) {
    const TwoHopCall& call = context.args.call;
    const RowLayout& layout = context.args.row;
    TK_RANGE(context.recorder, TwoHopEvent::send_row, rank, node, slot);
    copy_row(context.warp, to, call.combine_x + uint64_t{row} * layout.hidden_bytes, layout.hidden_bytes);
    if (call.has_weights) {
        auto* weights = reinterpret_cast<float*>(layout.words(to) + layout.first_weight());
        context.warp.strided_rolled(
            layout.topk, [&](uint32_t i) { weights[i] = call.combine_topk_weights[uint64_t{row} * layout.topk + i]; });
    }
    TK_END(row);
}

template <class Rec, class Comm>
class ReturnSender {
public:
    TK_DEVICE ReturnSender(TwoHopContext<Rec, Comm>& context, uint32_t target_peer)
        : context_(context),
          warp_(context.warp),
          args_(context.args),
          channel_(context.channel()),
          peer_(target_peer),
          rank_(context.args.neighbour(target_peer)),
          slots_(context.args.rings.return_slots(context.args.nodes.num_nodes)) {}

    TK_DEVICE bool run() {
        read_ranges();
        for (uint32_t turn = channel_ % args_.nodes.num_nodes;;) {
            const uint32_t left = warp_.ballot([&](int lane) { return row_[lane] < end_[lane]; });
            if (!left) return true;
            const uint32_t open = wait_return_ring(left, turn);
            if (!open) return false;
            const uint32_t node = first_in_turn(open, turn);
            send_rows(node);
            turn = (node + 1) % args_.nodes.num_nodes;
        }
    }

private:
    // The rows of this channel, a lane a node: those of the rank of the peer's place there.
    TK_DEVICE void read_ranges() {
        const auto of_nodes = [&](auto of_rank) {
            return warp_.lanes([&](int lane) {
                const uint32_t node = static_cast<uint32_t>(lane);
                if (node >= args_.nodes.num_nodes) return 0u;
                return static_cast<uint32_t>(of_rank(args_.nodes.rank_at(node, peer_)));
            });
        };
        const int32_t* first_rows = args_.call.recv_gbl_channel_prefix_matrix;
        row_ = of_nodes([&](uint32_t rank) { return first_rows[rank * args_.num_channels + channel_]; });
        end_ = of_nodes([&](uint32_t rank) {
            const bool is_last = channel_ + 1 == args_.num_channels;
            return is_last ? args_.call.recv_gbl_rank_prefix_sum[rank]
                           : first_rows[rank * args_.num_channels + channel_ + 1];
        });
        tail_ = head_ = warp_.lanes([](int) { return 0u; });
    }

    // The nodes of those in `left` whose part of the ring has room; 0: gave up. The span ends with the first of them.
    TK_DEVICE uint32_t wait_return_ring(uint32_t left, uint32_t turn) {
        const auto has_room = [&](int lane) {
            return lane < 32 && left >> lane & 1 && tail_[lane] < head_[lane] + slots_;
        };
        if (const uint32_t open = warp_.ballot(has_room)) return open;
        const auto flag_of = [&](int lane) {
            return args_.template own<uint64_t>(args_.return_head_flag(channel_, peer_, static_cast<uint32_t>(lane)));
        };
        const auto least_of = [&](int lane) { return tail_[lane] + 1 - slots_; };
        const int expected = static_cast<int>(first_in_turn(left, turn));
        const RingWait whom =
            context_.ring_wait(TwoHopRing::nvl, rank_, warp_.shuffle(head_, expected), warp_.shuffle(tail_, expected));
        TK_WAIT(context_.recorder, TwoHopEvent::wait_return_ring, rank_, channel_);
        const Arrived came = wait_any_at_least<TwoHopChannel::return_head>(
            warp_, context_.comm, left, flag_of, context_.epoch, least_of, whom);
        const uint32_t node = first_in_turn(came.lanes, turn);
        TK_END_IF(came.lanes != 0, node, warp_.shuffle(tail_, static_cast<int>(node)) + 1);
        head_ =
            warp_.lanes([&](int lane) { return lane < 32 && came.lanes >> lane & 1 ? came.value[lane] : head_[lane]; });
        return came.lanes;
    }

    // As many as there is room for, a chunk at most, then their tail: nothing that was copied stays behind while this
    // warp waits.
    TK_DEVICE void send_rows(uint32_t node) {
        const int lane_of_node = static_cast<int>(node);
        const uint32_t row = warp_.shuffle(row_, lane_of_node), tail = warp_.shuffle(tail_, lane_of_node);
        const uint32_t room = warp_.shuffle(head_, lane_of_node) + slots_ - tail;
        uint32_t count = warp_.shuffle(end_, lane_of_node) - row;
        count = count < room ? count : room;
        count = count < args_.rings.nvl_chunk ? count : args_.rings.nvl_chunk;
        TK_NO_UNROLL
        for (uint32_t i = 0; i < count; ++i) send_row(node, row + i, tail + i);
        const auto advance = [&](const PerLane<uint32_t>& values) {
            return warp_.lanes([&](int lane) { return values[lane] + (lane == lane_of_node ? count : 0); });
        };
        row_ = advance(row_);
        tail_ = advance(tail_);
        TK_SIGNAL(context_.recorder, TwoHopEvent::signal_return_tail, rank_, channel_, node, tail + count);
        // Released: the rows.
        auto* flag = context_.comm.template at<uint64_t>(rank_, args_.return_tail_flag(channel_, args_.peer(), node));
        signal_peer<TwoHopChannel::return_tail>(context_, rank_, flag, tail + count);
    }

    TK_DEVICE void send_row(uint32_t node, uint32_t row, uint32_t position) {
        char* to = context_.comm.template at<char>(rank_, args_.return_row(channel_, args_.peer(), node, position));
        copy_result(context_, to, row, rank_, node, position % slots_);
    }

    TwoHopContext<Rec, Comm>& context_;
    Warp& warp_;
    const TwoHopArgs<Comm>& args_;
    const uint32_t channel_, peer_, rank_;
    const uint32_t slots_;           // of the part of a node
    PerLane<uint32_t> row_, end_;    // of combine_x, a lane a node
    PerLane<uint32_t> tail_, head_;  // of the part of the ring
};

}  // namespace tracekern
