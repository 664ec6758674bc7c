// Combine, where rows are added up: within the node that forwarded their token, and at its source.
#pragma once

#include "moe/row_sum.h"
#include "moe/two_hop/sender.h"
#include "moe/two_hop/turns.h"

namespace tracekern {

// ---- both hops, where tokens were forwarded ----
//
// Warps for each node add up what the peers of this one made of its tokens, in fp32 and in the order of the peers, and
// send the sums there, rounded to bf16.
//
// They take the tokens in turns, in the order in which they came. Each token waits for the peers that got it, and for
// room in the ring to its node. Behind the slowest of a node's warps the last one sends whole chunks and gives slots
// back. On one node a sum is what combine returns, and nothing is sent.

// Loads that a lane has under way: with one column more a traced kernel spills.
constexpr SumLoads kRingLoads{3, 2};

// Shared memory of a block with node reducers.
struct NodeReducerShared {
    TurnFlags summed;
    Contribution results[kMaxTeamWarps][kMaxNodePeers + 2];  // biases come first
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

// Lists the rows that a token's sum begins with; returns how many.
TK_DEVICE uint32_t list_biases(Warp& warp, const TwoHopCall& call, uint64_t byte, Contribution* list) {
    const uint32_t count = (call.bias[0] ? 1u : 0u) + (call.bias[1] ? 1u : 0u);
    warp.leader([&] {
        for (uint32_t i = 0; i < count; ++i) list[i] = {call.bias[i] + byte, 1.0f, Expert{}, 0, 0};
    });
    return count;
}

template <class Rec, class Comm, bool kOneNode>
class NodeReducer {
    using Context = TwoHopContext<Rec, Comm>;

public:
    TK_DEVICE NodeReducer(Context& context, const Teams& teams)
        : context_(context),
          warp_(context.warp),
          args_(context.args),
          channel_(context.channel()),
          node_(teams.team_of(context.warp.warp)),
          rank_(context.args.rank_in(node_)),
          turns_(context, warp_.template shared<NodeReducerShared>().summed, teams, node_, TwoHopRing::rdma) {}

    TK_DEVICE bool run() {
        known_tails_ = heads_ = returned_ = warp_.lanes([](int) { return 0u; });
        const int32_t* sums = args_.call.recv_rdma_channel_prefix_matrix + uint64_t{node_} * args_.num_channels;
        const uint32_t before = channel_ == 0 ? 0 : static_cast<uint32_t>(sums[channel_ - 1]);
        const int32_t of_nodes = node_ == 0 ? 0 : args_.call.recv_rdma_rank_prefix_sum[node_ - 1];
        first_ = static_cast<uint32_t>(of_nodes) + before;
        const TaskRange range = own_tokens(context_);
        const uint32_t num_forwarded = static_cast<uint32_t>(sums[channel_]) - before;
        if (!context_.has_rows(first_, uint64_t{first_} + num_forwarded, args_.call.forward_capacity)) return false;
        count_ = kOneNode ? range.end - range.begin : num_forwarded;
        if (!kOneNode && !wait_node_over(context_, node_)) return false;
        if (turns_.place().is_worker()) return sum_tokens();
        return turns_.follow(count_, [&](uint32_t first, uint32_t end) { pass(first, end); });
    }

private:
    TK_DEVICE bool sum_tokens() {
        TK_NO_UNROLL
        for (uint32_t position = turns_.place().index; position < count_; position += turns_.place().num_workers()) {
            if (!kOneNode && !wait_ring_space(position)) return false;
            if (kOneNode && !has_places(position)) return false;
            const auto places = places_of(position);
            if (!wait_rows(places)) return false;
            sum_token(position, places);
            if (turns_.place().is_coordinator()) {
                pass(position, position + 1);
            } else {
                turns_.done(position);  // released: the sum, and the rows that it was made of may be written over
            }
        }
        return true;
    }

