// Where everything stands: the symmetric part that peers write to, the workspace of one rank, and the kernels'
// arguments. The one place for offsets; the host sizes its allocations with it and the kernels find their way with it.
#pragma once

#include <cstdint>

#include "comm/heap.h"
#include "moe/shape.h"

namespace tracekern {

// Stands before each row in the receive buffer.
struct alignas(16) RowHeader {
    uint32_t flat;  // the token's flat index at its source
    uint32_t expert;
    uint32_t reserved[2];
};

// Where a row of the expert input came from and which expert it is for.
struct RowOrigin {
    uint32_t flat;
    uint16_t src_rank;
    uint16_t local_expert;
};

// Offsets in the symmetric heap. [x] stands for an array with that many entries.
struct P2PLayout {
    uint64_t count_flags;    // u64 [rank][local expert]   written by rank: tokens it sends to that expert
    uint64_t token_flags;    // u64 [rank][slot]           written by rank: the row of that slot is there
    uint64_t rank_flags;     // u64 [rank]                 written by rank: all its rows are there
    uint64_t ack_flags;      // u64 [rank]                 written by rank: it has read all my rows
    uint64_t result_flags;   // u64 [flat]                 written by the expert's rank: that result is there
    uint64_t results_flags;  // u64 [rank]                 written by rank: all its results are there
    uint64_t flags_end;
    uint64_t recv_rows;    // [rank][slot] RowHeader + row
    uint64_t result_rows;  // [flat] row
    uint64_t total_bytes;
    uint32_t row_stride;     // of recv_rows
    uint32_t result_stride;  // of result_rows

    static P2PLayout make(const MoeShape& shape) {
        const uint64_t ranks = shape.num_ranks;
        const uint64_t flat = shape.max_flat();
        P2PLayout layout{};
        uint64_t cursor = sizeof(HeapControl);
        const auto take = [&](uint64_t bytes) {
            const uint64_t offset = cursor;
            cursor += (bytes + 127) / 128 * 128;
            return offset;
        };
        layout.count_flags = take(ranks * shape.num_local_experts() * 8);
        layout.token_flags = take(ranks * flat * 8);
        layout.rank_flags = take(ranks * 8);
        layout.ack_flags = take(ranks * 8);
        layout.result_flags = take(flat * 8);
        layout.results_flags = take(ranks * 8);
        layout.flags_end = cursor;
        layout.result_stride = (shape.row_bytes() + 15) / 16 * 16;
        layout.row_stride = static_cast<uint32_t>(sizeof(RowHeader)) + layout.result_stride;
        layout.recv_rows = take(ranks * flat * layout.row_stride);
        layout.result_rows = take(flat * layout.result_stride);
        layout.total_bytes = cursor;
        return layout;
    }
};

// Memory of one rank that no peer touches. It lives from call to call: nothing in it is allocated or cleared by a call.
struct P2PState {
    uint32_t epoch;          // of the call under way
    uint32_t blocks_done;    // of combine_recv; the last one prepares the next call
    uint64_t grid_arrivals;  // for grid_barrier
};

struct P2PArgs {
    CommArgs comm;
    MoeShape shape;
    P2PLayout layout;

    // Workspace
    P2PState* state;
    uint32_t* send_count;     // [rank] slots taken at that peer so far
    uint32_t* recv_count;     // [rank] tokens that come from it
    uint32_t* expert_offset;  // [local expert + 1] first row of that expert
    uint32_t* expert_cursor;  // [local expert] next free row
    RowOrigin* row_origin;    // [row]
    char* expert_rows;        // [row][hidden] in the layout a grouped GEMM reads: one expert after the other

    // Tensors of the call, row-major and contiguous
    const char* x;              // [token][hidden]
    const int32_t* topk_idx;    // [token][topk], -1: no expert
    const float* topk_weights;  // [token][topk]
    const float* expert_scale;  // [expert] what the expert multiplies its input with
    char* out;                  // [token][hidden]
    uint32_t num_tokens;

