// Tokens that take two hops through rings, as small as it gets: what waits and signals of rings have to hold for.
//
// A rank sends tokens to every node: chunks of them go to the rank with its own place there, by put and signal, and
// each chunk's slot has a flag of its own. Forwarders there, one for each rank of the node, take the chunks of all
// sources as they come and hand their rank's tokens on through a ring of tokens. A coordinator gives a chunk's slot
// back when all forwarders are through with it.
//
//   send         waits for credit; arrival: a chunk's slot holds the chunk of this position
//   forward      waits for arrival, and for the head of its ring; tail: tokens in its ring; taken: chunks it is done
//   with coordinate   waits for taken, in shared memory; credit: chunks that all forwarders are done with receive waits
//   for tail; head: tokens it has read
//
// Calls follow each other within one launch, with no barrier: every position begins at 0 again, and a call ends for a
// warp when all that it sent was read.
#pragma once

#include "comm/put.h"

namespace tracekern {

enum class RingChannel : uint32_t { arrival = kFirstOwnChannel, credit, taken, tail, head };
inline constexpr const char* kRingChannelNames[] = {"arrival", "credit", "taken", "tail", "head"};
inline constexpr const char* kRingRoleNames[] = {"send", "coordinate", "receive", "forward"};
enum RingRole : uint32_t { kSend, kCoordinate, kReceive, kFirstForwarder };

constexpr uint32_t kMaxNodes = 4, kMaxLocals = 4;
constexpr uint32_t kChunks = 3, kChunkTokens = 3;  // of a ring between nodes
constexpr uint32_t kSlots = 4;                     // of a ring within one
constexpr uint32_t kTokenWords = 8;

struct alignas(16) RingToken {
    uint32_t rank;     // of the sender
    uint32_t index;    // among those that it sends to this node
    uint32_t local;    // place of the receiver in its node
    uint32_t is_last;  // 1: an empty token behind the last one
    uint32_t words[kTokenWords];
};

struct alignas(16) RingChunk {
    uint32_t num_tokens;
    uint32_t is_last;
    uint32_t unused[2];
    RingToken tokens[kChunkTokens];
};

// One channel's part of a rank's heap. Words in front, for as many ranks as there may be; no payload is ever there.
struct alignas(64) RingMemory {
    uint64_t arrival[kMaxNodes][kChunks];         // [source]
    uint64_t credit[kMaxNodes];                   // [destination]
    uint64_t tail[kMaxLocals], head[kMaxLocals];  // [forwarder], [receiver]
    RingChunk chunks[kMaxNodes][kChunks];
    RingChunk outgoing[kMaxNodes][kChunks];  // what is under way; a slot is free when its chunk was read
    RingToken tokens[kMaxLocals][kSlots];
};

struct RingShared {
    uint64_t taken[kMaxLocals * kMaxNodes];  // [forwarder][source]: twice the chunks, odd: the last was among them
};

// What came, so that the host can tell whether it is right.
struct RingReceipt {
    uint64_t num_tokens;
    uint64_t sum;  // of the tokens' hashes
    uint32_t wrong;
};

template <class Comm>
struct RingArgs {
    Comm comm;
    uint32_t num_nodes;
    uint32_t num_locals;  // ranks of a node
    uint32_t max_tokens;  // that a rank sends to a node in a call and channel
    uint32_t num_calls;
    uint32_t seed;
    uint32_t token_bytes;   // their size; the race detector does not see copies of a constant one
    RingReceipt* receipts;  // [channel][call]

    TK_DEVICE uint32_t node() const { return comm.rank / num_locals; }
    TK_DEVICE uint32_t local() const { return comm.rank % num_locals; }
    TK_DEVICE uint32_t rank_at(uint32_t node, uint32_t local) const { return node * num_locals + local; }
    TK_DEVICE RingMemory& own(uint32_t channel) const { return at(comm.rank, channel); }
    TK_DEVICE RingMemory& at(uint32_t rank, uint32_t channel) const {
        return comm.template at<RingMemory>(rank, sizeof(HeapControl))[channel];
    }
    // Where something of a channel's memory is in each rank's heap.
    TK_DEVICE uint64_t offset_of(const void* own) const {
        return static_cast<uint64_t>(static_cast<const char*>(own) - comm.heap[comm.rank]);
    }
};

// Draws what is sent: both sides call it.
TK_HOST_DEVICE uint32_t ring_hash(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    uint64_t state = 0x9e3779b97f4a7c15u;
    for (const uint64_t next : {a, b, c, d}) {
        state = (state ^ next) * 0xff51afd7ed558ccdu;
        state ^= state >> 32;
    }
    return static_cast<uint32_t>(state);
}

struct RingCall {
    uint32_t seed;
    uint32_t channel;
    uint32_t call;

