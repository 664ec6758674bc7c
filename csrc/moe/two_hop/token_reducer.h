// Combine, second hop, at the source: receivers add up what came back for a token from all nodes, in fp32 and in the
// order of the nodes, and a coordinator gives the rings' slots back.
//
// Receivers take the channel's tokens in turns. A slot is free when all tokens up to its own were added up, by
// whichever receiver: the coordinator goes through the tokens behind the slowest of them.
#pragma once

#include "moe/two_hop/node_reducer.h"

namespace tracekern {

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
            return args_.template own<uint64_t>(args_.tail_flag(channel_, node, place));
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
                args_.template own<char>(at), 1.0f, Expert{}, node, 0};
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
