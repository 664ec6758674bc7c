// Dispatch, both hops, at the destination's node: a team of warps for each node hands its tokens to those peers that
// want them, and gives the slots of its ring back.
//
// Warps take the tokens in turns, in the order in which they came. Each reads its token once, writes it into the rings
// of all peers that want it, and waits for room there alone: see docs/two_hop.md for why that ends.
#pragma once

#include "moe/two_hop/call.h"
#include "moe/two_hop/turns.h"

namespace tracekern {

// Shared memory of a block with forwarders.
struct ForwarderShared {
    TurnFlags forwarded;
    char* target[kMaxTeamWarps][kMaxNodePeers];  // of each warp: where the token in hand is copied to
    uint32_t target_rank[kMaxTeamWarps][kMaxNodePeers];
};

// What travels behind the values of a row for `rank`, with experts as that rank counts them.
template <class Rec, class Comm, class WordOf>
TK_DEVICE void write_words(TwoHopContext<Rec, Comm>& context, uint32_t* to, uint32_t rank, WordOf word_of) {
    const RowLayout& row = context.args.row;
    const uint32_t num_local = context.args.shape.num_local_experts(), first_expert = rank * num_local;
    const auto is_local = [&](uint32_t k) {
        return word_of(row.first_idx() + k) - first_expert < num_local;  // -1 is of no rank
    };
    context.warp.strided_rolled(row.num_words(), [&](uint32_t i) {
        uint32_t word = word_of(i);
        if (i >= row.first_weight()) {
            word = is_local(i - row.first_weight()) ? word : 0;
        } else if (i >= row.first_idx()) {
            word = is_local(i - row.first_idx()) ? word - first_expert : ~0u;
        }
        to[i] = word;
    });
}

// Tells a peer which rows of its recv_x this channel has of a node: nvl_channel_prefix_start and _end. Each flag is its
// own payload: relaxed.
template <class Rec, class Comm>
TK_DEVICE void pass_prefix(
    TwoHopContext<Rec, Comm>& context, uint32_t peer, uint32_t node, uint32_t start, uint32_t end) {
    const TwoHopArgs<Comm>& args = context.args;
    const uint32_t channel = context.channel(), rank = args.neighbour(peer);
    TK_SIGNAL(context.recorder, TwoHopEvent::signal_prefix, rank, channel, node);
    auto* flags = context.comm.template at<uint64_t>(rank, args.prefix_flags(channel, args.peer(), node));
    signal_all_relaxed(context.warp, flags, 2, context.epoch, [&](uint32_t i) { return i == 0 ? start : end; });
}

// Waits for room for the row with this place in a node's part of a peer's ring; the value is the new head.
template <class Rec, class Comm>
TK_DEVICE WaitResult
wait_peer_ring(TwoHopContext<Rec, Comm>& context, uint32_t peer, uint32_t node, uint32_t head, uint32_t place) {
    const TwoHopArgs<Comm>& args = context.args;
    const uint32_t channel = context.channel(), rank = args.neighbour(peer), wanted = place + 1;
    const uint32_t slots = args.rings.part_slots;
    const auto wait_now = [&] {
        const auto* flag = args.template own<uint64_t>(args.peer_head_flag(channel, peer, node));
        const RingWait whom = context.ring_wait(TwoHopRing::nvl, rank, head, place);
        return wait_at_least<TwoHopChannel::peer_head>(
            context.warp, context.comm, flag, context.epoch, wanted - slots, whom);
    };
    return record_wait<TwoHopEvent::wait_peer_ring>(context, wait_now, rank, channel, node, wanted);
}

template <class Rec, class Comm>
class Forwarder {
    using Context = TwoHopContext<Rec, Comm>;

public:
    TK_DEVICE Forwarder(Context& context, const Teams& teams)
        : context_(context),
          warp_(context.warp),
          args_(context.args),
          channel_(context.channel()),
          node_(teams.team_of(context.warp.warp)),
          turns_(context, warp_.template shared<ForwarderShared>().forwarded, teams, node_, TwoHopRing::rdma) {}

