// Where everything is: the symmetric part that peers write to, the state of one rank, the tensors of a call, and the
// shared memory of a block. The one place for offsets; host and kernels find their way with it.
#pragma once

#include <cstdint>
#include <utility>

#include "comm/context.h"
#include "comm/proxy_peer.h"
#include "moe/config.h"
#include "moe/two_hop/events.h"

namespace tracekern {

constexpr uint32_t kMaxTwoHopNodes = 16;  // a warp of a block, at least, forwards for each
constexpr uint32_t kMaxNodePeers = 8;     // ranks of a node
constexpr uint32_t kMaxTwoHopChannels = 64;
constexpr uint32_t kMaxTwoHopTokens = (1u << 20) - 1;  // of a rank, and of a ring with its slots: the events' fields
constexpr uint32_t kNumSenders = 7;                    // warps of a channel

// Behind the hidden values of each row: whence it came, and which peers of the node that it goes to want it, a bit
// each.
struct alignas(8) SourceMeta {
    uint32_t src_node;
    uint32_t peers;
};

// hidden values | SourceMeta | places | scales | topk_idx | topk_weights. What follows the values are words of 32 bits.
//
// Between nodes a place for each peer: which one of its node's rows the token is in the ring to that peer, -1: none. It
// is there that send_nvl_head comes from.
struct RowLayout {
    uint32_t hidden_bytes;
    uint32_t num_places;
    uint32_t num_scales;
    uint32_t topk;
    uint32_t bytes;

    static constexpr uint32_t kMetaWords = sizeof(SourceMeta) / sizeof(uint32_t);

    TK_HOST_DEVICE static constexpr RowLayout of(uint32_t hidden_bytes,
                                                 uint32_t num_places,
                                                 uint32_t num_scales,
                                                 uint32_t topk) {
        const uint32_t words = kMetaWords + num_places + num_scales + 2 * topk;
        return {hidden_bytes, num_places, num_scales, topk, (hidden_bytes + 4 * words + 15) / 16 * 16};
    }
    TK_HOST_DEVICE uint32_t num_words() const { return first_weight() + topk; }
    // Of the words behind the values.
    TK_HOST_DEVICE uint32_t first_place() const { return kMetaWords; }
    TK_HOST_DEVICE uint32_t first_scale() const { return first_place() + num_places; }
    TK_HOST_DEVICE uint32_t first_idx() const { return first_scale() + num_scales; }
    TK_HOST_DEVICE uint32_t first_weight() const { return first_idx() + topk; }

    TK_DEVICE uint32_t* words(char* row) const { return reinterpret_cast<uint32_t*>(row + hidden_bytes); }
};

// What a rank sends to each node and receives from each: one part a node in every channel. First all channels' send
// buffers, then all their receive buffers.
struct SymBuffer {
    uint64_t part_bytes;
    uint32_t num_nodes, num_channels;

    TK_HOST_DEVICE uint64_t send(uint32_t channel, uint32_t node) const {
        return (uint64_t{channel} * num_nodes + node) * part_bytes;
    }
    TK_HOST_DEVICE uint64_t recv(uint32_t channel, uint32_t node) const { return send(num_channels + channel, node); }
    TK_HOST_DEVICE uint64_t bytes() const { return send(2 * num_channels, 0); }
};

// What a rank receives from each peer of its node, who writes to it there: one part a peer in every channel.
struct AsymBuffer {
    uint64_t part_bytes;
    uint32_t num_peers, num_channels;

    TK_HOST_DEVICE uint64_t at(uint32_t channel, uint32_t peer) const {
        return (uint64_t{channel} * num_peers + peer) * part_bytes;
    }
    TK_HOST_DEVICE uint64_t bytes() const { return at(num_channels, 0); }
};

// Ranks by node: rank `node * peers + peer`.
struct NodeShape {
    uint32_t num_nodes;
    uint32_t peers;  // ranks of a node

