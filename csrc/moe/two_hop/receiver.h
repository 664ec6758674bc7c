// Dispatch, second hop, at the destination: receivers copy rows from the rings of their peers to where they belong in
// recv_x.
//
// A receiver is for one peer of the node, which hands on tokens of the ranks of its place in all nodes. Rows of recv_x
// are in the order of those ranks, and of tokens: tokens of a rank and channel come in their order, so the next row of
// each node is known. On one node a team of warps is for a peer.
#pragma once

#include "comm/signal.h"
#include "moe/roles.h"
#include "moe/two_hop/layout.h"
#include "moe/two_hop/turns.h"

namespace tracekern {

template <class Rec, class Comm>
class Receiver {
public:
    TK_DEVICE Receiver(TwoHopContext<Rec, Comm>& context, uint32_t source_peer)
        : context_(context),
          warp_(context.warp),
          args_(context.args),
          channel_(context.channel()),
          peer_(source_peer),
          rank_(context.args.neighbour(source_peer)) {}

    TK_DEVICE bool run() {
        PerLane<uint32_t> next_row;  // a lane a node
        const auto [ok, num_rows] = wait_prefix(next_row, true);
        if (!ok) return false;
        for (uint32_t head = 0; head < num_rows;) {
            uint32_t tail;
            if (!wait_peer_tail(head, tail)) return false;
            // The tail says no more than is to come, unless a fault was planted.
            const uint32_t end = tail < num_rows ? tail : num_rows;
            TK_NO_UNROLL
            do receive_token(head, take_row(head, next_row));
            while (++head < end);
            return_credit(head);
        }
        return true;
    }

    // The same on one node, where warps of a team take the rows in turns.
    TK_DEVICE bool run(const Teams& teams) {
        TeamTurns turns(context_, warp_.template shared<TurnFlags>(), teams, peer_, TwoHopRing::nvl);
        PerLane<uint32_t> next_row;
        const auto [ok, num_rows] = wait_prefix(next_row, teams.is_coordinator(warp_.warp));
        if (!ok) return false;
        if (teams.is_coordinator(warp_.warp)) {
            return turns.follow(num_rows, [&](uint32_t, uint32_t end) { return_credit(end); });
        }
        const uint32_t first_row = warp_.shuffle(next_row, 0);
        uint32_t tail = 0;
        TK_NO_UNROLL
        for (uint32_t position = turns.index(); position < num_rows; position += turns.num_workers()) {
            if (position >= tail && !wait_peer_tail(position, tail)) return false;
            receive_token(position, uint64_t{first_row} + position);
            turns.done(position);  // released: the slot was read
        }
        return true;
    }

private:
    using TeamTurns = Turns<TwoHopContext<Rec, Comm>,
                            TwoHopChannel::received,
                            TwoHopEvent::signal_received,
                            TwoHopEvent::wait_received>;

    // Waits for what the peer says of this channel. Value: the rows that come; next_row: where they begin. notes: in
    // recv_gbl_channel_prefix_matrix, too.
    TK_DEVICE WaitResult wait_prefix(PerLane<uint32_t>& next_row, bool notes) {
        const TwoHopCall& call = args_.call;
        const uint32_t num_nodes = args_.nodes.num_nodes;
        const auto* flags = args_.template own<uint64_t>(args_.prefix_flags(channel_, peer_));
        auto start = warp_.lanes([](int) { return 0u; }), end = start;
        const auto wait_for_all = [&](const uint64_t* of_nodes, PerLane<uint32_t>& sums) {
            const auto take = [&](uint32_t i, uint32_t value) { sums[static_cast<int>(i)] = value; };
            const RingWait whom = context_.ring_wait(TwoHopRing::nvl, rank_, 0, 0);
            return wait_all<TwoHopChannel::prefix>(
                warp_, context_.comm, of_nodes, num_nodes, context_.epoch, whom, take);
        };
        const auto wait_now = [&] {
            return WaitResult{wait_for_all(flags, start) && wait_for_all(flags + num_nodes, end), 0};
        };
        if (!record_wait<TwoHopEvent::wait_prefix>(context_, wait_now, rank_, channel_).ok) return {false, 0};
        next_row = warp_.lanes([&](int lane) {
            const uint32_t node = static_cast<uint32_t>(lane);
            if (node >= num_nodes) return 0u;
            const uint32_t source = args_.nodes.rank_at(node, peer_);
            const int32_t before = source == 0 ? 0 : call.recv_gbl_rank_prefix_sum[source - 1];
            const uint32_t row = static_cast<uint32_t>(before) + start[lane];
            if (notes) {
                call.recv_gbl_channel_prefix_matrix[source * args_.num_channels + channel_] = static_cast<int32_t>(row);
            }
            return row;
        });
        return {true, warp_.sum([&](int lane) { return end[lane] - start[lane]; })};
    }

