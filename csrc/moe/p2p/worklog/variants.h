// What the variants of the worklog do, and how their warps share the work.
#pragma once

#include "moe/p2p/layout.h"

namespace tracekern {

struct WorklogTraits {
    bool token_flags;  // a flag for each row; else one for all rows of a rank pair
    bool fused;        // experts scale while they send back, and nothing is cleared before a call
    bool balanced;     // rows are dealt out over all blocks, whichever rank or expert they belong to
};
inline constexpr WorklogTraits kWorklogTraits[] = {
    {false, false, false},
    {true, false, false},
    {true, true, false},
    {true, true, true},
};
// variant: one that is not deduplicated.
constexpr const WorklogTraits& worklog_traits_of(P2PVariant variant) {
    return kWorklogTraits[static_cast<uint32_t>(variant)];
}
// For kernels, which can call no host function.
template <P2PVariant kVariant>
inline constexpr WorklogTraits kTraitsOf = kWorklogTraits[static_cast<uint32_t>(kVariant)];

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
