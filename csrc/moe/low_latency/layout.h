// Where everything is: the symmetric part that peers write to, the state of one rank, the tensors of a call, and the
// shared memory of a block. The one place for offsets; host and kernels find their way with it.
#pragma once

#include <cstdint>
#include <utility>

#include "comm/context.h"
#include "comm/proxy_peer.h"
#include "moe/config.h"
#include "moe/experts.h"
#include "moe/low_latency/events.h"
#include "moe/low_latency/launch.h"

namespace tracekern {

constexpr uint32_t kNumSlots = 2;      // handles that may be live at a time
constexpr uint32_t kScaleGroup = 128;  // values that share a scale
constexpr uint32_t kMaxLowLatencyTopk = 16;
constexpr uint32_t kMaxLowLatencyTokens = 0xffff;  // of a rank: what the events' fields hold

// In front of each message: the token's index at its source, and nothing.
struct alignas(16) MessageHeader {
    uint32_t token;
    uint32_t reserved[3];
};

// A message is a header, `hidden` values and, of fp8, a scale for each 128 of them.
struct MessageLayout {
    uint32_t values_bytes;
    uint32_t num_scales;
    uint32_t bytes;
    uint32_t stride;  // from one message to the next: whole lines

    TK_HOST_DEVICE static constexpr MessageLayout of(uint32_t hidden, bool use_fp8) {
        const uint32_t values_bytes = use_fp8 ? hidden : hidden * 2;
        const uint32_t num_scales = use_fp8 ? hidden / kScaleGroup : 0;
        const uint32_t used = static_cast<uint32_t>(sizeof(MessageHeader)) + values_bytes + num_scales * 4;
        const uint32_t bytes = (used + 15) / 16 * 16;
        return {values_bytes, num_scales, bytes, static_cast<uint32_t>(whole_lines(bytes))};
    }
};
static_assert(MessageLayout::of(7168, true).bytes == 7408 && MessageLayout::of(7168, false).bytes == 14352);

// Offsets in the symmetric heap. All is there once for each slot.
struct LowLatencyLayout {
    uint64_t count_flags;    // u64 [slot][local expert][rank]  written by rank: how many tokens it sent
    uint64_t result_flags;   // u64 [slot][expert]              written by its rank: its results are there
    uint64_t acks;           // u64 [slot][rank]                written by rank: how far its calls of the slot are over
    uint64_t message_flags;  // u64 [slot][local expert][rank][token slot]  as rdma_recv_x
    uint64_t flags_end;
    uint64_t rdma_recv_x;     // [slot][local expert][rank][token slot] message
    uint64_t combine_recv_x;  // [slot][expert][token] row of bf16
    uint64_t recv_bytes;      // of a slot of rdma_recv_x: max_tokens messages of bf16 for each pair
    uint64_t results_bytes;   // of a slot of combine_recv_x
    uint64_t total_bytes;
    // Of FarArgs::far_heap alone: what this rank's proxy writes from.
    uint64_t staged_messages;  // [slot][token] message
    uint64_t staged_rows;      // [slot][local expert][rank][token] row of bf16
    uint64_t staged_bytes;     // of a slot of staged_messages
    uint64_t far_bytes;