    TK_DEVICE bool wait_peer_tail(uint32_t head, uint32_t& tail) {
        const auto wait_now = [&] {
            const auto* flag = args_.template own<uint64_t>(args_.peer_tail_flag(channel_, peer_));
            const RingWait whom = context_.ring_wait(TwoHopRing::nvl, rank_, head, head);
            return wait_at_least<TwoHopChannel::peer_tail>(warp_, context_.comm, flag, context_.epoch, head + 1, whom);
        };
        const WaitResult came = record_wait<TwoHopEvent::wait_peer_tail>(context_, wait_now, rank_, channel_, head + 1);
        tail = came.value;
        return came.ok;
    }

    TK_DEVICE uint32_t take_row(uint32_t position, PerLane<uint32_t>& next_row) {
        const uint32_t src_node = src_node_of(position), row = warp_.shuffle(next_row, static_cast<int>(src_node));
        next_row =
            warp_.lanes([&](int lane) { return next_row[lane] + uint32_t{static_cast<uint32_t>(lane) == src_node}; });
        return row;
    }

    TK_DEVICE char* slot_of(uint32_t position) const {
        return args_.template own<char>(args_.nvl_row(channel_, peer_, position));
    }
    TK_DEVICE uint32_t src_node_of(uint32_t position) const {
        return args_.row.meta(slot_of(position)).src_node % kMaxTwoHopNodes;
    }

    TK_DEVICE void receive_token(uint32_t position, uint64_t row) {
        const TwoHopCall& call = args_.call;
        const RowLayout& layout = args_.row;
        if (row >= call.recv_capacity) return;  // the host reads in moe_recv_counter how many there are
        TK_RANGE(context_.recorder,
                 TwoHopEvent::receive_token,
                 args_.nodes.rank_at(src_node_of(position), peer_),
                 position % args_.rings.nvl_slots);
        char* slot = slot_of(position);
        copy_row(warp_, call.recv_x + row * layout.hidden_bytes, slot, layout.hidden_bytes);
        const uint32_t* words = layout.words(slot);
        warp_.strided_rolled(layout.num_words(), [&](uint32_t i) {
            if (i >= layout.first_weight()) {
                call.recv_topk_weights[row * layout.topk + i - layout.first_weight()] = bits_as<float>(words[i]);
            } else if (i >= layout.first_idx()) {
                call.recv_topk_idx[row * layout.topk + i - layout.first_idx()] = static_cast<int32_t>(words[i]);
            } else if (i >= layout.first_scale()) {
                call.recv_x_scales[row * layout.num_scales + i - layout.first_scale()] = bits_as<float>(words[i]);
            } else {
                reinterpret_cast<uint32_t*>(&call.recv_src_meta[row])[i] = words[i];
            }
        });
        warp_.sync();
        poison(slot, layout.bytes);
        TK_END(static_cast<uint32_t>(row));
    }

    TK_DEVICE void return_credit(uint32_t head) {
        TK_SIGNAL(context_.recorder, TwoHopEvent::return_peer_credit, rank_, channel_, head + args_.rings.nvl_slots);
        // Released: these slots were read, and another GPU may now write them.
        auto* flag = context_.comm.template at<uint64_t>(rank_, args_.peer_head_flag(channel_, args_.peer()));
        signal_peer<TwoHopChannel::peer_head>(context_, rank_, flag, head);
    }

    TwoHopContext<Rec, Comm>& context_;
    Warp& warp_;
    const TwoHopArgs<Comm>& args_;
    const uint32_t channel_, peer_, rank_;
};

}  // namespace tracekern
