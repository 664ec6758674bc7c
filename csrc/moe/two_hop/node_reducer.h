// Combine, both hops, where tokens were forwarded: a warp for each node adds up what the peers of this one made of its
// tokens, in fp32 and in the order of the peers, and sends the sums there, rounded to bf16.
//
// It goes through the tokens in the order in which they came. Each token waits for the peers that got it, and for room
// in the ring to its node.
#pragma once

#include "moe/row_sum.h"
#include "moe/two_hop/sender.h"

namespace tracekern {

// Loads that a lane has under way: with one column more a traced kernel spills.
constexpr SumLoads kRingLoads{3, 2};

// Shared memory of a block with node reducers.
struct NodeReducerShared {
    Contribution results[16][kMaxNodePeers];  // of each warp: what it adds up
};

// Adds up the weights that come with rows, a lane a choice: those of the rows in `list`, in its order.
template <class Rec, class Comm>
TK_DEVICE void sum_weights(TwoHopContext<Rec, Comm>& context, const Contribution* list, uint32_t count, float* sums) {
    const RowLayout& layout = context.args.row;
    context.warp.strided_rolled(layout.topk, [&](uint32_t i) {
        float sum = 0.0f;
        for (uint32_t k = 0; k < count; ++k) {
            sum += reinterpret_cast<const float*>(layout.words(list[k].row) + layout.first_weight())[i];
        }
        sums[i] = sum;
    });
}

template <class Rec, class Comm>
class NodeReducer {
public:
    TK_DEVICE NodeReducer(TwoHopContext<Rec, Comm>& context, uint32_t target_node)
        : context_(context),
          warp_(context.warp),
          args_(context.args),
          channel_(context.channel()),
          node_(target_node),
          rank_(context.args.rank_in(target_node)) {}

    TK_DEVICE bool run() {
        known_tails_ = returned_ = warp_.lanes([](int) { return 0u; });
        const int32_t* sums = args_.call.recv_rdma_channel_prefix_matrix + uint64_t{node_} * args_.num_channels;
        const uint32_t before = channel_ == 0 ? 0 : static_cast<uint32_t>(sums[channel_ - 1]);
        const uint32_t count = static_cast<uint32_t>(sums[channel_]) - before;
        const int32_t of_nodes = node_ == 0 ? 0 : args_.call.recv_rdma_rank_prefix_sum[node_ - 1];
        const uint32_t first = static_cast<uint32_t>(of_nodes) + before;
        auto heads = warp_.lanes([](int) { return 0u; });  // of the peers' parts of the ring: rows that were added up
        TK_NO_UNROLL
        for (uint32_t position = 0; position < count; ++position) {
            if (!wait_ring_space(position)) return false;
            const auto places = places_of(first + position);
            if (!wait_rows(places)) return false;
            sum_token(position, places);
            heads = warp_.lanes([&](int lane) { return places[lane] < 0 ? heads[lane] : 1u + places[lane]; });
            return_credits(heads, position + 1 == count);
            const uint32_t sent = (position + 1) % args_.rings.rdma_chunk;
            if (sent == 0 || position + 1 == count) {
                const uint32_t in_chunk = sent == 0 ? args_.rings.rdma_chunk : sent;
                issue_chunk(context_, node_, position + 1 - in_chunk, in_chunk);
            }
        }
        return true;
    }

private:
    // A lane a peer: the token's place among the rows that come from there, -1: none.
    TK_DEVICE PerLane<int32_t> places_of(uint32_t forwarded) const {
        const int32_t* places = args_.call.send_nvl_head + uint64_t{forwarded} * args_.nodes.peers;
        return warp_.lanes(
            [&](int lane) { return static_cast<uint32_t>(lane) < args_.nodes.peers ? places[lane] : -1; });
    }

    TK_DEVICE bool wait_ring_space(uint32_t position) {
        const uint32_t slots = args_.rings.rdma_slots, wanted = position + 1;
        if (wanted <= known_head_ + slots) return true;
        const auto wait_now = [&] {
            const auto* flag = args_.template own<uint64_t>(args_.head_flag(channel_, node_));
            const RingWait whom = context_.ring_wait(TwoHopRing::rdma, rank_, known_head_, position);
            return wait_at_least<TwoHopChannel::head>(warp_, context_.comm, flag, context_.epoch, wanted - slots, whom);
        };
        const WaitResult came = record_wait<TwoHopEvent::wait_ring_space>(context_, wait_now, rank_, channel_, wanted);
        known_head_ = came.value;
        return came.ok;
    }

