// Dispatch, both hops, at the destination's node: forwarders hand what comes from other nodes to the peers of theirs,
// and a coordinator gives the rings' slots back to where they came from.
//
// A forwarder is for one peer. It goes through all tokens of all nodes, whatever comes next, and copies those that its
// peer wants. It never waits for one node while another has tokens: see docs/two_hop.md for why that matters.
#pragma once

#include "moe/roles.h"
#include "moe/two_hop/call.h"

namespace tracekern {

// Shared memory of a block with forwarders.
struct ForwarderShared {
    uint64_t forward_channel_head[kMaxNodePeers][kMaxTwoHopNodes];  // forwarded: tokens that this forwarder has passed
    uint64_t forward_channel_retired[kMaxNodePeers];                // retired: it has passed all of the call
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

// What a forwarder knows of the nodes, a lane a node.
struct Sources {
    PerLane<uint32_t> left;       // tokens that have not been passed
    PerLane<uint32_t> head;       // that have
    PerLane<uint32_t> first_row;  // of send_nvl_head
    PerLane<uint32_t> num_sent;   // of those passed: tokens that the peer wants
};

template <class Rec, class Comm>
class Forwarder {
public:
    TK_DEVICE Forwarder(TwoHopContext<Rec, Comm>& context, uint32_t target_peer)
        : context_(context),
          warp_(context.warp),
          args_(context.args),
          channel_(context.channel()),
          peer_(target_peer),
          rank_(context.args.neighbour(target_peer)) {}

    TK_DEVICE bool run() {
        if (!wait_metas()) return false;
        pass_prefixes();
        Sources sources = read_metas();
        for (uint32_t turn = channel_ % args_.nodes.num_nodes;;) {
            const uint32_t left = warp_.ballot([&](int lane) { return sources.left[lane] != 0; });
            if (!left) break;
            if (!wait_peer_ring()) return false;
            const NextChunk chunk = wait_tail(sources, left, turn);
            if (!chunk.ok) return false;
            forward_chunk(sources, chunk);
            turn = (chunk.node + 1) % args_.nodes.num_nodes;
        }
        // Released with its last heads. Nobody needs it to be: these are for tokens that nobody waits to send.
        auto& shared = warp_.template shared<ForwarderShared>();
        signal_block<TwoHopChannel::retired>(warp_, &shared.forward_channel_retired[peer_], context_.epoch, 0);
        return true;
    }

private:
    struct NextChunk {
        bool ok;
        uint32_t node;
        uint32_t tail;  // tokens that have come from there
    };

    // ---- what the channel brings ----

    TK_DEVICE bool wait_metas() {
        for (uint32_t i = 0; i < args_.nodes.num_nodes; ++i) {
            const uint32_t node = (args_.node() + i) % args_.nodes.num_nodes, rank = args_.rank_in(node);
            const auto wait_now = [&] {
                const auto* flag = args_.template own<uint64_t>(args_.meta_flag(channel_, node));
                const RingWait whom = context_.ring_wait(TwoHopRing::rdma, rank, 0, 0);
                return wait<TwoHopChannel::meta>(warp_, context_.comm, flag, context_.epoch, whom);
            };
            if (!record_wait<TwoHopEvent::wait_meta>(context_, wait_now, rank, channel_).ok) return false;
        }
        return true;
    }

    // A word of a node's metadata; it came as -v - 1.
    TK_DEVICE uint32_t prefix_sum(uint32_t node, uint32_t word) const {
        return static_cast<uint32_t>(-args_.template own<int32_t>(args_.meta_in(channel_, node))[word] - 1);
    }

    // nvl_channel_prefix_start of all nodes, then nvl_channel_prefix_end. Each flag is its own payload: relaxed.
    TK_DEVICE void pass_prefixes() {
        const uint32_t num_nodes = args_.nodes.num_nodes, peers = args_.nodes.peers;
        TK_SIGNAL(context_.recorder, TwoHopEvent::signal_prefix, rank_, channel_);
        auto* flags = context_.comm.template at<uint64_t>(rank_, args_.prefix_flags(channel_, args_.peer()));
        signal_all_relaxed(warp_, flags, 2 * num_nodes, context_.epoch, [&](uint32_t i) {
            return i < num_nodes ? prefix_sum(i, peer_) : prefix_sum(i - num_nodes, peers + peer_);
        });
    }