    TK_HOST_DEVICE uint32_t num_ranks() const { return num_nodes * peers; }
    TK_HOST_DEVICE uint32_t node_of(uint32_t rank) const { return rank / peers; }
    TK_HOST_DEVICE uint32_t peer_of(uint32_t rank) const { return rank % peers; }
    TK_HOST_DEVICE uint32_t rank_at(uint32_t node, uint32_t peer) const { return node * peers + peer; }
};

// Slots of the rings of a channel, and the tokens of a chunk. docs/two_hop.md calls them R1, K1, R2 and K2. A ring
// within a node has a part for each node that rows come from, or go back to.
struct RingSizes {
    uint32_t rdma_slots;
    uint32_t rdma_chunk;  // tokens that go to another node at a time; divides rdma_slots
    uint32_t part_slots;
    uint32_t part_chunk;   // rows that the reader is told of at a time, at least
    uint32_t part_credit;  // rows that are given back at a time, at least

    // A quarter of a part is given back at a time, but never so much that there is no room for a chunk of which the
    // reader was not told: see docs/two_hop.md.
    TK_HOST_DEVICE static constexpr RingSizes of(
        uint32_t rdma_slots, uint32_t rdma_chunk, uint32_t nvl_slots, uint32_t nvl_chunk, uint32_t num_nodes) {
        const uint32_t slots = nvl_slots > num_nodes ? nvl_slots / num_nodes : 1;
        const uint32_t chunk = nvl_chunk < slots ? nvl_chunk : slots;
        const uint32_t most = slots - chunk + 1, quarter = slots < 4 ? 1 : slots / 4;
        return {rdma_slots, rdma_chunk, slots, chunk, quarter < most ? quarter : most};
    }
    // Of a first-hop ring: below it a sender can wait for a head that needs a tail of its own successors.
    TK_HOST_DEVICE static constexpr uint32_t least_rdma_slots(uint32_t rdma_chunk) {
        return rdma_chunk + kNumSenders - 1;
    }
    TK_HOST_DEVICE uint32_t chunks() const { return rdma_slots / rdma_chunk; }
};

// Offsets in the symmetric heap. Blocks of counts are there twice, for even epochs and for odd ones.
struct TwoHopLayout {
    // Notify. A block for a node: tokens for each of its ranks, tokens for the node, choices of each of its experts.
    // One for a peer: tokens that come from each node, choices of each of its experts.
    uint64_t counts_out;   // u32 [parity][node] block: what this rank sends
    uint64_t counts;       // u32 [parity][node] block       written by that node's rank of the same place
    uint64_t peer_counts;  // u32 [parity][peer] block       written by that peer

    uint64_t flags_begin;
    uint64_t counts_flags;       // u64 [parity][node]           as counts
    uint64_t peer_counts_flags;  // u64 [parity][peer]           as peer_counts
    uint64_t meta_flags;         // u64 [channel][node]          as meta
    uint64_t tail_flags;         // u64 [channel][node][chunk]   as rdma_rows: the tail behind that chunk
    uint64_t head_flags;         // LineWord [channel][node]     written by that node: rows that it has forwarded
    uint64_t prefix_flags;       // u64 [channel][peer][node][2] written by that peer: nvl_channel_prefix_start and _end
    uint64_t peer_tail_flags;    // LineWord [channel][peer][node]   as nvl_rows
    uint64_t peer_head_flags;    // LineWord [channel][peer][node]   written by that peer: rows that it has read
    uint64_t return_tail_flags;  // LineWord [channel][peer][node]   of combine: as nvl_rows
    uint64_t return_head_flags;  // LineWord [channel][peer][node]   written by that peer: rows that it has added up
    uint64_t flags_end;

    SymBuffer meta;       // i32 [2 * peers + 2]: rdma_channel_meta
    SymBuffer rdma_rows;  // [rdma slot] row: rdma_channel_data
    AsymBuffer nvl_rows;  // [node][slot of its part] row: nvl_channel_x
    uint64_t meta_begin, rdma_rows_begin, nvl_rows_begin;
    uint64_t counts_bytes, peer_counts_bytes;  // of a block
    uint64_t total_bytes;