    TK_DEVICE bool wait_rows(const PerLane<int32_t>& places) {
        for (uint32_t peers = warp_.ballot([&](int lane) { return places[lane] >= 0; }); peers; peers &= peers - 1) {
            const uint32_t peer = first_bit(peers);
            const uint32_t wanted = 1 + static_cast<uint32_t>(warp_.shuffle(places, static_cast<int>(peer)));
            const uint32_t known = warp_.shuffle(known_tails_, static_cast<int>(peer));
            if (wanted <= known) continue;
            const uint32_t rank = args_.neighbour(peer);
            const auto wait_now = [&] {
                const auto* flag = args_.template own<uint64_t>(args_.return_tail_flag(channel_, peer, node_));
                const RingWait whom = context_.ring_wait(TwoHopRing::nvl, rank, wanted - 1, known);
                return wait_at_least<TwoHopChannel::return_tail>(
                    warp_, context_.comm, flag, context_.epoch, wanted, whom);
            };
            const WaitResult came =
                record_wait<TwoHopEvent::wait_return_tail>(context_, wait_now, rank, channel_, node_, wanted);
            if (!came.ok) return false;
            known_tails_ = warp_.lanes(
                [&](int lane) { return static_cast<uint32_t>(lane) == peer ? came.value : known_tails_[lane]; });
        }
        return true;
    }
    TK_DEVICE void sum_token(uint32_t position, const PerLane<int32_t>& places) {
        const RowLayout& layout = args_.row;
        Contribution* list = warp_.template shared<NodeReducerShared>().results[warp_.warp];
        const uint32_t peers = warp_.ballot([&](int lane) { return places[lane] >= 0; }), count = count_bits(peers);
        warp_.sync();  // the list of the token before was read
        warp_.each_lane([&](int lane) {
            if (lane >= 32 || !(peers >> lane & 1)) return;
            const auto peer = static_cast<uint32_t>(lane);
            const uint64_t at = args_.return_row(channel_, peer, node_, static_cast<uint32_t>(places[lane]));
            list[count_bits(peers & ((1u << lane) - 1))] = {args_.template own<char>(at), 1.0f, Expert{}, peer, 0};
        });
        warp_.sync();
        TK_RANGE(context_.recorder, TwoHopEvent::sum_in_node, node_, position);
        char* to = outgoing_row(context_, node_, position);
        if (args_.call.has_weights) {
            sum_weights(context_, list, count, reinterpret_cast<float*>(layout.words(to) + layout.first_weight()));
        }
        sum_rows<BFloat16, false, false, kRingLoads>(warp_, to, list, count, args_.shape.hidden, 0, 1);
        TK_END(count);
    }

    // Released: what was read. A chunk at a time, and before what this warp may wait for: see docs/two_hop.md.
    TK_DEVICE void return_credits(const PerLane<uint32_t>& heads, bool is_last) {
        const uint32_t slots = args_.rings.return_slots(args_.nodes.num_nodes);
        const uint32_t batch = args_.rings.nvl_chunk < slots ? args_.rings.nvl_chunk : slots;
        const auto is_due = [&](int lane) {
            return heads[lane] != returned_[lane] && (is_last || heads[lane] - returned_[lane] >= batch);
        };
        for (uint32_t peers = warp_.ballot(is_due); peers; peers &= peers - 1) {
            const uint32_t peer = first_bit(peers), rank = args_.neighbour(peer);
            const uint32_t head = warp_.shuffle(heads, static_cast<int>(peer));
            TK_SIGNAL(context_.recorder, TwoHopEvent::return_row_credit, rank, channel_, node_, head + slots);
            auto* flag =
                context_.comm.template at<uint64_t>(rank, args_.return_head_flag(channel_, args_.peer(), node_));
            signal_peer<TwoHopChannel::return_head>(context_, rank, flag, head);
        }
        returned_ = warp_.lanes([&](int lane) { return is_due(lane) ? heads[lane] : returned_[lane]; });
    }

    TwoHopContext<Rec, Comm>& context_;
    Warp& warp_;
    const TwoHopArgs<Comm>& args_;
    const uint32_t channel_, node_, rank_;
    uint32_t known_head_ = 0;        // of the ring to the node
    PerLane<uint32_t> known_tails_;  // of the peers\' rings
    PerLane<uint32_t> returned_;     // heads that were returned
};

}  // namespace tracekern
