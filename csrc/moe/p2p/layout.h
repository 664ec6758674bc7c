// The variants of the pipeline, and where everything is: the symmetric part that peers write to, the workspace of one
// rank, and the kernels' arguments. The one place for offsets; the host sizes its allocations with it and the kernels
// find their way with it.
#pragma once

#include <cstdint>
#include <utility>

#include "moe/config.h"
#include "moe/context.h"
#include "moe/p2p/events.h"

namespace tracekern {

// The steps of the design; those before `dedup` are kept for comparison (worklog/). All have the same result, bit by
// bit, but for those that reduce at the experts: they round otherwise, and agree with each other.
enum class P2PVariant : uint32_t { flag, token, fused, balanced, dedup, reduce, pipelined, overlapped };
inline constexpr const char* kP2PVariantNames[] = {
    "flag", "token", "fused", "balanced", "dedup", "reduce", "pipelined", "overlapped"};

// What the host has to know of a variant.
struct P2PTraits {
    bool deduplicated;        // a token goes once to each rank that has experts of it; a kernel sends and receives
    bool reduces_at_experts;  // an expert's rank adds up its results of a token and sends one row
    bool pipelined;           // one kernel: a partition of the tokens is on its way out while another one comes back
    bool overlapped;          // kernels for each partition: experts compute one while others are on their way
};
inline constexpr P2PTraits kP2PTraits[] = {
    {false, false, false, false},
    {false, false, false, false},
    {false, false, false, false},
    {false, false, false, false},
    {true, false, false, false},
    {true, true, false, false},
    {true, true, true, false},
    {true, true, false, true},
};
constexpr const P2PTraits& traits_of(P2PVariant variant) {
    return kP2PTraits[static_cast<uint32_t>(variant)];
}

// Precedes each row in the receive buffer of the worklog's variants.
struct alignas(8) RowHeader {
    uint32_t flat;  // the token's flat index at its source
    uint32_t expert;
};

// The same where a token goes once to each rank. RowChoice[topk] follow, the first num_choices of them filled, and
// uint32_t[topk], filled in by the receiver: where the row is for that choice's expert.
struct alignas(8) DedupRowHeader {
    uint32_t token;
    uint32_t num_choices;
};
struct alignas(8) RowChoice {
    uint16_t local_expert;
    uint16_t choice;
    float weight;
};
static_assert(sizeof(DedupRowHeader) == 8 && sizeof(RowChoice) == 8, "a lane writes one of them with one store");

constexpr uint32_t kMaxResults = 32;  // of a token: choices, or ranks that have some

// Offsets in the shared memory of a block. [x] means an array with that many entries.
struct SharedLayout {
    uint32_t counts;         // u32 [rank][count]     what this rank sends to it; later what comes from it
    uint32_t sums;           // u32 [cell]            what comes for it
    uint32_t contributions;  // Contribution [warp][topk], deduplicated variants: what the warp adds up
};

// Offsets in the symmetric heap.
struct P2PLayout {
    uint64_t count_flags;    // u64 [rank][count]          written by rank: tokens of each cell; in the deduplicated
                             //                            variants behind them rows of each partition
    uint64_t token_flags;    // u64 [rank][slot]           written by rank: the row of that slot is there
    uint64_t rank_flags;     // LineWord [rank]            written by rank: all its rows are there
    uint64_t ack_flags;      // LineWord [rank]            written by rank: it has read all my rows
    uint64_t result_flags;   // u64 [result]               written by the expert's rank: that result is there
    uint64_t results_flags;  // LineWord [rank]            written by rank: all its results are there
    uint64_t flags_end;
    uint64_t recv_rows;    // [rank][slot] header + row
    uint64_t result_rows;  // [result] row; a result is a flat token, or a (token, rank) where experts' ranks add up
    uint64_t total_bytes;
    uint32_t header_bytes;       // of recv_rows
    uint32_t row_stride;         // of recv_rows
    uint32_t result_stride;      // of result_rows
    uint32_t num_slots;          // of one source in recv_rows
    uint32_t results_per_token;  // in result_rows
    uint32_t num_cells;          // groups of rows that experts get: a cell is a local expert, of each partition in turn
                                 // where these come to the experts one after the other
    uint32_t num_counts;         // of one source in count_flags
    uint32_t counts_stride;      // in count_flags, bytes from one source to the next: whole lines
    uint32_t num_partitions;     // the tokens of a rank, in order, `partition_tokens` in each
    uint32_t partition_tokens;
    SharedLayout shared;

