// Dispatch, first hop, at the source: senders copy tokens into the rings to other nodes, and a coordinator tells of
// what they have copied, a chunk at a time. Where a node is another host they copy it for the proxy, and the
// coordinator asks for the write.
//
// Senders take the channel's tokens in turns, a token a warp. Which place a token gets in the rings is settled under a
// lock that goes round in the order of tokens; the copy comes after it. A sender says under its next lock that the copy
// is done: by then all tokens before its own were copied, by senders that have held the lock since. So a tail says that
// everything before it is there.
#pragma once

#include "moe/rows.h"
#include "moe/two_hop/call.h"

namespace tracekern {

// Shared memory of a block with senders.
struct SenderShared {
    uint64_t rdma_send_next_token_idx;                    // lock: whose turn it is
    uint64_t rdma_send_channel_tail[kMaxTwoHopNodes];     // ready: tokens that were copied into the ring to a node
    uint32_t next_tail[kMaxTwoHopNodes];                  // under the lock: places that were given out
    uint32_t next_place[kMaxTwoHopNodes][kMaxNodePeers];  // likewise, of the rings within the nodes
    // Of each sender: where the token in hand is copied to, and what it has there behind its values.
    char* target[kNumSenders][kMaxTwoHopNodes];
    uint32_t target_node[kNumSenders][kMaxTwoHopNodes];
    uint32_t peers[kNumSenders][kMaxTwoHopNodes];
    int32_t places[kNumSenders][kMaxTwoHopNodes][kMaxNodePeers];
};

// ---- senders ----

template <class Rec, class Comm>
TK_DEVICE bool send_tokens(TwoHopContext<Rec, Comm>& context) {
    Warp& warp = context.warp;
    const TwoHopArgs<Comm>& args = context.args;
    const uint32_t num_nodes = args.nodes.num_nodes;
    for (uint32_t i = 0; i < num_nodes; ++i) {
        const uint32_t node = (args.node() + i) % num_nodes;
        if (!wait_node_over(context, node)) return false;
        if (i % kNumSenders == warp.warp) send_meta(context, node);
    }

    auto head = warp.lanes([](int) { return 0u; });
    auto copied = warp.lanes([](int) { return 0u; });  // tails behind the token before; 0: it did not go there
    const TaskRange range = TaskRange::of(args.call.num_tokens, args.num_channels, context.channel());
    uint32_t token = range.begin + warp.warp;
    TK_NO_UNROLL
    for (; token < range.end; token += kNumSenders) {
        const auto peers = wanted_peers(context, token);
        if (!wait_sequential_lock(context, token, range.begin)) return false;
        publish_tails(context, copied);  // before the wait for room, which may need this tail
        const auto tail = take_places(context, peers);
        if (!wait_ring_space(context, tail, head)) return false;
        pass_sequential_lock(context, token + 1, range.begin);

        warp.each_lane([&](int lane) {
            if (static_cast<uint32_t>(lane) >= num_nodes) return;
            args.call.send_rdma_head[uint64_t{token} * num_nodes + static_cast<uint32_t>(lane)] =
                static_cast<int32_t>(tail[lane]) - 1;
        });
        const uint32_t num_targets = list_targets(context, tail, peers);
        TK_RANGE(context.recorder, TwoHopEvent::copy_to_ring, token);
        copy_to_rings(context, token, num_targets);
        TK_END(num_targets);
        copied = tail;
    }
    return publish_last(context, token, range.begin, copied);
}

// 2 * peers + 2 prefix sums for each node: tokens for each of its ranks before this channel and up to its end, then for
// the node. As -v - 1, where 0 is no sum. The flag says of which call they are.
template <class Rec, class Comm>
TK_DEVICE void send_meta(TwoHopContext<Rec, Comm>& context, uint32_t node) {
    const TwoHopArgs<Comm>& args = context.args;
    const uint32_t channel = context.channel(), peers = args.nodes.peers, num_words = 2 * peers + 2;
    auto* meta = args.template to_node<int32_t>(node, args.meta_out(channel, node));
    context.warp.strided(num_words, [&](uint32_t i) {
        const bool is_of_node = i >= 2 * peers;
        const bool is_before = is_of_node ? i == 2 * peers : i < peers;
        const int32_t* sums =
            is_of_node ? args.call.rdma_channel_prefix_matrix + uint64_t{node} * args.num_channels
                       : args.call.gbl_channel_prefix_matrix + uint64_t{node * peers + i % peers} * args.num_channels;
        const int32_t sum = !is_before ? sums[channel] : channel == 0 ? 0 : sums[channel - 1];
        meta[i] = -sum - 1;
    });
    const uint32_t rank = args.rank_in(node);
    TK_SIGNAL(context.recorder, TwoHopEvent::signal_meta, rank, channel);
    // Released with the block.
    put_to_node<TwoHopChannel::meta>(context,
                                     node,
                                     {.kind = PutKind::message, .which = channel},
                                     args.meta_flag(channel, args.node()),
                                     0,
                                     {.src = args.meta_out(channel, node),
                                      .dst = args.meta_in(channel, args.node()),
                                      .bytes = num_words * static_cast<uint32_t>(sizeof(int32_t))});
}

// Of each node, a lane a node: which peers there want the token, a bit each.
template <class Rec, class Comm>
TK_DEVICE PerLane<uint32_t> wanted_peers(TwoHopContext<Rec, Comm>& context, uint32_t token) {
    const TwoHopArgs<Comm>& args = context.args;
    const uint32_t peers = args.nodes.peers;
    const uint8_t* ranks = args.call.is_token_in_rank + uint64_t{token} * args.nodes.num_ranks();
    return context.warp.lanes([&](int lane) {
        uint32_t wanted = 0;
        if (static_cast<uint32_t>(lane) < args.nodes.num_nodes) {
            for (uint32_t peer = 0; peer < peers; ++peer) {
                wanted |= uint32_t{ranks[static_cast<uint32_t>(lane) * peers + peer] != 0} << peer;
            }
        }
        return wanted;
    });
}

// first: token of the channel. What is on record begins at 0, so that nobody is waited for at first.
template <class Rec, class Comm>
TK_DEVICE bool wait_sequential_lock(TwoHopContext<Rec, Comm>& context, uint32_t token, uint32_t first) {
    const auto& shared = context.warp.template shared<SenderShared>();
    const auto wait_now = [&] {
        const RingWait whom = context.ring_wait(TwoHopRing::rdma, context.comm.rank, 0, token);
        return wait_at_least<TwoHopChannel::lock, Scope::block>(
            context.warp, context.comm, &shared.rdma_send_next_token_idx, context.epoch, token, whom);
    };
    return record_wait<TwoHopEvent::wait_sequential_lock>(context, wait_now, context.channel(), token - first).ok;
}

// Released: the next owner finds next_tail, and the copies that this sender has said are done.
template <class Rec, class Comm>
TK_DEVICE void pass_sequential_lock(TwoHopContext<Rec, Comm>& context, uint32_t token, uint32_t first) {
    auto& shared = context.warp.template shared<SenderShared>();
    TK_SIGNAL(context.recorder, TwoHopEvent::pass_sequential_lock, context.channel(), token - first);
    signal_block<TwoHopChannel::lock>(context.warp, &shared.rdma_send_next_token_idx, context.epoch, token);
}

// Publishes tails, a lane a node: those that are not 0. Under the lock.
template <class Rec, class Comm>
TK_DEVICE void publish_tails(TwoHopContext<Rec, Comm>& context, const PerLane<uint32_t>& tail) {
    Warp& warp = context.warp;
    auto& shared = warp.template shared<SenderShared>();
    for (uint32_t nodes = warp.ballot([&](int lane) { return tail[lane] != 0; }); nodes; nodes &= nodes - 1) {
        const uint32_t node = first_bit(nodes);
        const uint32_t value = warp.shuffle(tail, static_cast<int>(node));
        TK_SIGNAL(context.recorder, TwoHopEvent::signal_ready, context.channel(), node, value);
        // Released: the copies of this sender, and by way of the lock those of all tokens before.
        signal_block<TwoHopChannel::ready>(warp, &shared.rdma_send_channel_tail[node], context.epoch, value);
    }
}

// Takes the token's places, a lane a node, under the lock: in the rings to the nodes, which are returned as tails, 0
// where it does not go, and in those that it takes within them.
template <class Rec, class Comm>
TK_DEVICE PerLane<uint32_t> take_places(TwoHopContext<Rec, Comm>& context, const PerLane<uint32_t>& peers) {
    Warp& warp = context.warp;
    auto& shared = warp.template shared<SenderShared>();
    return warp.lanes([&](int lane) {
        if (!peers[lane]) return 0u;
        for (uint32_t peer = 0; peer < context.args.nodes.peers; ++peer) {
            uint32_t& next = shared.next_place[lane][peer];
            shared.places[warp.warp][lane][peer] = peers[lane] >> peer & 1 ? static_cast<int32_t>(next++) : -1;
        }
        return ++shared.next_tail[lane];
    });
}

// The heads of the rings to all nodes as a sender knows them, a lane a node.
template <class Rec, class Comm>
TK_DEVICE bool wait_ring_space(TwoHopContext<Rec, Comm>& context,
                               const PerLane<uint32_t>& tail,
                               PerLane<uint32_t>& head) {
    Warp& warp = context.warp;
    const TwoHopArgs<Comm>& args = context.args;
    const uint32_t slots = args.rings.rdma_slots, channel = context.channel();
    const auto lacks_room = [&](int lane) { return tail[lane] > head[lane] + slots; };
    for (uint32_t full = warp.ballot(lacks_room); full; full &= full - 1) {
        const uint32_t node = first_bit(full), rank = args.rank_in(node);
        const uint32_t wanted = warp.shuffle(tail, static_cast<int>(node));
        const RingWait whom =
            context.ring_wait(TwoHopRing::rdma, rank, warp.shuffle(head, static_cast<int>(node)), wanted - 1);
        const auto wait_now = [&] {
            const auto* flag = args.template from_node<uint64_t>(node, args.head_flag(channel, node));
            return wait_at_least<TwoHopChannel::head>(warp, context.comm, flag, context.epoch, wanted - slots, whom);
        };
        const WaitResult came = record_wait<TwoHopEvent::wait_ring_space>(context, wait_now, rank, channel, wanted);
        if (!came.ok) return false;
        set_lane(warp, head, node, came.value);
    }
    return true;
}

// Lists for this sender where the token goes: place by place of those lanes that have a tail.
template <class Rec, class Comm>
TK_DEVICE uint32_t list_targets(TwoHopContext<Rec, Comm>& context,
                                const PerLane<uint32_t>& tail,
                                const PerLane<uint32_t>& peers) {
    Warp& warp = context.warp;
    auto& shared = warp.template shared<SenderShared>();
    const uint32_t nodes = warp.ballot([&](int lane) { return tail[lane] != 0; });
    warp.sync();  // the list of the token before was read
    warp.each_lane([&](int lane) {
        if (lane >= 32 || !(nodes >> lane & 1)) return;
        const uint32_t i = count_bits(nodes & ((1u << lane) - 1)), node = static_cast<uint32_t>(lane);
        shared.target[warp.warp][i] = outgoing_row(context, node, tail[lane] - 1);
        shared.target_node[warp.warp][i] = node;
        shared.peers[warp.warp][node] = peers[lane];
    });
    warp.sync();
    return count_bits(nodes);
}

// Where a row for `node` is written: where it arrives, or whence the proxy takes it.
template <class Rec, class Comm>
TK_DEVICE char* outgoing_row(const TwoHopContext<Rec, Comm>& context, uint32_t node, uint32_t position) {
    const TwoHopArgs<Comm>& args = context.args;
    const uint32_t channel = context.channel(), rank = args.rank_in(node);
    if (is_far(context, rank)) return args.template to_node<char>(node, args.rdma_row_out(channel, node, position));
    return args.comm.template at<char>(rank, args.rdma_row_in(channel, args.node(), position));
}

template <class Rec, class Comm>
TK_DEVICE void copy_to_rings(TwoHopContext<Rec, Comm>& context, uint32_t token, uint32_t num_targets) {
    Warp& warp = context.warp;
    const TwoHopCall& call = context.args.call;
    const RowLayout& row = context.args.row;
    const auto& shared = warp.template shared<SenderShared>();
    char* const* targets = shared.target[warp.warp];
    copy_to_targets(warp, targets, num_targets, call.x + uint64_t{token} * row.hidden_bytes, row.hidden_bytes);
    const auto word_for_node = [&](uint32_t node, uint32_t i) {
        return i == 1 ? shared.peers[warp.warp][node]
                      : static_cast<uint32_t>(shared.places[warp.warp][node][i - row.first_place()]);
    };
    warp.strided_rolled(row.num_words(), [&](uint32_t i) {
        const uint32_t word = word_of_token(context, token, i);
        const bool is_of_node = i >= 1 && i < row.first_scale();
        TK_NO_UNROLL
        for (uint32_t k = 0; k < num_targets; ++k) {
            row.words(targets[k])[i] = is_of_node ? word_for_node(shared.target_node[warp.warp][k], i) : word;
        }
    });
}

// What travels behind a token's values, but for what differs from node to node: the peers that want it, and its places.
template <class Rec, class Comm>
TK_DEVICE uint32_t word_of_token(const TwoHopContext<Rec, Comm>& context, uint32_t token, uint32_t i) {
    const TwoHopCall& call = context.args.call;
    const RowLayout& row = context.args.row;
    if (i >= row.first_weight()) {
        return bits_as<uint32_t>(call.topk_weights[uint64_t{token} * row.topk + i - row.first_weight()]);
    }
    if (i >= row.first_idx()) {
        return static_cast<uint32_t>(call.topk_idx[uint64_t{token} * row.topk + i - row.first_idx()]);
    }
    if (i >= row.first_scale()) {
        return bits_as<uint32_t>(call.x_scales[uint64_t{token} * row.num_scales + i - row.first_scale()]);
    }
    return context.args.node();
}

// Each sender has one more turn behind the last token, to publish its last tails.
template <class Rec, class Comm>
TK_DEVICE bool publish_last(TwoHopContext<Rec, Comm>& context,
                            uint32_t turn,
                            uint32_t first,
                            const PerLane<uint32_t>& copied) {
    if (does_as_published(TwoHopChannel::ready)) return true;
    if (!wait_sequential_lock(context, turn, first)) return false;
    publish_tails(context, copied);
    pass_sequential_lock(context, turn + 1, first);
    return true;
}

// ---- coordinator ----

template <class Rec, class Comm>
TK_DEVICE bool coordinate_sends(TwoHopContext<Rec, Comm>& context) {
    Warp& warp = context.warp;
    const TwoHopArgs<Comm>& args = context.args;
    const uint32_t num_nodes = args.nodes.num_nodes, channel = context.channel();
    const auto total = warp.lanes([&](int lane) {
        if (static_cast<uint32_t>(lane) >= num_nodes) return 0u;
        const int32_t* sums =
            args.call.rdma_channel_prefix_matrix + static_cast<uint32_t>(lane) * uint64_t{args.num_channels};
        return static_cast<uint32_t>(sums[channel] - (channel == 0 ? 0 : sums[channel - 1]));
    });
    auto issued = warp.lanes([](int) { return 0u; });
    const auto next = [&](int lane) {
        const uint32_t chunk = issued[lane] + args.rings.rdma_chunk;
        return chunk < total[lane] ? chunk : total[lane];
    };
    for (uint32_t node = channel % num_nodes;;) {
        const uint32_t left = warp.ballot([&](int lane) { return issued[lane] < total[lane]; });
        if (!left) return true;
        const uint32_t ready = wait_chunk(context, left, node, next);
        if (!ready) return false;
        for (uint32_t i = 0; i < num_nodes; ++i, node = (node + 1) % num_nodes) {
            if (!(ready >> node & 1)) continue;
            const uint32_t first = warp.shuffle(issued, static_cast<int>(node));
            const uint32_t end = warp.shuffle(warp.lanes(next), static_cast<int>(node));
            issue_chunk(context, node, first, end - first);
        }
        issued = warp.lanes([&](int lane) { return lane < 32 && ready >> lane & 1 ? next(lane) : issued[lane]; });
    }
}

// The nodes of those in `left` for which a chunk, or the rest, was copied; 0: gave up. The span is of the first of
// them from `turn` on.
template <class Rec, class Comm, class Next>
TK_DEVICE uint32_t wait_chunk(TwoHopContext<Rec, Comm>& context, uint32_t left, uint32_t turn, Next next) {
    Warp& warp = context.warp;
    const auto& shared = warp.template shared<SenderShared>();
    const auto flag_of = [&](int lane) { return &shared.rdma_send_channel_tail[lane]; };
    const RingWait whom = context.ring_wait(TwoHopRing::rdma, context.comm.rank, 0, 0);
    TK_WAIT(context.recorder, TwoHopEvent::wait_chunk, context.channel());
    const Arrived ready = wait_any_at_least<TwoHopChannel::ready, Scope::block>(
        warp, context.comm, left, flag_of, context.epoch, next, whom);
    const uint32_t first = first_in_turn(ready.lanes, turn);
    TK_END_IF(ready.lanes != 0, first, warp.shuffle(warp.lanes(next), static_cast<int>(first)));
    return ready.lanes;
}

// Tells of a chunk that was copied. Released: its rows, which those that copied them released to this warp. A write to
// another host carries them.
template <class Rec, class Comm>
TK_DEVICE void issue_chunk(TwoHopContext<Rec, Comm>& context, uint32_t node, uint32_t first, uint32_t count) {
    const TwoHopArgs<Comm>& args = context.args;
    const uint32_t channel = context.channel(), rank = args.rank_in(node), tail = first + count;
    const uint64_t flag = args.tail_flag(channel, args.node(), first);
    const Immediate imm{.kind = PutKind::chunk, .which = channel, .n = tail};
    TK_SIGNAL(context.recorder, TwoHopEvent::signal_tail, rank, channel, tail, count);
    if (is_far(context, rank)) {
        // A chunk begins at a multiple of its size, which divides the ring: its rows lie side by side.
        TK_RANGE(context.recorder, TwoHopEvent::issue_put, node, count);
        put_to_node<TwoHopChannel::tail>(context,
                                         node,
                                         imm,
                                         flag,
                                         tail,
                                         {.src = args.rdma_row_out(channel, node, first),
                                          .dst = args.rdma_row_in(channel, args.node(), first),
                                          .bytes = count * args.row.bytes});
    } else {
        put_to_node<TwoHopChannel::tail>(context, node, imm, flag, tail);
    }
}

}  // namespace tracekern