    // row_bytes, combine_row_bytes: of rows on their way there, and back.
    static TwoHopLayout make(const MoeShape& shape,
                             const NodeShape& nodes,
                             uint32_t channels,
                             const RingSizes& rings,
                             uint64_t row_bytes,
                             uint64_t combine_row_bytes) {
        const uint64_t n = nodes.num_nodes, p = nodes.peers, num_local = shape.num_local_experts();
        TwoHopLayout layout{};
        uint64_t cursor = sizeof(HeapControl);
        const auto take = [&](uint64_t bytes) { return std::exchange(cursor, cursor + whole_lines(bytes)); };
        layout.counts_bytes = whole_lines((p + 1 + p * num_local) * sizeof(uint32_t));
        layout.peer_counts_bytes = whole_lines((n + num_local) * sizeof(uint32_t));
        layout.counts_out = take(2 * n * layout.counts_bytes);
        layout.counts = take(2 * n * layout.counts_bytes);
        layout.peer_counts = take(2 * p * layout.peer_counts_bytes);
        layout.flags_begin = cursor;
        layout.counts_flags = take(2 * n * sizeof(uint64_t));
        layout.peer_counts_flags = take(2 * p * sizeof(uint64_t));
        layout.meta_flags = take(channels * n * sizeof(uint64_t));
        layout.tail_flags = take(channels * n * rings.chunks() * sizeof(uint64_t));
        layout.head_flags = take(channels * n * sizeof(LineWord));
        layout.prefix_flags = take(channels * p * 2 * n * sizeof(uint64_t));
        layout.peer_tail_flags = take(channels * p * n * sizeof(LineWord));
        layout.peer_head_flags = take(channels * p * n * sizeof(LineWord));
        layout.return_tail_flags = take(channels * p * n * sizeof(LineWord));
        layout.return_head_flags = take(channels * p * n * sizeof(LineWord));
        layout.flags_end = cursor;
        layout.meta = {whole_lines((2 * p + 2) * sizeof(int32_t)), nodes.num_nodes, channels};
        const auto larger = [](uint64_t a, uint64_t b) { return whole_lines(a > b ? a : b); };
        const uint64_t rdma_slots = n == 1 ? 0 : rings.rdma_slots;  // one node has no first hop
        const uint64_t nvl_slots = n * rings.part_slots;
        layout.rdma_rows = {larger(rdma_slots * row_bytes, rdma_slots * combine_row_bytes), nodes.num_nodes, channels};
        layout.nvl_rows = {larger(nvl_slots * row_bytes, nvl_slots * combine_row_bytes), nodes.peers, channels};
        layout.meta_begin = take(layout.meta.bytes());
        layout.rdma_rows_begin = take(layout.rdma_rows.bytes());
        layout.nvl_rows_begin = take(layout.nvl_rows.bytes());
        layout.total_bytes = cursor;
        return layout;
    }
};

// The tensors of a call, row-major. Those of handles have the names that DeepEP 1.2.1 gives them; an RDMA rank is a
// node.
struct TwoHopCall {
    uint32_t num_tokens;
    uint32_t expert_alignment;
    uint32_t recv_capacity;           // rows of recv_x; 0 at a notify that comes before its memory
    uint32_t forward_capacity;        // rows of send_nvl_head; likewise
    uint64_t ticket;                  // of this notify; host_counts carries it
    const char* x;                    // [token][hidden]
    const float* x_scales;            // [token][scale]
    const int64_t* topk_idx;          // [token][topk], -1: no expert
    const float* topk_weights;        // [token][topk]
    const uint8_t* is_token_in_rank;  // [token][rank] bool
    const int32_t* num_tokens_per_rank;
    const int32_t* num_tokens_per_rdma_rank;
    const int32_t* num_tokens_per_expert;
    // notify_dispatch writes them, dispatch reads them.
    int32_t* rdma_channel_prefix_matrix;  // [node][channel] tokens for it in the channels up to this one
    int32_t* gbl_channel_prefix_matrix;   // [rank][channel]
    int32_t* recv_rdma_rank_prefix_sum;   // [node] tokens that this rank forwards, from the nodes up to this one
    int32_t* recv_gbl_rank_prefix_sum;    // [rank] rows of recv_x, from the ranks up to this one
    // dispatch
    char* recv_x;                              // [row][hidden]
    float* recv_x_scales;                      // [row][scale]
    int64_t* recv_topk_idx;                    // [row][topk] local expert, -1: another rank's
    float* recv_topk_weights;                  // [row][topk]
    SourceMeta* recv_src_meta;                 // [row]
    int32_t* send_rdma_head;                   // [token][node] its place in the ring to that node, -1: none
    int32_t* send_nvl_head;                    // [forwarded token][peer] its place among those of its node, -1: none
    int32_t* recv_rdma_channel_prefix_matrix;  // [node][channel] tokens from it in the channels up to this one
    int32_t* recv_gbl_channel_prefix_matrix;   // [rank][channel] first row of this channel
    uint32_t told;                             // see HandleUse; 0: a new dispatch, of which notify tells
    // combine, with what dispatch wrote
    const char* combine_x;              // [row][hidden] bf16
    uint32_t has_weights;               // of combine: weights come back, too; the same on all ranks
    const float* combine_topk_weights;  // [row][topk]
    char* bias[2];                      // [token][hidden] bf16, which sums begin with; none: null
    char* combined_x;                   // [token][hidden] bf16
    float* combined_topk_weights;       // [token][topk]
};

// What a call without notify does, in TwoHopCall::told above the number of the dispatch that its handle is of. All
// ranks do the same with the handles of the same dispatch.
enum class HandleUse : uint32_t { dispatch = 1, combine, weighted_combine };
constexpr uint32_t kHandleNumberBits = 22;  // with the use they are the value of a flag

// What a rank keeps from call to call, in memory that no peer touches.
struct TwoHopState {
    LineWord epoch;       // of the call under way
    LineWord warps_done;  // of its dispatch or combine; the last one goes on to the next epoch
    LineWord num_posted;  // writes that this rank has asked its proxy for
};

// What notify_dispatch tells the host: {ticket, value} each, in memory of the host.
struct HostCounts {
    uint64_t moe_recv_counter;
    uint64_t moe_recv_rdma_counter;
    uint64_t overflow;                    // of the last call that brings more rows than there is memory for
    uint64_t moe_recv_expert_counter[1];  // [local expert]

