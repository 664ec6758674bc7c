// Products that a warp makes alone: of its two row tiles and one block of channels, for 8 tokens at a time.
#pragma once

#include "moe/gemm/blocks.h"

namespace tracekern {

// Records each step of a block of channels.
template <class Rec>
class EachStep {
public:
    TK_DEVICE EachStep(Rec& steps, uint32_t block) : steps_(steps), block_(block) {}

    template <class F>
    TK_DEVICE void decode(Warp&, uint32_t word, uint32_t tile, const HalfRows& rows, F decode) const {
        TK_RANGE(steps_, GemmEvent::decode, 2 * block_ + word, 0u, tile);
        decode();
        TK_END_AFTER(behind(rows.halves[1][0].words));
    }
    template <class F>
    TK_DEVICE void multiply(uint32_t word, uint32_t odd, F multiply) const {
        TK_RANGE(steps_, GemmEvent::multiply, 2 * block_ + word, odd, 0u);
        multiply();
    }

private:
    Rec& steps_;
    const uint32_t block_;
};

// Records one decoding, of the first block of a stage.
template <class Rec>
class OneDecode {
public:
    TK_DEVICE OneDecode(const DecodeSample<Rec>& sample, bool is_first) : sample_(sample), is_first_(is_first) {}

    template <class F>
    TK_DEVICE void decode(Warp& warp, uint32_t word, uint32_t tile, const HalfRows& rows, F decode) const {
        const bool is_sample = word == 0 && tile == DecodeSample<Rec>::kTile && is_first_;
        sample_.record_if(warp, is_sample, rows, decode);
    }
    template <class F>
    TK_DEVICE void multiply(uint32_t, uint32_t, F multiply) const {
        multiply();
    }

private:
    const DecodeSample<Rec>& sample_;
    const bool is_first_;
};

// steps: EachStep or OneDecode. x_place(lane, i, half): where the 16 bytes of x are that a lane names for 8 tokens,
// from token 8 i on, and half `half` of the block, see Warp::load_columns().
template <uint32_t kTokens, class Steps, class Place>
TK_DEVICE void multiply_block(Warp& warp,
                              const Steps& steps,
                              const NibbleSplitter& splitter,
                              const BlockLanes (&blocks)[kWarpTiles],
                              WarpSums<kTokens>& sums,
                              Place x_place) {
    TK_UNROLL
    for (uint32_t word = 0; word < kHalvesPerBlock / 2; ++word) {
        HalfScales scales[kWarpTiles];
        HalfRows rows[kWarpTiles];
        TK_UNROLL
        for (uint32_t tile = 0; tile < kWarpTiles; ++tile) {
            steps.decode(warp, word, tile, rows[tile], [&] {
                scales[tile] = scales_of(warp, blocks[tile], word);
                rows[tile] = decode_word(warp, splitter, blocks[tile], word);
            });
        }
        TK_UNROLL
        for (uint32_t odd = 0; odd < 2; ++odd) {
            const uint32_t half = 2 * word + odd;
            steps.multiply(word, odd, [&] {
                PerLane<uint32_t> metadata[kWarpTiles];
                TK_UNROLL
                for (uint32_t tile = 0; tile < kWarpTiles; ++tile) {
                    metadata[tile] = metadata_of(warp, blocks[tile], odd);
                }
                TK_UNROLL
                for (uint32_t i = 0; i < kTokens / 8; ++i) {
                    const auto column =
                        warp.load_columns([&](int lane) -> const void* { return x_place(lane, i, half); });
                    TK_UNROLL
                    for (uint32_t tile = 0; tile < kWarpTiles; ++tile) {
                        const auto& a = rows[tile].halves[odd];
                        const auto product = word == 0 ? warp.template multiply_unordered<0>(a, column, metadata[tile])
                                                       : warp.template multiply_unordered<1>(a, column, metadata[tile]);
                        const auto& scale = scales[tile].halves[odd];
                        warp.each_lane(
                            [&](int lane) { sums.tiles[tile][i][lane].add_scaled(product[lane], scale[lane]); });
                    }
                }
            });
        }
    }
}

}  // namespace tracekern