    // first_byte: of the family's part of the heap.
    static LowLatencyLayout make(const MoeShape& shape, uint64_t first_byte) {
        const uint64_t pairs = shape.num_experts;  // local experts x ranks
        const uint64_t fp8_stride = MessageLayout::of(shape.hidden, true).stride;
        const uint64_t bf16_stride = MessageLayout::of(shape.hidden, false).stride;
        const uint64_t stride = bf16_stride > fp8_stride ? bf16_stride : fp8_stride;
        LowLatencyLayout layout{};
        uint64_t cursor = first_byte;
        const auto take = [&](uint64_t bytes) { return std::exchange(cursor, cursor + whole_lines(bytes)); };
        const auto take_flags = [&](uint64_t count) { return take(kNumSlots * count * sizeof(uint64_t)); };
        layout.count_flags = take_flags(pairs);
        layout.result_flags = take_flags(pairs);
        layout.acks = take_flags(shape.num_ranks);
        layout.message_flags = take_flags(pairs * shape.max_tokens);
        layout.flags_end = cursor;
        layout.recv_bytes = pairs * shape.max_tokens * stride;
        layout.results_bytes = pairs * shape.max_tokens * shape.hidden * sizeof(BFloat16);
        layout.rdma_recv_x = take(kNumSlots * layout.recv_bytes);
        layout.combine_recv_x = take(kNumSlots * layout.results_bytes);
        layout.total_bytes = cursor;
        layout.staged_bytes = shape.max_tokens * stride;
        layout.staged_messages = take(kNumSlots * layout.staged_bytes);
        layout.staged_rows = take(kNumSlots * layout.results_bytes);
        layout.far_bytes = cursor;
        return layout;
    }
};

// A choice that no kernel followed: out of range, or an expert that the token names twice. The host reports the first.
struct BadChoice {
    uint32_t claimed;
    uint32_t is_whole;  // stored last
    uint32_t token;
    uint32_t choice;
    int64_t expert;
};

// Where ranks of other hosts say that calls are over, see inbox.hpp.
constexpr uint32_t kAckWord = kFirstOwnWord;

// What a proxy writes from: each has a tag for each slot.
enum class Staged : uint32_t { messages, rows };
constexpr uint32_t kNumStaged = 2;
TK_HOST_DEVICE constexpr uint32_t tag_of(Staged staged, uint32_t slot) {
    return 1 + static_cast<uint32_t>(staged) * kNumSlots + slot;
}
static_assert(tag_of(Staged::rows, kNumSlots - 1) < kNumTags);

// What a rank keeps of each slot from call to call, in memory that no peer touches.
struct LowLatencySlot {
    LineWord dispatched;              // last epoch of a dispatch that took this slot
    LineWord combined;                // last epoch of a combine of this slot whose receive began
    LineWord num_combines;            // of that epoch
    LineWord num_posted[kNumStaged];  // commands so far, to write from what was staged
};
struct LowLatencyState {
    LowLatencySlot slots[kNumSlots];
    uint32_t blocks_passed;  // of the kernel that is under way: see is_last_block()
};

// On the device, for each handle.
struct HandleWords {
    uint64_t epoch;
    uint64_t num_combines;  // that were sent
};

// The tensors of a dispatch and of the combine that belongs to it, row-major. A rank's rows are num_ranks * max_tokens.
struct LowLatencyCall {
    uint32_t slot;
    uint32_t num_tokens;
    uint32_t topk;
    uint32_t has_long_ids;              // topk_idx is of int64, else of int32
    uint32_t records_idle;              // warps with nothing to do record how they wait for the others
    uint32_t round_scale;               // scales of fp8 are powers of two
    uint32_t use_ue8m0;                 // and received as their exponents
    const void* topk_idx;               // [token][topk], -1: no expert
    const char* x;                      // [token][hidden] bf16
    char* packed_recv_x;                // [local expert][row][hidden] fp8 or bf16
    char* packed_recv_scales;           // [local expert][hidden / 128][row] float, or [..][hidden / 512][row][4] ue8m0
    uint32_t* packed_recv_src_info;     // [local expert][row] token
    int64_t* packed_recv_layout_range;  // [local expert][rank] pack2(count, begin)
    uint32_t* packed_recv_count;        // [local expert]
    HandleWords* handle;                // what sends took, and all later kernels of the handle read
    uint32_t* recv_stats;               // [local expert] grows by the tokens that came; none: null
    uint64_t* wait_ticks;               // [rank] grows by how long warps waited for its flags; none: null
    char* expert_rows;                  // [local expert][row][hidden] bf16: what experts made of packed_recv_x
    const float* expert_scale;          // [expert], for the stand-in of experts
    const float* topk_weights;          // [token][topk]
    char* out;                          // [token][hidden] bf16
};

// What kernels get, wherever the other ranks are.
struct LowLatencyArgs {
    LowLatencyCall call;
    MoeShape shape;
    LowLatencyLaunch launch;
    LowLatencyLayout layout;
    LowLatencyState* state;
    uint32_t* atomic_counter_per_expert;  // [slot][expert] slots taken at its rank
    uint64_t* claims_per_expert;          // [slot][local expert] sources that claimed rows << 32 | their rows
    BadChoice* bad_choice;                // memory of the host