    TK_DEVICE bool run() {
        const uint32_t peers = args_.nodes.peers;
        for (uint32_t i = 0; i < peers; ++i) {
            if (!wait_peer_over(context_, (args_.peer() + i) % peers)) return false;
        }
        if (!wait_meta()) return false;
        const uint32_t before = prefix_sum(2 * peers);
        const auto of_nodes = static_cast<uint32_t>(node_ == 0 ? 0 : args_.call.recv_rdma_rank_prefix_sum[node_ - 1]);
        first_row_ = of_nodes + before;
        count_ = prefix_sum(2 * peers + 1) - before;
        const uint64_t begin = uint64_t{of_nodes} + before;
        if (!context_.has_rows(begin, begin + count_, args_.call.forward_capacity)) return false;
        known_heads_ = sent_ = told_ = warp_.lanes([](int) { return 0u; });
        if (turns_.place().is_coordinator()) pass_prefixes();
        if (turns_.place().is_worker()) return forward_tokens();
        return turns_.follow(count_, [&](uint32_t first, uint32_t end) { pass(first, end); });
    }

private:
    // ---- what the channel brings ----

    TK_DEVICE bool wait_meta() {
        const uint32_t rank = args_.rank_in(node_);
        const auto wait_now = [&] {
            const auto* flag = args_.template from_node<uint64_t>(node_, args_.meta_flag(channel_, node_));
            const RingWait whom = context_.ring_wait(TwoHopRing::rdma, rank, 0, 0);
            return wait<TwoHopChannel::meta>(warp_, context_.comm, flag, context_.epoch, whom);
        };
        return record_wait<TwoHopEvent::wait_meta>(context_, wait_now, rank, channel_).ok;
    }

    // A word of the node's metadata; it came as -v - 1.
    TK_DEVICE uint32_t prefix_sum(uint32_t word) const {
        return static_cast<uint32_t>(-args_.template from_node<int32_t>(node_, args_.meta_in(channel_, node_))[word] -
                                     1);
    }

    // To each peer nvl_channel_prefix_start and _end of the node.
    TK_DEVICE void pass_prefixes() {
        const uint32_t peers = args_.nodes.peers;
        for (uint32_t i = 0; i < peers; ++i) {
            const uint32_t peer = (args_.peer() + i) % peers;
            pass_prefix(context_, peer, node_, prefix_sum(peer), prefix_sum(peers + peer));
        }
        warp_.leader([&] {
            args_.call.recv_rdma_channel_prefix_matrix[node_ * args_.num_channels + channel_] =
                static_cast<int32_t>(prefix_sum(2 * peers + 1));
        });
    }

    // ---- those that copy ----

    TK_DEVICE bool forward_tokens() {
        TK_NO_UNROLL
        for (uint32_t position = turns_.place().index; position < count_; position += turns_.place().num_workers()) {
            if (!wait_tail(position)) return false;
            const auto places = places_of(position);
            if (!wait_room(places)) return false;
            forward_token(position, places);
            if (turns_.place().is_coordinator()) {
                pass(position, position + 1);
            } else {
                turns_.done(position);  // released: the rows, and this slot was read
            }
        }
        return true;
    }

    // Asks for its own chunk alone: a flag may already tell of the one that comes a ring later, if that is the last and
    // short, and it may overtake those between.
    TK_DEVICE bool wait_tail(uint32_t position) {
        const uint32_t rank = args_.rank_in(node_);
        const auto* flag = args_.template from_node<uint64_t>(node_, args_.tail_flag(channel_, node_, position));
        const RingWait whom = context_.ring_wait(TwoHopRing::rdma, rank, position, position);
        TK_WAIT(context_.recorder, TwoHopEvent::wait_tail, rank, channel_);
        const bool ok =
            wait_at_least<TwoHopChannel::tail>(warp_, context_.comm, flag, context_.epoch, position + 1, whom).ok;
        TK_END_IF(ok, rank, position + 1);
        return ok;
    }

    TK_DEVICE char* row_of(uint32_t position) const {
        return args_.template from_node<char>(node_, args_.rdma_row_in(channel_, node_, position));
    }

    // A lane a peer: the token's place in the ring there, -1: it does not want it.
    TK_DEVICE PerLane<int32_t> places_of(uint32_t position) const {
        const uint32_t* words = args_.row.words(row_of(position)) + args_.row.first_place();
        return warp_.lanes([&](int lane) {
            return static_cast<uint32_t>(lane) < args_.nodes.peers ? static_cast<int32_t>(words[lane]) : -1;
        });
    }

    TK_DEVICE bool wait_room(const PerLane<int32_t>& places) {
        const uint32_t slots = args_.rings.part_slots;
        const auto lacks_room = [&](int lane) {
            return places[lane] >= 0 && static_cast<uint32_t>(places[lane]) >= known_heads_[lane] + slots;
        };
        for (uint32_t full = warp_.ballot(lacks_room); full; full &= full - 1) {
            const uint32_t peer = first_bit(full);
            const auto place = static_cast<uint32_t>(warp_.shuffle(places, static_cast<int>(peer)));
            const uint32_t head = warp_.shuffle(known_heads_, static_cast<int>(peer));
            const WaitResult came = wait_peer_ring(context_, peer, node_, head, place);
            if (!came.ok) return false;
            set_lane(warp_, known_heads_, peer, came.value);
        }
        return true;
    }

