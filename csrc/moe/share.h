// How warps share work: all of them, or half by half.
#pragma once

#include "platform/device.h"

namespace tracekern {

// One warp's part of items that many share: first, first + stride, ...
struct Share {
    uint32_t first;
    uint32_t stride;

    // Of items that all warps of the grid share. Neighbouring items go to different blocks.
    TK_DEVICE static Share of_all(const Warp& warp) {
        return {warp.warp * warp.num_blocks + warp.block, warp.num_warps * warp.num_blocks};
    }
};

// What a warp has of the work that blocks share half by half. A block of one warp has both halves.
struct OwnPart {
    bool in_first_half;
    bool in_second_half;
    Share share;  // of the items of its half

    // block: of num_blocks that share. Neighbouring items go to different blocks.
    TK_DEVICE static OwnPart of(const Warp& warp, uint32_t block, uint32_t num_blocks) {
        if (warp.num_warps == 1) return {true, true, {block, num_blocks}};
        const uint32_t num_first = warp.num_warps / 2;
        const bool in_first = warp.warp < num_first;
        const uint32_t index = in_first ? warp.warp : warp.warp - num_first;
        const uint32_t count = in_first ? num_first : warp.num_warps - num_first;
        return {in_first, !in_first, {index * num_blocks + block, count * num_blocks}};
    }
};

}  // namespace tracekern