    // Now and then nothing goes to a node.
    TK_HOST_DEVICE uint32_t num_tokens(uint32_t rank, uint32_t node, uint32_t max_tokens) const {
        const uint32_t drawn = ring_hash(seed + call, rank, node, channel);
        return drawn % 4 ? (drawn >> 8) % (max_tokens + 1) : 0;
    }
    TK_HOST_DEVICE uint32_t word(uint32_t rank, uint32_t node, uint32_t index) const {
        return ring_hash(seed * 31 + call, rank << 16 | node, index, channel);
    }
};

// What a warp has with it through one call.
template <class Comm>
struct RingContext {
    Warp& warp;
    const RingArgs<Comm>& args;
    const RingCall call;
    const uint64_t epoch;

    TK_DEVICE RingMemory& own() const { return args.own(call.channel); }
    TK_DEVICE RingWait whom(uint32_t role, uint32_t peer, uint32_t head = 0, uint32_t tail = 0) const {
        return {{0, peer, call.channel}, role, call.channel, head, tail};
    }
};

// ---- send ----

template <class Comm>
TK_DEVICE void fill_chunk(const RingContext<Comm>& context, uint32_t node, uint32_t position, RingChunk& chunk) {
    const RingArgs<Comm>& args = context.args;
    const uint32_t rank = args.comm.rank, first = position * kChunkTokens;
    const uint32_t num_tokens = context.call.num_tokens(rank, node, args.max_tokens);
    const uint32_t count = num_tokens - first < kChunkTokens ? num_tokens - first : kChunkTokens;
    chunk.num_tokens = count;
    chunk.is_last = first + count == num_tokens;
    for (uint32_t i = 0; i < count; ++i) {
        const uint32_t word = context.call.word(rank, node, first + i);
        chunk.tokens[i] = {rank, first + i, word % args.num_locals, 0, {}};
        for (uint32_t k = 0; k < kTokenWords; ++k) chunk.tokens[i].words[k] = word + k;
    }
}

// The last chunk may be partial, or empty: every node gets one.
template <class Comm>
TK_DEVICE bool send_to_node(const RingContext<Comm>& context, uint32_t node) {
    const RingArgs<Comm>& args = context.args;
    Warp& warp = context.warp;
    RingMemory& own = context.own();
    const uint32_t peer = args.rank_at(node, args.local());
    const auto wait_credit = [&](uint32_t chunks) {
        const RingWait whom = context.whom(kSend, peer);
        return wait_at_least<RingChannel::credit>(warp, args.comm, &own.credit[node], context.epoch, chunks, whom).ok;
    };
    const uint32_t num_tokens = context.call.num_tokens(args.comm.rank, node, args.max_tokens);
    const uint32_t num_chunks = num_tokens ? (num_tokens + kChunkTokens - 1) / kChunkTokens : 1;
    for (uint32_t position = 0; position < num_chunks; ++position) {
        if (position >= kChunks && !wait_credit(position + 1 - kChunks)) return false;
        const uint32_t slot = position % kChunks;
        RingChunk* chunk = &own.outgoing[node][slot];
        warp.leader([&] { fill_chunk(context, node, position, *chunk); });
        const uint64_t dst = args.offset_of(&own.chunks[args.node()][slot]);
        const uint64_t flag = args.offset_of(&own.arrival[args.node()][slot]);
        with_peer(args.comm, peer, [&](const auto& to) {
            put_signal<RingChannel::arrival>(
                warp, to, dst, chunk, sizeof(RingChunk), flag, context.epoch, position + 1);
        });
    }
    return wait_credit(num_chunks);
}

template <class Comm>
TK_DEVICE bool ring_send(const RingContext<Comm>& context) {
    const RingArgs<Comm>& args = context.args;
    for (uint32_t i = 0; i < args.num_nodes; ++i) {
        if (!send_to_node(context, (args.node() + i) % args.num_nodes)) return false;
    }
    return true;
}

// ---- forward ----

// Puts a token into the ring to the rank at `local`; `position` goes on by one. False: gave up.
template <class Comm>
TK_DEVICE bool forward_token(const RingContext<Comm>& context,
                             uint32_t local,
                             const RingToken& token,
                             uint32_t& position) {
    const RingArgs<Comm>& args = context.args;
    RingMemory& own = context.own();
    const uint32_t peer = args.rank_at(args.node(), local);
    if (position >= kSlots) {
        const uint32_t read = position + 1 - kSlots;
        const RingWait whom = context.whom(kFirstForwarder, peer, read - 1, position);
        if (!wait_at_least<RingChannel::head>(context.warp, args.comm, &own.head[local], context.epoch, read, whom)
                 .ok) {
            return false;
        }
    }
    const uint64_t dst = args.offset_of(&own.tokens[args.local()][position % kSlots]);
    const uint64_t flag = args.offset_of(&own.tail[args.local()]);
    ++position;
    put_signal<RingChannel::tail>(
        context.warp, MappedPeer(args.comm, peer), dst, &token, args.token_bytes, flag, context.epoch, position);
    return true;
}

// Those of the chunk's tokens that are for the rank at `local`.
template <class Comm>
TK_DEVICE bool forward_chunk(const RingContext<Comm>& context,
                             uint32_t local,
                             const RingChunk& chunk,
                             uint32_t& position) {
    const uint32_t count = chunk.num_tokens < kChunkTokens ? chunk.num_tokens : kChunkTokens;
    for (uint32_t i = 0; i < count; ++i) {
        if (chunk.tokens[i].local == local && !forward_token(context, local, chunk.tokens[i], position)) return false;
    }
    return true;
}

// To the rank at `local`, from all nodes. A lane looks after one source.
template <class Comm>
TK_DEVICE bool ring_forward(const RingContext<Comm>& context, uint32_t local) {
    Warp& warp = context.warp;
    const RingArgs<Comm>& args = context.args;
    RingMemory& own = context.own();
    auto next = warp.lanes([](int) { return 0u; });  // chunk of each source
    uint32_t position = 0;
    for (uint32_t left = (1u << args.num_nodes) - 1; left;) {
        const RingWait whom = context.whom(kFirstForwarder, args.rank_at(first_bit(left), args.local()));
        const auto flag_of = [&](int lane) { return &own.arrival[lane][next[lane] % kChunks]; };
        const auto least_of = [&](int lane) { return next[lane] + 1; };
        const Arrived came =
            wait_any_at_least<RingChannel::arrival>(warp, args.comm, left, flag_of, context.epoch, least_of, whom);
        if (!came.lanes) return false;
        for (uint32_t lanes = came.lanes; lanes; lanes &= lanes - 1) {
            const uint32_t source = first_bit(lanes);
            const uint32_t chunk_idx = warp.shuffle(next, static_cast<int>(source));
            const RingChunk& chunk = own.chunks[source][chunk_idx % kChunks];
            if (!forward_chunk(context, local, chunk, position)) return false;
            const uint32_t is_last = chunk.is_last == 1;
            uint64_t* taken = &warp.template shared<RingShared>().taken[local * args.num_nodes + source];
            signal_block<RingChannel::taken>(warp, taken, context.epoch, 2 * (chunk_idx + 1) + is_last);
            if (is_last) left &= ~(1u << source);
        }
        next = warp.lanes([&](int lane) { return next[lane] + (lane < 32 && came.lanes >> lane & 1); });
    }
    const RingToken end{args.comm.rank, 0, local, 1, {}};
    if (!forward_token(context, local, end, position)) return false;
    const RingWait whom = context.whom(kFirstForwarder, args.rank_at(args.node(), local));
    return wait_at_least<RingChannel::head>(warp, args.comm, &own.head[local], context.epoch, position, whom).ok;
}

// Gives back what all forwarders are done with. A lane looks after one forwarder and source.
template <class Comm>
TK_DEVICE bool ring_coordinate(const RingContext<Comm>& context) {
    Warp& warp = context.warp;
    const RingArgs<Comm>& args = context.args;
    RingMemory& own = context.own();
    const uint32_t num_nodes = args.num_nodes;
    auto done = warp.lanes([](int) { return 0u; });  // chunks
    uint32_t given_back[kMaxNodes] = {};
    for (uint32_t left = (1u << num_nodes * args.num_locals) - 1; left;) {
        const RingWait whom = context.whom(kCoordinate, args.comm.rank);
        const auto flag_of = [&](int lane) { return &warp.template shared<RingShared>().taken[lane]; };
        const auto least_of = [&](int lane) { return 2 * (done[lane] + 1); };
        const Arrived came = wait_any_at_least<RingChannel::taken, Scope::block>(
            warp, args.comm, left, flag_of, context.epoch, least_of, whom);
        if (!came.lanes) return false;
        const auto has_come = [&](int lane) { return lane < 32 && came.lanes >> lane & 1; };
        done = warp.lanes([&](int lane) { return done[lane] + has_come(lane); });
        // So many there are not: a fault was planted, and this loop would never end.
        if (warp.ballot([&](int lane) { return done[lane] > args.max_tokens + 1; })) return false;
        left &= ~warp.ballot(
            [&](int lane) { return has_come(lane) && came.value[lane] % 2 && came.value[lane] / 2 <= done[lane]; });
        for (uint32_t source = 0; source < num_nodes; ++source) {
            uint32_t least = ~0u;
            for (uint32_t local = 0; local < args.num_locals; ++local) {
                const uint32_t chunks = warp.shuffle(done, static_cast<int>(local * num_nodes + source));
                if (chunks < least) least = chunks;
            }
            if (least == given_back[source]) continue;
            for (; given_back[source] < least; ++given_back[source]) {
                poison(&own.chunks[source][given_back[source] % kChunks], sizeof(RingChunk));
            }
            const uint64_t credit = args.offset_of(&own.credit[args.node()]);
            with_peer(args.comm, args.rank_at(source, args.local()), [&](const auto& to) {
                signal_max<RingChannel::credit>(warp, to, credit, context.epoch, least);
            });
        }
    }
    return true;
}

// ---- receive ----

// Counts a token; true: it was the one behind the last.
template <class Comm>
TK_DEVICE bool take_token(const RingContext<Comm>& context, const RingToken& token, RingReceipt& receipt) {
    const RingArgs<Comm>& args = context.args;
    if (token.is_last == 1) return true;
    const uint32_t word = context.call.word(token.rank, args.node(), token.index);
    bool is_right = token.local == args.local() && word % args.num_locals == token.local;
    for (uint32_t k = 0; k < kTokenWords; ++k) is_right = is_right && token.words[k] == word + k;
    ++receipt.num_tokens;
    receipt.sum += word;
    receipt.wrong += !is_right;
    return false;
}

// From all forwarders of the node. A lane looks after one.
template <class Comm>
TK_DEVICE bool ring_receive(const RingContext<Comm>& context) {
    Warp& warp = context.warp;
    const RingArgs<Comm>& args = context.args;
    RingMemory& own = context.own();
    RingReceipt receipt{};
    auto read = warp.lanes([](int) { return 0u; });  // tokens of each ring
    for (uint32_t left = (1u << args.num_locals) - 1; left;) {
        const RingWait whom = context.whom(kReceive, args.rank_at(args.node(), first_bit(left)));
        const auto flag_of = [&](int lane) { return &own.tail[lane]; };
        const auto least_of = [&](int lane) { return read[lane] + 1; };
        const Arrived came =
            wait_any_at_least<RingChannel::tail>(warp, args.comm, left, flag_of, context.epoch, least_of, whom);
        if (!came.lanes) return false;
        for (uint32_t lanes = came.lanes; lanes; lanes &= lanes - 1) {
            const uint32_t ring = first_bit(lanes);
            const uint32_t begin = warp.shuffle(read, static_cast<int>(ring));
            const uint32_t end = warp.shuffle(came.value, static_cast<int>(ring));
            // The wait says that there is one, the value how many. Where a fault was planted it may say anything.
            uint32_t i = begin;
            do {
                RingToken& token = own.tokens[ring][i % kSlots];
                if (take_token(context, token, receipt)) left &= ~(1u << ring);
                poison(&token, args.token_bytes);
            } while (++i < end && i < begin + kSlots);
            read = warp.lanes([&](int lane) { return static_cast<uint32_t>(lane) == ring ? i : read[lane]; });
        }
        const auto head_of = [&](int lane) {
            const uint32_t peer = args.rank_at(args.node(), static_cast<uint32_t>(lane));
            return &args.at(peer, context.call.channel).head[args.local()];
        };
        signal_all<RingChannel::head>(warp, came.lanes, head_of, context.epoch, [&](int lane) { return read[lane]; });
    }
    warp.leader([&] { args.receipts[context.call.channel * args.num_calls + context.call.call] = receipt; });
    return true;
}

// ---- the kernel ----

TK_HOST_DEVICE constexpr uint32_t ring_warps(uint32_t num_locals) {
    return kFirstForwarder + num_locals;
}

// A block a channel, a warp a role, and a forwarder for each rank of the node.
template <class Comm>
TK_DEVICE void run_rings(Warp& warp, const RingArgs<Comm>& args) {
    if (warp.warp == kCoordinate) {
        warp.strided(kMaxLocals * kMaxNodes,
                     [&](uint32_t i) { warp.template shared<RingShared>().taken[i] = make_flag(kNeverEpoch, 0); });
    }
    warp.block_sync();
    uint64_t epoch = kFirstEpoch;
    for (uint32_t call = 0; call < args.num_calls; ++call) {
        const RingContext<Comm> context{warp, args, {args.seed, warp.block, call}, epoch};
        bool ok = true;
        if (warp.warp == kSend) {
            ok = ring_send(context);
        } else if (warp.warp == kCoordinate) {
            ok = ring_coordinate(context);
        } else if (warp.warp == kReceive) {
            ok = ring_receive(context);
        } else {
            ok = ring_forward(context, warp.warp - kFirstForwarder);
        }
        if (!ok) return;
        epoch = next_epoch(epoch);
    }
}

}  // namespace tracekern
