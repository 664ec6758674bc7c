// Products that a warp makes alone: of its two row tiles and one block of channels, for 8 tokens at a time.
#pragma once

#include "moe/gemm/blocks.h"

namespace tracekern {

// block: of the channels, for the record. x_place(lane, i, half): where the 16 bytes of x are that a lane names for 8
// tokens, from token 8 i on, and half `half` of the block, see Warp::load_columns().
template <uint32_t kTokens, class Rec, class Place>
TK_DEVICE void multiply_block(Warp& warp,
                              Rec& steps,
                              const NibbleSplitter& splitter,
                              const BlockLanes (&blocks)[kWarpTiles],
                              uint32_t block,
                              WarpSums<kTokens>& sums,
                              Place x_place) {
    TK_UNROLL
    for (uint32_t word = 0; word < kHalvesPerBlock / 2; ++word) {
        HalfScales scales[kWarpTiles];
        HalfRows rows[kWarpTiles];
        TK_UNROLL
        for (uint32_t tile = 0; tile < kWarpTiles; ++tile) {
            TK_RANGE(steps, GemmEvent::decode, 2 * block + word, 0u, tile);
            scales[tile] = scales_of(warp, blocks[tile], word);
            rows[tile] = decode_word(warp, splitter, blocks[tile], word);
            TK_END_AFTER(behind(rows[tile].halves[1][0].words));
        }
        TK_UNROLL
        for (uint32_t odd = 0; odd < 2; ++odd) {
            const uint32_t half = 2 * word + odd;
            TK_RANGE(steps, GemmEvent::multiply, 2 * block + word, odd, 0u);
            PerLane<uint32_t> metadata[kWarpTiles];
            TK_UNROLL
            for (uint32_t tile = 0; tile < kWarpTiles; ++tile) metadata[tile] = metadata_of(warp, blocks[tile], odd);
            TK_UNROLL
            for (uint32_t i = 0; i < kTokens / 8; ++i) {
                const auto column = warp.load_columns([&](int lane) -> const void* { return x_place(lane, i, half); });
                TK_UNROLL
                for (uint32_t tile = 0; tile < kWarpTiles; ++tile) {
                    const auto& a = rows[tile].halves[odd];
                    const auto product = word == 0 ? warp.template multiply_unordered<0>(a, column, metadata[tile])
                                                   : warp.template multiply_unordered<1>(a, column, metadata[tile]);
                    const auto& scale = scales[tile].halves[odd];
                    warp.each_lane([&](int lane) { sums.tiles[tile][i][lane].add_scaled(product[lane], scale[lane]); });
                }
            }
        }
    }
}

}  // namespace tracekern
