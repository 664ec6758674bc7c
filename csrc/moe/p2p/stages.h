// The kernels of each variant, and what the host has to know to launch them.
#pragma once

#include <vector>

#include "moe/p2p/events.h"
#include "moe/p2p/row_sum.h"

namespace tracekern {

// In their order.
inline std::vector<P2PStage> stages_of(P2PVariant variant) {
    using Stage = P2PStage;
    if (is_pipelined(variant)) return {Stage::dispatch_combine};
    if (is_deduplicated(variant)) return {Stage::dispatch, Stage::combine};
    if (is_fused(variant))
        return {Stage::dispatch_send, Stage::dispatch_recv, Stage::combine_send, Stage::combine_recv};
    return {Stage::dispatch_send, Stage::dispatch_recv, Stage::scale_experts, Stage::combine_send, Stage::combine_recv};
}

// Shared memory of a block.
inline uint64_t stage_shared_bytes(P2PStage stage,
                                   const MoeShape& shape,
                                   const P2PLayout& layout,
                                   uint32_t warps_per_block) {
    switch (stage) {
        case P2PStage::dispatch_send:
            return layout.shared.contributions;  // none there: counts and sums
        case P2PStage::combine_recv:
            return sizeof(ReduceShared);
        case P2PStage::dispatch:
        case P2PStage::combine:
        case P2PStage::dispatch_combine:
            return layout.shared.contributions + uint64_t{warps_per_block} * shape.topk * sizeof(Contribution);
        default:
            return 0;
    }
}

}  // namespace tracekern