    TK_DEVICE Sources read_metas() {
        const TwoHopCall& call = args_.call;
        const uint32_t peers = args_.nodes.peers;
        Sources sources;
        const auto of_nodes = [&](auto of_node) {
            return warp_.lanes([&](int lane) {
                const uint32_t node = static_cast<uint32_t>(lane);
                return node < args_.nodes.num_nodes ? of_node(node) : 0u;
            });
        };
        sources.head = sources.num_sent = warp_.lanes([](int) { return 0u; });
        sources.left =
            of_nodes([&](uint32_t node) { return prefix_sum(node, 2 * peers + 1) - prefix_sum(node, 2 * peers); });
        sources.first_row = of_nodes([&](uint32_t node) {
            const int32_t before = node == 0 ? 0 : call.recv_rdma_rank_prefix_sum[node - 1];
            return static_cast<uint32_t>(before) + prefix_sum(node, 2 * peers);
        });
        if (peer_ != args_.peer()) return sources;  // all forwarders of the channel would write the same
        warp_.strided(args_.nodes.num_nodes, [&](uint32_t node) {
            call.recv_rdma_channel_prefix_matrix[node * args_.num_channels + channel_] =
                static_cast<int32_t>(prefix_sum(node, 2 * peers + 1));
        });
        return sources;
    }

    // ---- waits ----

    // Room for a chunk in the peer's ring.
    TK_DEVICE bool wait_peer_ring() {
        const uint32_t slots = args_.rings.nvl_slots, wanted = tail_ + args_.rings.nvl_chunk;
        if (wanted <= known_head_ + slots) return true;
        const auto wait_now = [&] {
            const auto* flag = args_.template own<uint64_t>(args_.peer_head_flag(channel_, peer_));
            const RingWait whom = context_.ring_wait(TwoHopRing::nvl, rank_, known_head_, tail_);
            return wait_at_least<TwoHopChannel::peer_head>(
                warp_, context_.comm, flag, context_.epoch, wanted - slots, whom);
        };
        const WaitResult came = record_wait<TwoHopEvent::wait_peer_ring>(context_, wait_now, rank_, channel_, wanted);
        known_head_ = came.value;
        return came.ok;
    }

    // The next node from `turn` on, of those in `left`, of which a chunk has come.
    TK_DEVICE NextChunk wait_tail(const Sources& sources, uint32_t left, uint32_t turn) {
        const uint32_t expected = first_in_turn(left, turn);
        const auto flag_of = [&](int lane) {
            const uint32_t node = static_cast<uint32_t>(lane);
            return args_.template own<uint64_t>(args_.tail_flag(channel_, node, sources.head[lane]));
        };
        const auto least_of = [&](int lane) { return sources.head[lane] + 1; };
        const uint32_t head = warp_.shuffle(sources.head, static_cast<int>(expected));
        const RingWait whom = context_.ring_wait(TwoHopRing::rdma, args_.rank_in(expected), head, head);
        TK_WAIT(context_.recorder, TwoHopEvent::wait_tail, args_.rank_in(expected), channel_);
        const Arrived came =
            wait_any_at_least<TwoHopChannel::tail>(warp_, context_.comm, left, flag_of, context_.epoch, least_of, whom);
        const uint32_t node = first_in_turn(came.lanes, turn);
        TK_END_IF(came.lanes != 0, args_.rank_in(node), warp_.shuffle(sources.head, static_cast<int>(node)) + 1);
        return {came.lanes != 0, node, warp_.shuffle(came.value, static_cast<int>(node))};
    }

    // ---- tokens ----