    // partitions: of the pipelined variant, at most; the others have one, and 0 is 1.
    static P2PLayout make(const MoeShape& shape, P2PVariant variant, uint32_t partitions) {
        const uint64_t ranks = shape.num_ranks;
        P2PLayout layout{};
        const P2PTraits& traits = traits_of(variant);
        const uint32_t wanted = (traits.pipelined || traits.overlapped) && partitions ? partitions : 1;
        const uint32_t most = shape.max_tokens ? shape.max_tokens : 1;
        layout.partition_tokens = (most + wanted - 1) / wanted;
        layout.num_partitions = (most + layout.partition_tokens - 1) / layout.partition_tokens;
        layout.num_slots = traits.deduplicated ? shape.max_tokens : shape.max_flat();
        layout.results_per_token = traits.reduces_at_experts ? shape.num_ranks : shape.topk;
        layout.num_cells = shape.num_local_experts() * (traits.overlapped ? layout.num_partitions : 1);
        layout.num_counts = layout.num_cells + (traits.deduplicated ? layout.num_partitions : 0);
        const uint64_t results = uint64_t{shape.max_tokens} * layout.results_per_token;
        uint64_t cursor = sizeof(HeapControl);
        const auto take = [&](uint64_t bytes) { return std::exchange(cursor, cursor + whole_lines(bytes)); };
        layout.counts_stride = static_cast<uint32_t>(whole_lines(layout.num_counts * sizeof(uint64_t)));
        layout.count_flags = take(ranks * layout.counts_stride);
        layout.token_flags = take(ranks * layout.num_slots * sizeof(uint64_t));
        layout.rank_flags = take(ranks * sizeof(LineWord));
        layout.ack_flags = take(ranks * sizeof(LineWord));
        layout.result_flags = take(results * sizeof(uint64_t));
        layout.results_flags = take(ranks * sizeof(LineWord));
        layout.flags_end = cursor;
        const uint64_t choices = shape.topk * (sizeof(RowChoice) + sizeof(uint32_t));
        const uint64_t header = traits.deduplicated ? sizeof(DedupRowHeader) + choices : sizeof(RowHeader);
        layout.result_stride = static_cast<uint32_t>(whole_lines(shape.row_bytes()));
        layout.header_bytes = static_cast<uint32_t>(whole_lines(header));
        layout.row_stride = layout.header_bytes + layout.result_stride;
        layout.recv_rows = take(ranks * layout.num_slots * layout.row_stride);
        layout.result_rows = take(results * layout.result_stride);
        layout.total_bytes = cursor;
        layout.shared.sums = shape.num_ranks * layout.num_counts * static_cast<uint32_t>(sizeof(uint32_t));
        const uint64_t counted = layout.shared.sums + layout.num_cells * sizeof(uint32_t);
        layout.shared.contributions = static_cast<uint32_t>((counted + 15) / 16 * 16);
        return layout;
    }
};

// Memory of one rank that no peer touches. It lives from call to call: nothing in it is allocated or cleared by a call.
struct P2PState {
    LineWord epoch;             // of the call under way
    LineWord blocks_done;       // of the last kernel; the last one prepares the next call
    LineWord grid_arrivals;     // for grid_barrier: of dispatch_send, worklog
    LineWord combine_arrivals;  // and of combine_send, which may have another grid
    LineWord layout_flag;  // deduplicated variants: it is known which rows come, and the experts' rows are laid out
};

struct RowOrigin;  // worklog

struct P2PArgs : MoeCall {
    CommArgs comm;
    MoeShape shape;
    P2PLayout layout;
    uint32_t partition;  // of a kernel that has one alone

    // Workspace; set_counters() places what precedes the rows
    P2PState* state;
    uint32_t* send_count;     // [partition][rank] slots taken at that peer so far
    uint32_t* recv_count;     // [partition][rank] rows that come from it
    uint32_t* recv_begin;     // [partition][rank] deduplicated variants: rows that come from the ranks before it
    uint32_t* expert_offset;  // [cell + 1] its first row
    uint32_t* expert_cursor;  // [cell] next free row
    RowOrigin* row_origin;    // [row] worklog
    char* expert_rows;        // [row][hidden] in the layout a grouped GEMM reads: one expert after the other

    // How many words set_counters() takes.
    static uint64_t num_counters(const MoeShape& shape, const P2PLayout& layout) {
        return 3 * uint64_t{layout.num_partitions} * shape.num_ranks + 2 * layout.num_cells + 1;
    }
    void set_counters(uint32_t* counters) {
        const uint64_t num_counts = uint64_t{layout.num_partitions} * shape.num_ranks;
        send_count = counters;
        recv_count = send_count + num_counts;
        recv_begin = recv_count + num_counts;
        expert_offset = recv_begin + num_counts;
        expert_cursor = expert_offset + layout.num_cells + 1;
    }

