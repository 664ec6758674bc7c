// Combine, both hops, where tokens were forwarded: warps for each node add up what the peers of this one made of its
// tokens, in fp32 and in the order of the peers, and send the sums there, rounded to bf16.
//
// They take the tokens in turns, in the order in which they came. Each token waits for the peers that got it, and for
// room in the ring to its node. The last of a node's warps adds up nothing: behind the slowest of the others it sends
// whole chunks and gives slots back. One warp that has a node for itself does both.
#pragma once

#include "moe/row_sum.h"
#include "moe/two_hop/sender.h"

namespace tracekern {

// Loads that a lane has under way: with one column more a traced kernel spills.
constexpr SumLoads kRingLoads{3, 2};

constexpr uint32_t kMaxTwoHopWarps = 16;

// Shared memory of a block with node reducers.
struct NodeReducerShared {
    uint64_t summed[kMaxTwoHopWarps];  // of the tokens that are this warp's: all before this one, from 0
    Contribution results[kMaxTwoHopWarps][kMaxNodePeers];
};

// The warps of a block that add up for a node.
struct NodeWarps {
    uint32_t count;

    TK_DEVICE static NodeWarps of(const Warp& warp, uint32_t num_nodes) { return {warp.num_warps / num_nodes}; }
    TK_DEVICE uint32_t node_of(uint32_t warp) const { return warp / count; }
    TK_DEVICE uint32_t index_of(uint32_t warp) const { return warp % count; }
    // Those that take tokens.
    TK_DEVICE uint32_t num_summers() const { return count == 1 ? 1 : count - 1; }
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

// Of warps that take items in turns and say in flags of the block which of theirs is the next: the first item that some
// warp has not done. One is done, `passed`, whose warp the caller has waited for.
template <auto kChannel>
TK_DEVICE uint32_t least_in_turns(const uint64_t* flags, uint32_t count, uint32_t passed) {
    uint32_t least = kMaxFlagValue;
    for (uint32_t i = 0; i < count; ++i) {
        const uint32_t next = flag_value(look_at<kChannel, Scope::block>(flags + i));
        least = next < least ? next : least;
    }
    return least > passed ? least : passed + 1;
}

template <class Rec, class Comm>
class NodeReducer {
public:
    TK_DEVICE NodeReducer(TwoHopContext<Rec, Comm>& context, NodeWarps warps)
        : context_(context),
          warp_(context.warp),
          args_(context.args),
          channel_(context.channel()),
          node_(warps.node_of(context.warp.warp)),
          rank_(context.args.rank_in(node_)),
          first_warp_(node_ * warps.count),
          index_(warps.index_of(context.warp.warp)),
          num_summers_(warps.num_summers()),
          is_alone_(warps.count == 1) {}

    TK_DEVICE bool run() {
        known_tails_ = heads_ = returned_ = warp_.lanes([](int) { return 0u; });
        const int32_t* sums = args_.call.recv_rdma_channel_prefix_matrix + uint64_t{node_} * args_.num_channels;
        const uint32_t before = channel_ == 0 ? 0 : static_cast<uint32_t>(sums[channel_ - 1]);
        count_ = static_cast<uint32_t>(sums[channel_]) - before;
        const int32_t of_nodes = node_ == 0 ? 0 : args_.call.recv_rdma_rank_prefix_sum[node_ - 1];
        first_ = static_cast<uint32_t>(of_nodes) + before;
        return index_ < num_summers_ ? sum_tokens() : coordinate();
    }

private:
    TK_DEVICE bool sum_tokens() {
        TK_NO_UNROLL
        for (uint32_t position = index_; position < count_; position += num_summers_) {
            if (!wait_ring_space(position)) return false;
            const auto places = places_of(first_ + position);
            if (!wait_rows(places)) return false;
            sum_token(position, places);
            if (is_alone_) {
                pass(position);
            } else {
                signal_summed(position + num_summers_);
            }
        }
        return true;
    }

    TK_DEVICE bool coordinate() {
        for (uint32_t passed = 0; passed < count_;) {
            const WaitResult slowest = wait_summed(passed);
            if (!slowest.ok) return false;
            const uint32_t end = slowest.value < count_ ? slowest.value : count_;
            for (; passed < end; ++passed) pass(passed);
        }
        return true;
    }

    // All tokens as far as this one were added up: sends them as soon as their chunk is whole, and gives slots back.
    TK_DEVICE void pass(uint32_t position) {
        const auto places = places_of(first_ + position);
        heads_ = warp_.lanes(
            [&](int lane) { return places[lane] < 0 ? heads_[lane] : 1u + static_cast<uint32_t>(places[lane]); });
        return_credits(position + 1 == count_);
        const uint32_t chunk = args_.rings.rdma_chunk, in_chunk = position % chunk + 1;
        if (in_chunk == chunk || position + 1 == count_) {
            issue_chunk(context_, node_, position + 1 - in_chunk, in_chunk);
        }
    }