    static constexpr uint64_t bytes(uint32_t num_local_experts) {
        return sizeof(HostCounts) + (num_local_experts - 1) * sizeof(uint64_t);
    }
};

constexpr uint32_t kPutTag = 1;  // of all writes

// Comm: CommArgs, or FarArgs where other nodes may be other hosts.
template <class Comm>
struct TwoHopArgs {
    TwoHopCall call;
    Comm comm;
    MoeShape shape;
    NodeShape nodes;
    uint32_t num_channels;
    RingSizes rings;
    RowLayout row;  // on the way of the kernel: there, or back
    TwoHopLayout layout;
    TwoHopState* state;
    HostCounts* host_counts;

    TK_DEVICE uint64_t epoch() const { return state->epoch.word; }
    TK_DEVICE uint32_t node() const { return nodes.node_of(comm.rank); }
    TK_DEVICE uint32_t peer() const { return nodes.peer_of(comm.rank); }
    // Of this place in another node, with which this rank has first-hop rings.
    TK_DEVICE uint32_t rank_in(uint32_t node) const { return nodes.rank_at(node, peer()); }
    TK_DEVICE uint32_t neighbour(uint32_t peer) const { return nodes.rank_at(node(), peer); }

    template <class T>
    TK_DEVICE T* own(uint64_t offset) const {
        return comm.template at<T>(comm.rank, offset);
    }

