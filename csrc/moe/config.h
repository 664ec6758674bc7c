// What every pipeline is made of; a family's Config adds its own options.
#pragma once

#include "moe/number_type.h"
#include "moe/shape.h"

namespace tracekern {

template <class Variant>
struct PipelineConfig {
    MoeShape shape;
    Variant variant;
    NumberType number;
    uint32_t num_blocks = 4;
    uint32_t warps_per_block = 4;
};

}  // namespace tracekern