    TK_DEVICE uint32_t rows_per_expert() const { return shape.num_ranks * shape.max_tokens; }
    TK_DEVICE LowLatencySlot& slot() const { return state->slots[call.slot]; }
    TK_DEVICE uint64_t packed_row(uint32_t local_expert, uint32_t row) const {
        return uint64_t{local_expert} * rows_per_expert() + row;
    }
    // The scale of a group of 128 values of a row. Exponents lie four and four in a word.
    TK_DEVICE uint64_t scale_index(uint32_t local_expert, uint32_t row, uint32_t group) const {
        const uint64_t first = uint64_t{local_expert} * (shape.hidden / kScaleGroup) * rows_per_expert();
        if (!call.use_ue8m0) return first + uint64_t{group} * rows_per_expert() + row;
        return first + (uint64_t{group / 4} * rows_per_expert() + row) * 4 + group % 4;
    }
    TK_DEVICE void put_scale(uint64_t index, float scale) const {
        if (call.use_ue8m0) {
            reinterpret_cast<uint8_t*>(call.packed_recv_scales)[index] =
                static_cast<uint8_t>(bits_as<uint32_t>(scale) >> 23);
        } else {
            reinterpret_cast<float*>(call.packed_recv_scales)[index] = scale;
        }
    }
    TK_DEVICE float get_scale(uint64_t index) const {
        if (!call.use_ue8m0) return reinterpret_cast<const float*>(call.packed_recv_scales)[index];
        return bits_as<float>(uint32_t{reinterpret_cast<const uint8_t*>(call.packed_recv_scales)[index]} << 23);
    }
    TK_DEVICE uint32_t* slot_counter(uint32_t expert) const {
        return atomic_counter_per_expert + call.slot * shape.num_experts + expert;
    }
    TK_DEVICE uint64_t* claims(uint32_t local_expert) const {
        return claims_per_expert + call.slot * shape.num_local_experts() + local_expert;
    }
    TK_DEVICE int64_t chosen(uint32_t token, uint32_t choice) const {
        return choice_at(uint64_t{token} * call.topk + choice);
    }
    // Of all tokens, one after the other.
    TK_DEVICE int64_t choice_at(uint64_t i) const {
        return call.has_long_ids ? static_cast<const int64_t*>(call.topk_idx)[i]
                                 : static_cast<const int32_t*>(call.topk_idx)[i];
    }
};

// Comm: CommArgs, or FarArgs where proxies reach the ranks of other hosts.
template <class OwnComm>
struct LowLatencyArgsOn : LowLatencyArgs {
    using Comm = OwnComm;
    Comm comm;

    // ---- places in the heap ----

    // Both arrays have a flag for each expert of all ranks.
    TK_DEVICE uint64_t flag(uint64_t array, uint32_t index) const {
        return array + (call.slot * shape.num_experts + index) * sizeof(uint64_t);
    }
    // rdma_recv_x[local expert][source rank][slot]. With another type of message a pair lies elsewhere, over what were
    // other sources' pairs: no rank writes before this one has copied the messages of all.
    TK_DEVICE uint64_t message_place(uint32_t local_expert,
                                     uint32_t src_rank,
                                     uint32_t place,
                                     const MessageLayout& message) const {
        const uint64_t pair = uint64_t{local_expert} * shape.num_ranks + src_rank;
        return layout.rdma_recv_x + call.slot * layout.recv_bytes + (pair * shape.max_tokens + place) * message.stride;
    }
    TK_DEVICE uint64_t result_place(uint32_t expert, uint32_t token) const {
        return layout.combine_recv_x + call.slot * layout.results_bytes +
               (uint64_t{expert} * shape.max_tokens + token) * shape.row_bytes();
    }
    TK_DEVICE uint64_t staged_message_place(uint32_t token, const MessageLayout& message) const {
        return layout.staged_messages + call.slot * layout.staged_bytes + uint64_t{token} * message.stride;
    }
    // Of a token of `to`, as this rank's expert of the pair makes it.
    TK_DEVICE uint64_t staged_row_place(ExpertPair to, uint32_t token) const {
        const uint64_t pair = uint64_t{to.local_expert} * shape.num_ranks + to.rank;
        return layout.staged_rows + call.slot * layout.results_bytes +
               (pair * shape.max_tokens + token) * shape.row_bytes();
    }

    // ---- what one rank writes at another, or at itself ----