    // What the rank of this place in a node writes here.
    template <class T>
    TK_DEVICE T* from_node(uint32_t node, uint64_t offset) const {
        return comm.template written_by<T>(rank_in(node), comm.rank, offset);
    }
    // Whence it is sent there.
    template <class T>
    TK_DEVICE T* to_node(uint32_t node, uint64_t offset) const {
        return from_node<T>(node, offset);  // each place of the heap is written from one side
    }

    // ---- notify ----
    TK_DEVICE uint64_t counts_out_at(uint32_t parity, uint32_t node) const {
        return layout.counts_out + (parity * nodes.num_nodes + node) * layout.counts_bytes;
    }
    TK_DEVICE uint64_t counts_at(uint32_t parity, uint32_t node) const {
        return layout.counts + (parity * nodes.num_nodes + node) * layout.counts_bytes;
    }
    TK_DEVICE uint64_t peer_counts_at(uint32_t parity, uint32_t peer) const {
        return layout.peer_counts + (parity * nodes.peers + peer) * layout.peer_counts_bytes;
    }
    TK_DEVICE uint64_t counts_flag(uint32_t parity, uint32_t node) const {
        return layout.counts_flags + (parity * nodes.num_nodes + node) * sizeof(uint64_t);
    }
    TK_DEVICE uint64_t peer_counts_flag(uint32_t parity, uint32_t peer) const {
        return layout.peer_counts_flags + (parity * nodes.peers + peer) * sizeof(uint64_t);
    }

    // ---- first hop: a place at a rank, of what comes from `node` or goes there ----
    TK_DEVICE uint64_t meta_out(uint32_t channel, uint32_t node) const {
        return layout.meta_begin + layout.meta.send(channel, node);
    }
    TK_DEVICE uint64_t meta_in(uint32_t channel, uint32_t node) const {
        return layout.meta_begin + layout.meta.recv(channel, node);
    }
    TK_DEVICE uint64_t rdma_row_out(uint32_t channel, uint32_t node, uint32_t position) const {
        return layout.rdma_rows_begin + layout.rdma_rows.send(channel, node) +
               uint64_t{position % rings.rdma_slots} * row.bytes;
    }
    TK_DEVICE uint64_t rdma_row_in(uint32_t channel, uint32_t node, uint32_t position) const {
        return layout.rdma_rows_begin + layout.rdma_rows.recv(channel, node) +
               uint64_t{position % rings.rdma_slots} * row.bytes;
    }
    TK_DEVICE uint64_t meta_flag(uint32_t channel, uint32_t node) const {
        return layout.meta_flags + (uint64_t{channel} * nodes.num_nodes + node) * sizeof(uint64_t);
    }
    // Of the chunk that has this position.
    TK_DEVICE uint64_t tail_flag(uint32_t channel, uint32_t node, uint32_t position) const {
        const uint64_t ring = uint64_t{channel} * nodes.num_nodes + node;
        return layout.tail_flags +
               (ring * rings.chunks() + position % rings.rdma_slots / rings.rdma_chunk) * sizeof(uint64_t);
    }
    TK_DEVICE uint64_t head_flag(uint32_t channel, uint32_t node) const {
        return layout.head_flags + (uint64_t{channel} * nodes.num_nodes + node) * sizeof(LineWord);
    }

