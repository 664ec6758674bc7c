// The shape of a mixture-of-experts layer spread over ranks, the same on every rank.
#pragma once

#include <cstdint>

#include "platform/qualifiers.h"

namespace tracekern {

struct MoeShape {
    uint32_t num_ranks;
    uint32_t max_tokens;  // of one rank; the ranks' real numbers differ
    uint32_t num_experts;
    uint32_t topk;
    uint32_t hidden;
    uint32_t element_bytes;

    TK_HOST_DEVICE uint32_t num_local_experts() const { return num_experts / num_ranks; }
    // -1 is no expert. Nor is any other number out of range: on a GPU nobody looks at them before a call.
    TK_HOST_DEVICE bool is_expert(int32_t chosen) const { return static_cast<uint32_t>(chosen) < num_experts; }
    TK_HOST_DEVICE uint32_t rank_of(uint32_t expert) const { return expert / num_local_experts(); }
    TK_HOST_DEVICE uint32_t row_bytes() const { return hidden * element_bytes; }
    // "Flat" tokens: one for each (token, choice). A rank can send all of its own to one peer, or get all of
    // everybody's.
    TK_HOST_DEVICE uint32_t max_flat() const { return max_tokens * topk; }
    TK_HOST_DEVICE uint64_t max_rows() const { return uint64_t{num_ranks} * max_flat(); }
};

}  // namespace tracekern
