// What a pipeline is made of, on every backend, and the names of its choices.
#pragma once

#include "moe/p2p/variants.h"
#include "moe/shape.h"

namespace tracekern {

inline constexpr const char* kVariantNames[] = {"flag", "token", "fused", "balanced", "dedup", "reduce", "pipelined"};

enum class NumberType : uint32_t { fp32, fp16, bf16 };
inline constexpr const char* kNumberNames[] = {"fp32", "fp16", "bf16"};

struct P2PConfig {
    MoeShape shape;
    P2PVariant variant;
    NumberType number;
    uint32_t partitions = 2;  // of the pipelined variant, at most
    uint32_t num_blocks = 4;
    uint32_t warps_per_block = 4;
};

}  // namespace tracekern