    // Goes through the tokens of a node that have come, until it has handed on a chunk.
    TK_DEVICE void forward_chunk(Sources& sources, const NextChunk& chunk) {
        const auto of_node = [&](const PerLane<uint32_t>& values) {
            return warp_.shuffle(values, static_cast<int>(chunk.node));
        };
        const uint32_t head = of_node(sources.head), num_sent = of_node(sources.num_sent);
        const uint32_t first_row = of_node(sources.first_row), left = of_node(sources.left);
        // Of this chunk alone: its flag may already tell of the one that comes a ring later, if that is the last and
        // short. Then it has room behind a head in the middle of this chunk, and may overtake those between.
        const uint32_t chunk_end = head - head % args_.rings.rdma_chunk + args_.rings.rdma_chunk;
        const uint32_t tail = chunk.tail < chunk_end ? chunk.tail : chunk_end;
        // It says no more than is left, unless a fault was planted.
        const uint32_t end = tail - head < left ? tail : head + left;
        const uint32_t room = does_as_published(TwoHopChannel::peer_tail) ? ~0u : args_.rings.nvl_chunk;
        uint32_t position = head, num_handed = 0;
        TK_NO_UNROLL
        for (; position < end && num_handed < room; ++position) {
            char* row = args_.template own<char>(args_.rdma_row_in(channel_, chunk.node, position));
            const bool is_wanted = args_.row.meta(row).is_token_in_peer(peer_);
            note_place(first_row + position, is_wanted ? static_cast<int32_t>(num_sent + num_handed) : -1);
            if (!is_wanted) continue;
            forward_token(row, chunk.node);
            ++num_handed;
        }
        publish(chunk.node, position, num_handed);
        const auto advance = [&](PerLane<uint32_t>& values, uint32_t by) {
            values = warp_.lanes(
                [&](int lane) { return values[lane] + (static_cast<uint32_t>(lane) == chunk.node ? by : 0); });
        };
        advance(sources.head, position - head);
        advance(sources.num_sent, num_handed);
        advance(sources.left, head - position);
    }

    TK_DEVICE void note_place(uint32_t row, int32_t place) {
        if (row >= args_.call.forward_capacity || !warp_.is_leader()) return;
        args_.call.send_nvl_head[uint64_t{row} * args_.nodes.peers + peer_] = place;
    }

    // To the peer's ring.
    TK_DEVICE void forward_token(char* row, uint32_t node) {
        const RowLayout& layout = args_.row;
        TK_RANGE(context_.recorder, TwoHopEvent::forward_token, node, rank_, tail_ % args_.rings.nvl_slots);
        char* to = context_.comm.template at<char>(rank_, args_.nvl_row(channel_, args_.peer(), tail_));
        ++tail_;
        copy_row(warp_, to, row, layout.hidden_bytes);
        const uint32_t* words = layout.words(row);
        write_words(context_, layout.words(to), rank_, [&](uint32_t i) { return words[i]; });
    }

    TK_DEVICE void publish(uint32_t node, uint32_t head, uint32_t num_handed) {
        auto& shared = warp_.template shared<ForwarderShared>();
        if (num_handed != 0) {
            TK_SIGNAL(context_.recorder, TwoHopEvent::signal_peer_tail, rank_, channel_, tail_);
            // Released: the rows.
            auto* flag = context_.comm.template at<uint64_t>(rank_, args_.peer_tail_flag(channel_, args_.peer()));
            signal_peer<TwoHopChannel::peer_tail>(context_, rank_, flag, tail_);
        }
        TK_SIGNAL(context_.recorder, TwoHopEvent::signal_head, channel_, node, peer_, head);
        // Released: this forwarder has read all tokens before `head`, which others may now write over.
        signal_block<TwoHopChannel::forwarded>(warp_, &shared.forward_channel_head[peer_][node], context_.epoch, head);
    }

    TwoHopContext<Rec, Comm>& context_;
    Warp& warp_;
    const TwoHopArgs<Comm>& args_;
    const uint32_t channel_, peer_, rank_;
    uint32_t tail_ = 0;        // of the peer's ring
    uint32_t known_head_ = 0;  // likewise
};

// ---- coordinator ----

template <class Rec, class Comm>
class ForwarderCoordinator {
public:
    TK_DEVICE explicit ForwarderCoordinator(TwoHopContext<Rec, Comm>& context)
        : context_(context), warp_(context.warp), args_(context.args) {}

    TK_DEVICE bool run() {
        auto returned = warp_.lanes([](int) { return 0u; });
        while (true) {
            PerLane<uint32_t> least;
            const Looked looked = wait_head(returned, least);
            if (!looked.ok) return false;
            TK_TAKE_BACK_IF(context_.recorder, looked.risen == 0, TwoHopEvent::wait_head);
            if (looked.risen == 0) return true;  // all forwarders have retired
            for (uint32_t nodes = looked.risen; nodes; nodes &= nodes - 1) {
                const int node = static_cast<int>(first_bit(nodes));
                return_slots(first_bit(nodes), warp_.shuffle(returned, node), warp_.shuffle(least, node));
            }
            returned =
                warp_.lanes([&](int lane) { return least[lane] > returned[lane] ? least[lane] : returned[lane]; });
        }
    }

private:
    struct Looked {
        bool ok;
        uint32_t risen;  // nodes whose tokens all forwarders have passed further
    };