    template <class T>
    TK_DEVICE T* written_by(uint32_t writer, uint32_t at_rank, uint64_t place) const {
        return comm.template written_by<T>(writer, at_rank, place);
    }
    TK_DEVICE uint64_t* count_flag(uint32_t at_rank, uint32_t local_expert, uint32_t of_rank) const {
        const uint64_t place = flag(layout.count_flags, local_expert * shape.num_ranks + of_rank);
        return written_by<uint64_t>(of_rank, at_rank, place);
    }
    TK_DEVICE uint64_t* result_flag(uint32_t at_rank, uint32_t expert) const {
        return written_by<uint64_t>(shape.rank_of(expert), at_rank, flag(layout.result_flags, expert));
    }
    TK_DEVICE uint64_t* ack(uint32_t at_rank, uint32_t of_rank) const {
        const uint64_t place = layout.acks + (call.slot * shape.num_ranks + of_rank) * sizeof(uint64_t);
        return written_by<uint64_t>(of_rank, at_rank, place);
    }
    TK_DEVICE uint64_t* message_flag(uint32_t at_rank, uint32_t local_expert, uint32_t src_rank, uint32_t place) const {
        const uint64_t pair = uint64_t{call.slot} * shape.num_experts + local_expert * shape.num_ranks + src_rank;
        const uint64_t first = layout.message_flags + pair * shape.max_tokens * sizeof(uint64_t);
        return written_by<uint64_t>(src_rank, at_rank, first) + place;
    }
    TK_DEVICE char* recv_message(uint32_t at_rank,
                                 uint32_t local_expert,
                                 uint32_t src_rank,
                                 uint32_t place,
                                 const MessageLayout& message) const {
        return written_by<char>(src_rank, at_rank, message_place(local_expert, src_rank, place, message));
    }
    TK_DEVICE char* result_row(uint32_t at_rank, uint32_t expert, uint32_t token) const {
        return written_by<char>(shape.rank_of(expert), at_rank, result_place(expert, token));
    }
};

// Slot 0 has the even epochs, slot 1 the odd ones: the next of a slot is two behind its last.
TK_HOST_DEVICE constexpr uint64_t epoch_behind(uint64_t last, uint32_t slot) {
    return last == kNeverEpoch ? kFirstEpoch + slot : next_epoch(next_epoch(last));
}
static_assert(kFirstEpoch % kNumSlots == 0 && epoch_behind(kEpochMask, 1) == 1);

// Shared memory of a block. In a dispatch that sends the messages follow that it is to send, in combine the lists of
// results.
struct alignas(16) LowLatencyShared {
    struct Group {
        uint64_t started;   // waiting for the count
        uint32_t num_sent;  // tokens of this rank for the expert whose count the group tells of
        uint32_t count;     // tokens that came
        uint32_t begin;     // their first row
    };
    uint32_t failed;                            // this one and the next first: see begin_kernel()
    uint32_t number;                            // of a combine among those of its handle, from 1
    uint32_t arrivals[kMaxGroupsPerBlock + 1];  // of WarpGroups: the warps that share tokens, and each warp group
    Group groups[kMaxGroupsPerBlock];
};

// Copies whole vectors of 16 bytes with all lanes: vector i is lane i % 32's. Fewer under way at a time than in other
// families: a block of 1024 threads leaves a thread 64 registers.
TK_DEVICE void copy_vectors(Warp& warp, void* dst, const void* src, uint32_t bytes) {
    warp.copy_vectors<Vector16, 4>(dst, src, bytes / sizeof(Vector16));
}

// What a warp carries through a kernel of the family.
template <class Rec, class OwnComm>
struct LowLatencyContext : CommContext<Rec, OwnComm> {
    using Comm = OwnComm;
    const LowLatencyArgsOn<Comm>& args;

    // epoch: a number, or what is called for it, see CommContext.
    template <class Epoch>
    TK_DEVICE LowLatencyContext(Warp& own_warp,
                                const LowLatencyArgsOn<Comm>& own_args,
                                typename Rec::Args trace,
                                LowLatencyStage stage,
                                LowLatencyRole role,
                                Epoch epoch)
        : CommContext<Rec, Comm>(
              own_warp, own_args.comm, trace, static_cast<uint32_t>(stage), static_cast<uint32_t>(role), epoch),
          args(own_args) {}

    TK_DEVICE uint32_t warp_group_id() const { return args.launch.warp_group_id(this->warp.warp); }
    TK_DEVICE uint32_t sub_warp_id() const { return args.launch.sub_warp_id(this->warp.warp); }
    TK_DEVICE uint32_t responsible_expert_idx() const {
        return args.launch.responsible_expert_idx(this->warp.block, this->warp.warp);
    }
    // Whether this block has a token of its own, which all its warps share.
    TK_DEVICE bool has_tokens() const { return this->warp.block < args.call.num_tokens; }
    // Whether a wait is on record that only a warp with something to do before or behind it has a reason to record.
    TK_DEVICE bool is_recorded(bool has_part) const { return has_part || args.call.records_idle; }
    TK_DEVICE bool is_idle() const { return responsible_expert_idx() >= args.shape.num_experts; }
    TK_DEVICE ExpertPair pair() const {
        return ExpertPair::of(responsible_expert_idx(), args.shape.num_local_experts());
    }
    TK_DEVICE LowLatencyShared& shared() { return this->warp.template shared<LowLatencyShared>(); }
    TK_DEVICE WarpGroup warp_group() {
        return {2 + warp_group_id(), args.launch.num_warps_per_group, this->warp, shared().arrivals};
    }
    TK_DEVICE LowLatencyShared::Group& group() { return shared().groups[warp_group_id()]; }
    TK_DEVICE uint32_t own_expert(uint32_t local_expert) const {
        return this->comm.rank * args.shape.num_local_experts() + local_expert;
    }
};

}  // namespace tracekern
