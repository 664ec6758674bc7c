// What every pipeline is made of: the shape of the layer, the type of its numbers, the grid. A family's Config adds its
// own options.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "platform/device.h"

namespace tracekern {

// A mixture-of-experts layer spread over ranks, the same on every rank.
struct MoeShape {
    uint32_t num_ranks;
    uint32_t max_tokens;  // of one rank; the ranks' real numbers differ
    uint32_t num_experts;
    uint32_t topk;
    uint32_t hidden;
    uint32_t element_bytes;

    TK_HOST_DEVICE uint32_t num_local_experts() const { return num_experts / num_ranks; }
    // -1 is no expert. Nor is any other number out of range: on a GPU they are not checked before a call.
    TK_HOST_DEVICE bool is_expert(int32_t chosen) const { return static_cast<uint32_t>(chosen) < num_experts; }
    TK_HOST_DEVICE uint32_t rank_of(uint32_t expert) const { return expert / num_local_experts(); }
    TK_HOST_DEVICE uint32_t row_bytes() const { return hidden * element_bytes; }
    // "Flat" tokens: one for each (token, choice). A rank can send all of its own to one peer, or get all of
    // everybody's.
    TK_HOST_DEVICE uint32_t max_flat() const { return max_tokens * topk; }
    TK_HOST_DEVICE uint64_t max_rows() const { return uint64_t{num_ranks} * max_flat(); }
};

// The number types of rows.
enum class NumberType : uint32_t { fp32, fp16, bf16 };
inline constexpr const char* kNumberNames[] = {"fp32", "fp16", "bf16"};
inline constexpr uint32_t kNumberBytes[] = {4, 2, 2};

// Calls f.operator()<T>() with the type of the number.
template <class F>
void with_number_type(NumberType number, F f) {
    if (number == NumberType::bf16) return f.template operator()<BFloat16>();
#ifdef TK_ONE_NUMBER  // for tests that compile often
    throw std::invalid_argument("built for bf16 alone");
#else
    if (number == NumberType::fp32) return f.template operator()<float>();
    return f.template operator()<Half>();
#endif
}

constexpr uint32_t kMaxStages = 16;  // of a family

template <class Variant>
struct PipelineConfig {
    MoeShape shape;
    Variant variant;
    NumberType number;
    uint32_t num_blocks = 4;
    uint32_t warps_per_block = 4;
    uint32_t stage_blocks[kMaxStages] = {};  // of a kernel with another number of blocks; else 0

    template <class Stage>
    uint32_t blocks_of(Stage stage) const {
        const uint32_t own = stage_blocks[static_cast<uint32_t>(stage)];
        return own ? own : num_blocks;
    }
};

}  // namespace tracekern