    // Waits until all forwarders that have not retired have passed a node's tokens further than `returned`, or all have
    // retired. A lane a node.
    TK_DEVICE Looked wait_head(const PerLane<uint32_t>& returned, PerLane<uint32_t>& least) {
        TK_WAIT(context_.recorder, TwoHopEvent::wait_head, context_.channel());
        perturb(warp_);
        const uint32_t peers = args_.nodes.peers;
        uint64_t started = 0;
        auto slowest = warp_.lanes([&](int lane) { return slowest_forwarder(lane); });
        for (uint32_t spins = 0;;) {
            const uint32_t retired = find_retired();  // first: then the heads are the last ones
            const auto seen = warp_.lanes([&](int lane) { return slowest_forwarder(lane); });
            least = warp_.lanes([&](int lane) { return seen[lane] / kMaxNodePeers; });
            const uint32_t risen = warp_.ballot([&](int lane) { return least[lane] > returned[lane]; });
            if (risen || retired == (1u << peers) - 1) {
                warp_.sync();
                const int node = static_cast<int>(first_in_turn(risen, 0));
                TK_END_IF(true,
                          static_cast<uint32_t>(node),
                          warp_.shuffle(slowest, node) % kMaxNodePeers,
                          warp_.shuffle(returned, node) + 1);
                return {true, risen};
            }
            slowest = seen;  // it came last
            warp_.relax(spins);
            const RingWait whom = context_.ring_wait(
                TwoHopRing::rdma, context_.comm.rank, warp_.shuffle(returned, 0), warp_.shuffle(returned, 0));
            const auto gives_up = [&] {
                const auto& shared = warp_.template shared<ForwarderShared>();
                const uint64_t seen = glance_at<Scope::block>(&shared.forward_channel_head[0][0]);
                const uint32_t channel = channel_number(TwoHopChannel::forwarded);
                return uint32_t{
                    should_give_up(warp_, context_.comm, channel, whom, spins, context_.epoch, seen, started)};
            };
            if (warp_.once(gives_up)) {
                TK_END_IF(false, 0u, 0u, 0u);
                return {false, 0};
            }
        }
    }

    TK_DEVICE uint32_t find_retired() {
        const auto& shared = warp_.template shared<ForwarderShared>();
        return warp_.ballot([&](int lane) {
            if (static_cast<uint32_t>(lane) >= args_.nodes.peers) return false;
            const uint64_t flag = look_at<TwoHopChannel::retired, Scope::block>(&shared.forward_channel_retired[lane]);
            return is_wanted<TwoHopChannel::retired>(flag, context_.epoch);
        });
    }

    // The forwarder that is least far with the tokens of lane `lane`'s node: its head, and in the lowest digit its
    // peer. One that has retired has passed all, and its head says so.
    TK_DEVICE uint32_t slowest_forwarder(int lane) const {
        if (static_cast<uint32_t>(lane) >= args_.nodes.num_nodes) return 0;
        const auto& shared = warp_.template shared<ForwarderShared>();
        uint32_t slowest = kMaxFlagValue * kMaxNodePeers;
        for (uint32_t peer = 0; peer < args_.nodes.peers; ++peer) {
            const uint64_t flag =
                look_at<TwoHopChannel::forwarded, Scope::block>(&shared.forward_channel_head[peer][lane]);
            if (is_wanted<TwoHopChannel::forwarded>(flag, context_.epoch, slowest / kMaxNodePeers)) continue;
            slowest = (flag_epoch(flag) == context_.epoch ? flag_value(flag) : 0) * kMaxNodePeers + peer;
        }
        return slowest;
    }

    TK_DEVICE void return_slots(uint32_t node, uint32_t returned, uint32_t head) {
        const uint32_t channel = context_.channel();
        for (uint32_t position = returned; position < head; ++position) {
            poison(args_.template own<char>(args_.rdma_row_in(channel, node, position)), args_.row.bytes);
        }
        return_credit(context_, node, head);
    }

    TwoHopContext<Rec, Comm>& context_;
    Warp& warp_;
    const TwoHopArgs<Comm>& args_;
};

}  // namespace tracekern
