// The variants of the P2P pipeline: what each of them does, and how its warps share the work.
#pragma once

#include <cstdint>

#include "moe/roles.h"

namespace tracekern {

// The steps of the design. All have the same result, bit by bit, but for those that reduce at the experts: they round
// otherwise, and agree with each other.
enum class P2PVariant : uint32_t { flag, token, fused, balanced, dedup, reduce, pipelined };
inline constexpr const char* kP2PVariantNames[] = {
    "flag", "token", "fused", "balanced", "dedup", "reduce", "pipelined"};

// What a variant does.
struct P2PTraits {
    bool token_flags;         // a flag for each row; else one for all rows of a rank pair
    bool fused;               // experts scale while they send back, and nothing is cleared before a call
    bool balanced;            // rows are dealt out over all blocks, whichever rank or expert they belong to
    bool deduplicated;        // a token goes once to each rank that has experts of it; a kernel sends and receives
    bool reduces_at_experts;  // an expert's rank adds up its results of a token and sends one row
    bool pipelined;           // one kernel: a partition of the tokens is on its way out while another one comes back
};
inline constexpr P2PTraits kP2PTraits[] = {
    {false, false, false, false, false, false},
    {true, false, false, false, false, false},
    {true, true, false, false, false, false},
    {true, true, true, false, false, false},
    {true, true, true, true, false, false},
    {true, true, true, true, true, false},
    {true, true, true, true, true, true},
};
constexpr const P2PTraits& traits_of(P2PVariant variant) {
    return kP2PTraits[static_cast<uint32_t>(variant)];
}
// For kernels, which can call no host function.
template <P2PVariant kVariant>
inline constexpr P2PTraits kTraitsOf = kP2PTraits[static_cast<uint32_t>(kVariant)];

// Calls visit(group, index) for this share of rows that lie in groups of known sizes, laid end to end. Returns where
// the share goes on in rows that follow.
template <class GroupSize, class Visit>
TK_DEVICE uint32_t for_shared_rows(Share share, uint32_t num_groups, GroupSize group_size, Visit visit) {
    uint32_t next = share.first;
    uint32_t start = 0;
    for (uint32_t group = 0; group < num_groups; ++group) {
        const uint32_t end = start + group_size(group);
        for (; next < end; next += share.stride) visit(group, next - start);
        start = end;
    }
    return next - start;
}

// How one warp walks over rows that lie in groups (by source rank, by expert) of known sizes: calls visit(group,
// index). Grouped: each block serves the groups block, block + num_blocks, ...; where there are more blocks than
// groups, several blocks share one. Balanced: the groups are laid end to end and dealt out warp by warp.
template <bool kBalanced, class GroupSize, class Visit>
TK_DEVICE void for_rows(Warp& warp, uint32_t num_groups, GroupSize group_size, Visit visit) {
    if constexpr (kBalanced) {
        const Share share{warp.block * warp.num_warps + warp.warp, warp.num_blocks * warp.num_warps};
        for_shared_rows(share, num_groups, group_size, visit);
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
