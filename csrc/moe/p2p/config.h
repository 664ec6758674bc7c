// What a pipeline is made of, on every backend.
#pragma once

#include "moe/number_type.h"
#include "moe/p2p/variants.h"
#include "moe/shape.h"

namespace tracekern {

struct P2PConfig {
    MoeShape shape;
    P2PVariant variant;
    NumberType number;
    uint32_t partitions = 2;  // of the pipelined variant, at most
    uint32_t num_blocks = 4;
    uint32_t warps_per_block = 4;
};

}  // namespace tracekern