    // Released: the sum, and the rows that it was made of may be written over.
    TK_DEVICE void signal_summed(uint32_t next) {
        auto& shared = warp_.template shared<NodeReducerShared>();
        TK_SIGNAL(context_.recorder, TwoHopEvent::signal_summed, channel_, node_, index_, next);
        signal_block<TwoHopChannel::summed>(warp_, &shared.summed[warp_.warp], context_.epoch, next);
    }

    // Waits for the warp whose token is the next one; the value is how far all of them have come then.
    TK_DEVICE WaitResult wait_summed(uint32_t passed) {
        const uint64_t* summed = warp_.template shared<NodeReducerShared>().summed + first_warp_;
        const uint32_t index = passed % num_summers_;
        const auto wait_now = [&] {
            const RingWait whom = context_.ring_wait(TwoHopRing::rdma, context_.comm.rank, passed, passed);
            return wait_at_least<TwoHopChannel::summed, Scope::block>(
                warp_, context_.comm, summed + index, context_.epoch, passed + 1, whom);
        };
        const bool ok =
            record_wait<TwoHopEvent::wait_summed>(context_, wait_now, channel_, node_, index, passed + 1).ok;
        return {ok, least_in_turns<TwoHopChannel::summed>(summed, num_summers_, passed)};
    }

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

    // The span ends with the row that came last.
    TK_DEVICE bool wait_rows(const PerLane<int32_t>& places) {
        const auto is_missing = [&](int lane) {
            return places[lane] >= 0 && static_cast<uint32_t>(places[lane]) >= known_tails_[lane];
        };
        uint32_t missing = warp_.ballot(is_missing);
        if (!missing) return true;
        const auto flag_of = [&](int lane) {
            return args_.template own<uint64_t>(args_.return_tail_flag(channel_, static_cast<uint32_t>(lane), node_));
        };
        const auto least_of = [&](int lane) { return static_cast<uint32_t>(places[lane]) + 1; };
        uint32_t peer = first_bit(missing);
        TK_WAIT(context_.recorder, TwoHopEvent::wait_return_tail, args_.neighbour(peer), channel_, node_);
        while (missing) {
            peer = first_bit(missing);
            const RingWait whom = context_.ring_wait(TwoHopRing::nvl,
                                                     args_.neighbour(peer),
                                                     warp_.shuffle(heads_, static_cast<int>(peer)),
                                                     warp_.shuffle(known_tails_, static_cast<int>(peer)));
            const Arrived came = wait_any_at_least<TwoHopChannel::return_tail>(
                warp_, context_.comm, missing, flag_of, context_.epoch, least_of, whom);
            if (!came.lanes) break;
            known_tails_ = warp_.lanes(
                [&](int lane) { return lane < 32 && came.lanes >> lane & 1 ? came.value[lane] : known_tails_[lane]; });
            peer = first_bit(came.lanes);
            missing &= ~came.lanes;
        }
        const auto wanted = warp_.lanes([&](int lane) { return places[lane] < 0 ? 0u : least_of(lane); });
        TK_END_IF(missing == 0, args_.neighbour(peer), warp_.shuffle(wanted, static_cast<int>(peer)));
        return missing == 0;
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
    TK_DEVICE void return_credits(bool is_last) {
        const uint32_t slots = args_.rings.return_slots(args_.nodes.num_nodes);
        const uint32_t batch = args_.rings.nvl_chunk < slots ? args_.rings.nvl_chunk : slots;
        const auto is_due = [&](int lane) {
            return heads_[lane] != returned_[lane] && (is_last || heads_[lane] - returned_[lane] >= batch);
        };
        for (uint32_t peers = warp_.ballot(is_due); peers; peers &= peers - 1) {
            const uint32_t peer = first_bit(peers), rank = args_.neighbour(peer);
            const uint32_t head = warp_.shuffle(heads_, static_cast<int>(peer));
            TK_SIGNAL(context_.recorder, TwoHopEvent::return_row_credit, rank, channel_, node_, head + slots);
            auto* flag =
                context_.comm.template at<uint64_t>(rank, args_.return_head_flag(channel_, args_.peer(), node_));
            signal_peer<TwoHopChannel::return_head>(context_, rank, flag, head);
        }
        returned_ = warp_.lanes([&](int lane) { return is_due(lane) ? heads_[lane] : returned_[lane]; });
    }

    TwoHopContext<Rec, Comm>& context_;
    Warp& warp_;
    const TwoHopArgs<Comm>& args_;
    const uint32_t channel_, node_, rank_;
    const uint32_t first_warp_, index_, num_summers_;
    const bool is_alone_;             // adds up and coordinates
    uint32_t first_ = 0, count_ = 0;  // tokens of the node: of send_nvl_head, and how many
    uint32_t known_head_ = 0;         // of the ring to the node
    PerLane<uint32_t> known_tails_;   // of the peers\' rings
    PerLane<uint32_t> heads_;         // of the peers' rings: rows that were added up
    PerLane<uint32_t> returned_;      // heads that were returned
};

}  // namespace tracekern