    TK_DEVICE void forward_token(uint32_t position, const PerLane<int32_t>& places) {
        auto& shared = warp_.template shared<ForwarderShared>();
        char** targets = shared.target[warp_.warp];
        uint32_t* ranks = shared.target_rank[warp_.warp];
        const uint32_t peers = warp_.ballot([&](int lane) { return places[lane] >= 0; }), count = count_bits(peers);
        warp_.sync();  // the list of the token before was read
        warp_.each_lane([&](int lane) {
            const auto peer = static_cast<uint32_t>(lane);
            if (peer >= args_.nodes.peers) return;
            const uint64_t row = uint64_t{first_row_} + position;
            if (row < args_.call.forward_capacity) {
                args_.call.send_nvl_head[row * args_.nodes.peers + peer] = places[lane];
            }
            if (places[lane] < 0) return;
            const uint32_t i = count_bits(peers & ((1u << lane) - 1));
            const uint64_t at = args_.nvl_row(channel_, args_.peer(), node_, static_cast<uint32_t>(places[lane]));
            ranks[i] = args_.neighbour(peer);
            targets[i] = context_.comm.template at<char>(ranks[i], at);
        });
        warp_.sync();
        TK_RANGE(context_.recorder, TwoHopEvent::forward_token, node_, position);
        const RowLayout& layout = args_.row;
        char* row = row_of(position);
        copy_to_targets(warp_, targets, count, row, layout.hidden_bytes);
        const uint32_t* words = layout.words(row);
        TK_NO_UNROLL
        for (uint32_t i = 0; i < count; ++i) {
            write_words(context_, layout.words(targets[i]), ranks[i], [&](uint32_t k) { return words[k]; });
        }
        TK_END(count);
    }

    // ---- behind the slowest of them ----

    // Tokens of [first, end) were forwarded: tells the peers, and gives their slots back.
    TK_DEVICE void pass(uint32_t first, uint32_t end) {
        sent_ = behind_places(warp_, sent_, first, end, [&](uint32_t position) { return places_of(position); });
        tell_peers_of_rows(end == count_);
        for (uint32_t position = first; position < end; ++position) poison(row_of(position), args_.row.bytes);
        return_credit(context_, node_, end);
    }

    // As soon as one has a chunk, or at last. Released: the rows, which the team's warps released to this one.
    TK_DEVICE void tell_peers_of_rows(bool is_last) {
        const uint32_t chunk = args_.rings.part_chunk;
        const uint32_t untold = warp_.ballot([&](int lane) { return sent_[lane] != told_[lane]; });
        if (!is_last && !warp_.ballot([&](int lane) { return sent_[lane] - told_[lane] >= chunk; })) return;
        const auto flag_of = [&](int lane) {
            const uint64_t flag = args_.peer_tail_flag(channel_, args_.peer(), node_);
            return context_.comm.template at<uint64_t>(args_.neighbour(static_cast<uint32_t>(lane)), flag);
        };
        for (uint32_t peers = untold; peers; peers &= peers - 1) {
            [[maybe_unused]] const uint32_t peer = first_bit(peers);
            TK_SIGNAL(context_.recorder,
                      TwoHopEvent::signal_peer_tail,
                      args_.neighbour(peer),
                      channel_,
                      node_,
                      warp_.shuffle(sent_, static_cast<int>(peer)));
            if (peers & (peers - 1)) continue;
            // All at once: each release waits for what is under way.
            const auto value_of = [&](int lane) { return sent_[lane]; };
            signal_all<TwoHopChannel::peer_tail>(warp_, untold, flag_of, context_.epoch, value_of);
        }
        told_ = sent_;
    }

    Context& context_;
    Warp& warp_;
    const TwoHopArgs<Comm>& args_;
    const uint32_t channel_, node_;
    Turns<Context, TwoHopChannel::forwarded, TwoHopEvent::signal_forwarded, TwoHopEvent::wait_forwarded> turns_;
    uint32_t first_row_ = 0, count_ = 0;  // of send_nvl_head, and how many tokens
    PerLane<uint32_t> known_heads_;       // of the peers' rings, a lane a peer
    PerLane<uint32_t> sent_, told_;       // rows in the peers' rings
};

}  // namespace tracekern