    TK_DEVICE uint64_t epoch() const { return state->epoch.word; }
    TK_DEVICE uint64_t* count_flags(uint32_t at_rank, uint32_t of_rank) const {
        return comm.at<uint64_t>(at_rank, layout.count_flags + uint64_t{of_rank} * layout.counts_stride);
    }
    TK_DEVICE uint64_t* token_flag(uint32_t at_rank, uint32_t src_rank, uint32_t slot) const {
        return comm.at<uint64_t>(at_rank, layout.token_flags) + uint64_t{src_rank} * layout.num_slots + slot;
    }
    TK_DEVICE char* recv_row(uint32_t at_rank, uint32_t src_rank, uint32_t slot) const {
        return comm.at<char>(at_rank, layout.recv_rows) +
               (uint64_t{src_rank} * layout.num_slots + slot) * layout.row_stride;
    }
    TK_DEVICE static RowChoice* row_choices(char* recv_row) {
        return reinterpret_cast<RowChoice*>(recv_row + sizeof(DedupRowHeader));
    }
    // Where the receiver keeps the places of a row at its experts.
    TK_DEVICE uint32_t* row_places(char* recv_row) const {
        return reinterpret_cast<uint32_t*>(row_choices(recv_row) + shape.topk);
    }
    TK_DEVICE uint64_t* rank_flag(uint32_t at_rank, uint32_t of_rank) const {
        return &comm.at<LineWord>(at_rank, layout.rank_flags)[of_rank].word;
    }
    TK_DEVICE uint64_t* ack_flag(uint32_t at_rank, uint32_t of_rank) const {
        return &comm.at<LineWord>(at_rank, layout.ack_flags)[of_rank].word;
    }
    TK_DEVICE uint64_t* result_flag(uint32_t at_rank, uint32_t result) const {
        return comm.at<uint64_t>(at_rank, layout.result_flags) + result;
    }
    TK_DEVICE uint64_t* results_flag(uint32_t at_rank, uint32_t of_rank) const {
        return &comm.at<LineWord>(at_rank, layout.results_flags)[of_rank].word;
    }
    TK_DEVICE char* result_row(uint32_t at_rank, uint32_t result) const {
        return comm.at<char>(at_rank, layout.result_rows) + uint64_t{result} * layout.result_stride;
    }
    TK_DEVICE char* expert_row(uint64_t row) const { return expert_rows + row * shape.row_bytes(); }
    TK_DEVICE uint32_t num_flat() const { return num_tokens * shape.topk; }
    TK_DEVICE uint32_t partition_of(uint32_t flat) const { return flat / shape.topk / layout.partition_tokens; }
    // Whether each partition has cells, and kernels, of its own.
    TK_DEVICE bool is_cut() const { return layout.num_cells != shape.num_local_experts(); }
    TK_DEVICE uint32_t cell(uint32_t of_partition, uint32_t local_expert) const {
        return of_partition * shape.num_local_experts() + local_expert;
    }
    // Of those that have kernels of their own.
    TK_HOST_DEVICE bool is_last_partition() const {
        return (partition + 1) * shape.num_local_experts() == layout.num_cells;
    }
};

TK_DEVICE uint32_t partition_begin(const P2PArgs& args, uint32_t partition) {
    return partition * args.layout.partition_tokens;
}
TK_DEVICE uint32_t partition_size(const P2PArgs& args, uint32_t partition) {
    const uint32_t begin = partition_begin(args, partition);
    if (begin >= args.num_tokens) return 0;
    const uint32_t left = args.num_tokens - begin;
    return left < args.layout.partition_tokens ? left : args.layout.partition_tokens;
}

template <class T>
TK_DEVICE T* shared_at(Warp& warp, uint32_t offset) {
    return reinterpret_cast<T*>(&warp.shared<char>() + offset);
}

template <class Rec>
using P2PContext = Context<P2PArgs, Rec>;

// What all kernels of the family have in common (moe/kernel_list.h says what a body has).
template <P2PStage kOwnStage>
struct P2PKernel {
    using Args = P2PArgs;
    static constexpr P2PStage kStage = kOwnStage;
    static constexpr uint32_t kMaxThreads = 512;

    static uint64_t shared_bytes(const P2PArgs&, uint32_t) { return 0; }
};

// Bytes of the expert input. The pipelined variant has none: its experts work on a row where it arrived.
inline uint64_t expert_row_bytes(const MoeShape& shape, P2PVariant variant) {
    return traits_of(variant).pipelined ? 0 : shape.max_rows() * shape.row_bytes();
}

}  // namespace tracekern