    // ---- second hop: a place at a rank, of the ring that it shares with `peer`, in the part for `node` ----
    TK_DEVICE uint64_t nvl_row(uint32_t channel, uint32_t peer, uint32_t node, uint32_t position) const {
        return layout.nvl_rows_begin + layout.nvl_rows.at(channel, peer) +
               (uint64_t{node} * rings.part_slots + position % rings.part_slots) * row.bytes;
    }
    TK_DEVICE uint64_t prefix_flags(uint32_t channel, uint32_t peer, uint32_t node) const {
        return layout.prefix_flags + part(channel, peer, node) * 2 * sizeof(uint64_t);
    }
    TK_DEVICE uint64_t peer_tail_flag(uint32_t channel, uint32_t peer, uint32_t node) const {
        return layout.peer_tail_flags + part(channel, peer, node) * sizeof(LineWord);
    }
    TK_DEVICE uint64_t peer_head_flag(uint32_t channel, uint32_t peer, uint32_t node) const {
        return layout.peer_head_flags + part(channel, peer, node) * sizeof(LineWord);
    }
    TK_DEVICE uint64_t return_tail_flag(uint32_t channel, uint32_t peer, uint32_t node) const {
        return layout.return_tail_flags + part(channel, peer, node) * sizeof(LineWord);
    }
    TK_DEVICE uint64_t return_head_flag(uint32_t channel, uint32_t peer, uint32_t node) const {
        return layout.return_head_flags + part(channel, peer, node) * sizeof(LineWord);
    }

private:
    TK_DEVICE uint64_t part(uint32_t channel, uint32_t peer, uint32_t node) const {
        return (uint64_t{channel} * nodes.peers + peer) * nodes.num_nodes + node;
    }
};

// The tokens of a channel, which are consecutive: [begin, end).
struct TaskRange {
    uint32_t begin, end;

    TK_HOST_DEVICE static TaskRange of(uint32_t num_tokens, uint32_t num_channels, uint32_t channel) {
        const uint32_t share = (num_tokens + num_channels - 1) / num_channels;
        const uint32_t begin = channel * share < num_tokens ? channel * share : num_tokens;
        const uint32_t left = num_tokens - begin;
        return {begin, begin + (left < share ? left : share)};
    }
};

// The lowest bit from `turn` on, or the lowest of all; 0 where there is none.
TK_DEVICE uint32_t first_in_turn(uint32_t bits, uint32_t turn) {
    const uint32_t later = bits & ~0u << turn;
    return bits ? first_bit(later ? later : bits) : 0;
}

// Sets the value of one lane.
TK_DEVICE void set_lane(Warp& warp, PerLane<uint32_t>& values, uint32_t lane, uint32_t value) {
    values = warp.lanes([&](int i) { return static_cast<uint32_t>(i) == lane ? value : values[i]; });
}

// What a warp carries through a kernel of the family.
template <class Rec, class Comm>
struct TwoHopContext : CommContext<Rec, Comm> {
    const TwoHopArgs<Comm>& args;
    const TwoHopRole role;

    TK_DEVICE TwoHopContext(Warp& own_warp,
                            const TwoHopArgs<Comm>& own_args,
                            typename Rec::Args trace,
                            TwoHopStage stage,
                            TwoHopRole own_role)
        : CommContext<Rec, Comm>(own_warp,
                                 own_args.comm,
                                 trace,
                                 static_cast<uint32_t>(stage),
                                 static_cast<uint32_t>(own_role),
                                 own_args.epoch()),
          args(own_args),
          role(own_role) {}

    // Of a block of dispatch: two blocks have a channel.
    TK_DEVICE uint32_t channel() const { return this->warp.block / 2; }
    // Makes all ranks give up the call.
    TK_DEVICE void refuse(TwoHopRefusal reason, uint32_t number) const {
        const WaitFor nobody{this->stage, args.comm.rank, channel()};
        const uint32_t flag = channel_number(TwoHopChannel::counts);
        refuse_call(this->warp, args.comm, flag, nobody, static_cast<uint32_t>(reason), number);
    }
    // Whether a tensor of a handle has room for rows [begin, end), which other parts of handles say; if not, refuses
    // the call. Rows of a new dispatch may be more than there is memory for, and are left out.
    TK_DEVICE bool has_rows(uint64_t begin, uint64_t end, uint32_t capacity) const {
        if (!args.call.told || (begin <= end && end <= capacity)) return true;
        refuse(TwoHopRefusal::out_of_bounds, 0);
        return false;
    }
    // What a wait for a position of a ring with `peer` has to say where it gives up.
    TK_DEVICE RingWait ring_wait(TwoHopRing ring, uint32_t peer, uint32_t head, uint32_t tail) const {
        return {{this->stage, peer, channel()}, static_cast<uint32_t>(role), static_cast<uint32_t>(ring), head, tail};
    }
};

}  // namespace tracekern