    // Tokens of [first, end) were added up: gives the slots of their rows back, and sends those whose chunk is whole.
    TK_DEVICE void pass(uint32_t first, uint32_t end) {
        heads_ = behind_places(warp_, heads_, first, end, [&](uint32_t position) { return places_of(position); });
        return_credits(end == count_);
        if constexpr (!kOneNode) {
            const uint32_t chunk = args_.rings.rdma_chunk;
            for (; issued_ + chunk <= end; issued_ += chunk) issue_chunk(context_, node_, issued_, chunk);
            if (end == count_ && issued_ < end) issue_chunk(context_, node_, issued_, end - issued_);
        }
    }

    // A lane a peer: the token's place among the rows that come from there, -1: none. On one node positions are those
    // of all tokens, forwarded or not.
    TK_DEVICE PerLane<int32_t> places_of(uint32_t position) const {
        const TwoHopCall& call = args_.call;
        const int32_t forwarded = kOneNode ? call.send_rdma_head[token_at(position)] : static_cast<int32_t>(position);
        const int32_t* places = call.send_nvl_head + (int64_t{first_} + forwarded) * args_.nodes.peers;
        return warp_.lanes([&](int lane) {
            return forwarded >= 0 && static_cast<uint32_t>(lane) < args_.nodes.peers ? places[lane] : -1;
        });
    }
    // Whether there is what places_of() reads on one node; if not, refuses the call.
    TK_DEVICE bool has_places(uint32_t position) const {
        const int32_t forwarded = args_.call.send_rdma_head[token_at(position)];
        const uint64_t row = uint64_t{first_} + static_cast<uint32_t>(forwarded);
        return forwarded < 0 || context_.has_rows(row, row + 1, args_.call.forward_capacity);
    }
    TK_DEVICE uint64_t token_at(uint32_t position) const { return own_tokens(context_).begin + position; }