    TK_DEVICE uint64_t* count_flags(uint32_t peer) const {
        return comm.at<uint64_t>(peer, layout.count_flags) + uint64_t{comm.rank} * shape.num_local_experts();
    }
    TK_DEVICE uint64_t* token_flag(uint32_t at_rank, uint32_t src_rank, uint32_t slot) const {
        return comm.at<uint64_t>(at_rank, layout.token_flags) + uint64_t{src_rank} * shape.max_flat() + slot;
    }
    TK_DEVICE char* recv_row(uint32_t at_rank, uint32_t src_rank, uint32_t slot) const {
        return comm.at<char>(at_rank, layout.recv_rows) +
               (uint64_t{src_rank} * shape.max_flat() + slot) * layout.row_stride;
    }
    TK_DEVICE uint64_t* rank_flag(uint32_t at_rank, uint32_t of_rank) const {
        return comm.at<uint64_t>(at_rank, layout.rank_flags) + of_rank;
    }
    TK_DEVICE uint64_t* ack_flag(uint32_t at_rank, uint32_t of_rank) const {
        return comm.at<uint64_t>(at_rank, layout.ack_flags) + of_rank;
    }
    TK_DEVICE uint64_t* result_flag(uint32_t at_rank, uint32_t flat) const {
        return comm.at<uint64_t>(at_rank, layout.result_flags) + flat;
    }
    TK_DEVICE uint64_t* results_flag(uint32_t at_rank, uint32_t of_rank) const {
        return comm.at<uint64_t>(at_rank, layout.results_flags) + of_rank;
    }
    TK_DEVICE char* result_row(uint32_t at_rank, uint32_t flat) const {
        return comm.at<char>(at_rank, layout.result_rows) + uint64_t{flat} * layout.result_stride;
    }
    TK_DEVICE char* expert_row(uint64_t row) const { return expert_rows + row * shape.row_bytes(); }
    TK_DEVICE uint32_t num_flat() const { return num_tokens * shape.topk; }
};

// Shared memory of the blocks that need some. The host sizes it with bytes().
struct CountShared {
    // [expert] tokens this rank sends to it; later [rank][local expert] tokens that come, as many words, and behind
    // them [local expert] their sums over ranks.
    uint32_t tokens[1];
    static uint64_t bytes(const MoeShape& shape) {
        return (uint64_t{shape.num_experts} + shape.num_local_experts()) * sizeof(uint32_t);
    }
};
struct ReduceShared {
    uint32_t failed[2];  // [parity of the token's turn] a warp waited in vain
};

// The steps of the design, each a variant of one pipeline with one result.
enum class P2PVariant : uint32_t { flag, token, fused, balanced };

// One flag for all rows of a rank pair, or a flag for each row.
TK_HOST_DEVICE constexpr bool has_token_flags(P2PVariant variant) {
    return variant != P2PVariant::flag;
}
// Experts scale while they send back, and nothing is cleared before a call.
TK_HOST_DEVICE constexpr bool is_fused(P2PVariant variant) {
    return variant >= P2PVariant::fused;
}
// Rows are dealt out over all blocks, whichever rank or expert they belong to.
TK_HOST_DEVICE constexpr bool is_balanced(P2PVariant variant) {
    return variant == P2PVariant::balanced;
}

// How one warp walks over rows that lie in groups (by source rank, by expert) of known sizes: calls visit(group,
// index). Grouped: each block serves the groups block, block + num_blocks, ...; where there are more blocks than
// groups, several blocks share one. Balanced: the groups are laid end to end and dealt out warp by warp.
template <bool kBalanced, class GroupSize, class Visit>
TK_DEVICE void for_rows(Warp& warp, uint32_t num_groups, GroupSize group_size, Visit visit) {
    if constexpr (kBalanced) {
        const uint32_t stride = warp.num_blocks * warp.num_warps;
        uint32_t next = warp.block * warp.num_warps + warp.warp;
        uint32_t start = 0;
        for (uint32_t group = 0; group < num_groups; ++group) {
            const uint32_t end = start + group_size(group);
            for (; next < end; next += stride) visit(group, next - start);
            start = end;
        }
    } else {
        const uint32_t first = warp.block % num_groups;
        const uint32_t sharers = (warp.num_blocks - first + num_groups - 1) / num_groups;
        for (uint32_t group = first; group < num_groups; group += warp.num_blocks) {
            const uint32_t size = group_size(group);
            for (uint32_t i = warp.block / num_groups * warp.num_warps + warp.warp; i < size;
                 i += sharers * warp.num_warps) {
                visit(group, i);
            }
        }
    }
}

}  // namespace tracekern