    TK_DEVICE bool wait_ring_space(uint32_t position) {
        const uint32_t slots = args_.rings.rdma_slots, wanted = position + 1;
        if (wanted <= known_head_ + slots) return true;
        const auto wait_now = [&] {
            const auto* flag = args_.template from_node<uint64_t>(node_, args_.head_flag(channel_, node_));
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
        const uint32_t num_biases =
            kOneNode ? list_biases(warp_, args_.call, token_at(position) * layout.hidden_bytes, list) : 0;
        warp_.each_lane([&](int lane) {
            if (lane >= 32 || !(peers >> lane & 1)) return;
            const auto peer = static_cast<uint32_t>(lane);
            const uint64_t at = args_.nvl_row(channel_, peer, node_, static_cast<uint32_t>(places[lane]));
            list[num_biases + count_bits(peers & ((1u << lane) - 1))] = {
                args_.template own<char>(at), 1.0f, Expert{}, peer, 0};
        });
        warp_.sync();
        TK_RANGE(context_.recorder, TwoHopEvent::sum_in_node, node_, position);
        char* to = kOneNode ? args_.call.combined_x + token_at(position) * layout.hidden_bytes
                            : outgoing_row(context_, node_, position);
        if (args_.call.has_weights) {
            float* weights = kOneNode ? args_.call.combined_topk_weights + token_at(position) * layout.topk
                                      : reinterpret_cast<float*>(layout.words(to) + layout.first_weight());
            sum_weights(context_, list + num_biases, count, weights);
        }
        sum_rows<BFloat16, false, false, kRingLoads>(warp_, to, list, num_biases + count, args_.shape.hidden, 0, 1);
        TK_END(count);
    }

    // Released: what was read. Before what this warp may wait for: see docs/two_hop.md.
    TK_DEVICE void return_credits(bool is_last) {
        const uint32_t slots = args_.rings.part_slots, batch = args_.rings.part_credit;
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

    Context& context_;
    Warp& warp_;
    const TwoHopArgs<Comm>& args_;
    const uint32_t channel_, node_, rank_;
    Turns<Context, TwoHopChannel::summed, TwoHopEvent::signal_summed, TwoHopEvent::wait_summed> turns_;
    uint32_t first_ = 0, count_ = 0;  // of send_nvl_head, and how many tokens
    uint32_t known_head_ = 0;         // of the ring to the node
    uint32_t issued_ = 0;             // tokens that were sent there
    PerLane<uint32_t> known_tails_;   // of the peers' rings
    PerLane<uint32_t> heads_;         // of the peers' rings: rows that were added up
    PerLane<uint32_t> returned_;      // heads that were returned
};

// ---- second hop, at the source ----
//
// Receivers add up what came back for a token from all nodes, in fp32 and in the order of the nodes, and a coordinator
// gives the rings' slots back.
//
// Receivers take the channel's tokens in turns. A slot is free when all tokens up to its own were added up, by
// whichever receiver: the coordinator goes through the tokens behind the slowest of them.

constexpr uint32_t kNumReceivers = 7;  // warps of a channel

// Shared memory of a block with receivers.
struct TokenReducerShared {
    uint64_t reduced[kNumReceivers];  // of the tokens that are this receiver's: all before this one, from 0
    Contribution results[kNumReceivers][kMaxTwoHopNodes + 2];  // biases come first
};

// A lane a node: the token's place in the ring from there, -1: none.
template <class Rec, class Comm>
TK_DEVICE PerLane<int32_t> places_from_nodes(const TwoHopContext<Rec, Comm>& context, uint32_t token) {
    const TwoHopArgs<Comm>& args = context.args;
    const int32_t* places = args.call.send_rdma_head + uint64_t{token} * args.nodes.num_nodes;
    return context.warp.lanes(
        [&](int lane) { return static_cast<uint32_t>(lane) < args.nodes.num_nodes ? places[lane] : -1; });
}

// ---- receivers ----

template <class Rec, class Comm>
class TokenReducer {
public:
    TK_DEVICE TokenReducer(TwoHopContext<Rec, Comm>& context, uint32_t receiver)
        : context_(context),
          warp_(context.warp),
          args_(context.args),
          channel_(context.channel()),
          receiver_(receiver) {}

    TK_DEVICE bool run() {
        const TaskRange range = own_tokens(context_);
        TK_NO_UNROLL
        for (uint32_t token = range.begin + receiver_; token < range.end; token += kNumReceivers) {
            const auto places = places_from_nodes(context_, token);
            if (!wait_tails(places)) return false;
            reduce_token(token, places);
            signal_reduced(token - range.begin + kNumReceivers);
        }
        return true;
    }

private:
    // The span ends with the sum that came last.
    TK_DEVICE bool wait_tails(const PerLane<int32_t>& places) {
        uint32_t missing = warp_.ballot([&](int lane) { return places[lane] >= 0; });
        if (!missing) return true;
        const auto flag_of = [&](int lane) {
            const auto node = static_cast<uint32_t>(lane), place = static_cast<uint32_t>(places[lane]);
            return args_.template from_node<uint64_t>(node, args_.tail_flag(channel_, node, place));
        };
        const auto least_of = [&](int lane) { return static_cast<uint32_t>(places[lane]) + 1; };
        uint32_t node = first_bit(missing);
        TK_WAIT(context_.recorder, TwoHopEvent::wait_tail, args_.rank_in(node), channel_);
        while (missing) {
            node = first_bit(missing);
            const auto place = static_cast<uint32_t>(warp_.shuffle(places, static_cast<int>(node)));
            const RingWait whom = context_.ring_wait(TwoHopRing::rdma, args_.rank_in(node), place, place);
            const uint32_t came = wait_any_at_least<TwoHopChannel::tail>(
                                      warp_, context_.comm, missing, flag_of, context_.epoch, least_of, whom)
                                      .lanes;
            if (!came) break;
            node = first_bit(came);
            missing &= ~came;
        }
        TK_END_IF(missing == 0,
                  args_.rank_in(node),
                  static_cast<uint32_t>(warp_.shuffle(places, static_cast<int>(node))) + 1);
        return missing == 0;
    }

    TK_DEVICE void reduce_token(uint32_t token, const PerLane<int32_t>& places) {
        const TwoHopCall& call = args_.call;
        const RowLayout& layout = args_.row;
        Contribution* list = warp_.template shared<TokenReducerShared>().results[receiver_];
        const uint32_t nodes = warp_.ballot([&](int lane) { return places[lane] >= 0; }), count = count_bits(nodes);
        warp_.sync();  // the list of the token before was read
        const uint32_t num_biases = list_biases(warp_, call, uint64_t{token} * layout.hidden_bytes, list);
        warp_.each_lane([&](int lane) {
            if (lane >= 32 || !(nodes >> lane & 1)) return;
            const auto node = static_cast<uint32_t>(lane);
            const uint64_t at = args_.rdma_row_in(channel_, node, static_cast<uint32_t>(places[lane]));
            list[num_biases + count_bits(nodes & ((1u << lane) - 1))] = {
                args_.template from_node<char>(node, at), 1.0f, Expert{}, node, 0};
        });
        warp_.sync();
        TK_RANGE(context_.recorder, TwoHopEvent::reduce_token, token);
        if (call.has_weights) {
            sum_weights(context_, list + num_biases, count, call.combined_topk_weights + uint64_t{token} * layout.topk);
        }
        char* to = call.combined_x + uint64_t{token} * layout.hidden_bytes;
        sum_rows<BFloat16, false, false, kRingLoads>(warp_, to, list, num_biases + count, args_.shape.hidden, 0, 1);
        TK_END(count);
    }

    // Released: the slots of this token were read.
    TK_DEVICE void signal_reduced(uint32_t next) {
        auto& shared = warp_.template shared<TokenReducerShared>();
        TK_SIGNAL(context_.recorder, TwoHopEvent::signal_reduced, channel_, receiver_, next);
        signal_block<TwoHopChannel::reduced>(warp_, &shared.reduced[receiver_], context_.epoch, next);
    }

    TwoHopContext<Rec, Comm>& context_;
    Warp& warp_;
    const TwoHopArgs<Comm>& args_;
    const uint32_t channel_, receiver_;
};

// ---- coordinator ----

template <class Rec, class Comm>
class ReceiverCoordinator {
public:
    TK_DEVICE explicit ReceiverCoordinator(TwoHopContext<Rec, Comm>& context)
        : context_(context), warp_(context.warp), args_(context.args) {}

    TK_DEVICE bool run() {
        const TaskRange range = own_tokens(context_);
        const uint32_t count = range.end - range.begin;
        auto heads = warp_.lanes([](int) { return 0u; }), returned = heads;
        for (uint32_t passed = 0; passed < count;) {
            const WaitResult slowest = wait_reduced(passed);
            if (!slowest.ok) return false;
            const uint32_t end = slowest.value < count ? slowest.value : count;
            heads = behind_places(warp_, heads, range.begin + passed, range.begin + end, [&](uint32_t token) {
                return places_from_nodes(context_, token);
            });
            passed = end;
            for (uint32_t risen = warp_.ballot([&](int lane) { return heads[lane] != returned[lane]; }); risen;
                 risen &= risen - 1) {
                const uint32_t node = first_bit(risen);
                return_credit(context_, node, warp_.shuffle(heads, static_cast<int>(node)));
            }
            returned = heads;
        }
        return true;
    }

private:
    // Waits for the receiver whose token is the next one; the value is how far all of them have come then.
    TK_DEVICE WaitResult wait_reduced(uint32_t passed) {
        const auto& shared = warp_.template shared<TokenReducerShared>();
        const uint32_t receiver = passed % kNumReceivers, channel = context_.channel();
        const auto wait_now = [&] {
            const RingWait whom = context_.ring_wait(TwoHopRing::rdma, context_.comm.rank, passed, passed);
            return wait_at_least<TwoHopChannel::reduced, Scope::block>(
                warp_, context_.comm, &shared.reduced[receiver], context_.epoch, passed + 1, whom);
        };
        const bool ok = record_wait<TwoHopEvent::wait_reduced>(context_, wait_now, channel, receiver, passed + 1).ok;
        return {ok, least_in_turns<TwoHopChannel::reduced>(shared.reduced, kNumReceivers, passed)};
    }

    TwoHopContext<Rec, Comm>& context_;
    Warp& warp_;
    const TwoHopArgs<Comm>& args_;
};

}  // namespace tracekern
