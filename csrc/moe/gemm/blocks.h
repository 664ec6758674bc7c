// From a block of prepared weights to the operands of its products: 16 rows, and 32 channels of each of its halves.
//
// Each chunk of 4 channels has one number that is not 0, and a product keeps two of them, at places that the metadata
// names. One word of numbers and one of places serve two halves: the number of the even half comes first and a 0
// second, that of the odd half second behind a 0. So no number is moved to the slot that its place wants; where that
// leaves the places of a chunk out of order, it is a product of numbers in any order. No two places of a chunk are
// equal, as PTX demands: the 0 is put at the neighbour of the number.
#pragma once

#include "moe/gemm/product.h"
#include "trace/recorder.h"

namespace tracekern {

constexpr uint32_t kHalvesPerBlock = WeightBlock::kChannels / kChannelsPerHalf;

// What each lane has of a block.
using BlockLanes = PerLane<WeightBlock::Lane>;

// Of the two halves of a word of numbers.
struct HalfRows {
    PerLane<SparseRows> halves[2];
};

TK_DEVICE HalfRows decode_word(Warp& warp, const NibbleSplitter& splitter, const BlockLanes& block, uint32_t word) {
    HalfRows rows;
    TK_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
        warp.each_lane([&](int lane) {
            const SplitNibbles numbers = splitter.split(block[lane].numbers[word] >> 4 * i);
            rows.halves[0][lane].words[i] = numbers.low;
            rows.halves[1][lane].words[i] = numbers.high;
        });
    }
    return rows;
}

// One decoding of a ring's stage on record as a sample: to record all of them takes longer than they do. It is of the
// second tile, since the first one waits for shared memory, too.
template <class Rec>
class DecodeSample {
public:
    static constexpr uint32_t kTile = 1;

    // decodes: of the warp in this stage.
    TK_DEVICE DecodeSample(Rec& steps, uint32_t stage, uint32_t decodes)
        : steps_(steps), stage_(stage), decodes_(decodes) {}

    // Calls decode(), which makes `rows`.
    template <class F>
    TK_DEVICE void record_if(Warp& warp, bool is_sample, const HalfRows& rows, F decode) const {
        with_steps_if(warp, steps_, is_sample, [&](auto& steps) {
            TK_RANGE(steps, GemmEvent::decode_sample, stage_, decodes_);
            decode();
            TK_END_AFTER(behind(rows.halves[1][0].words));
        });
    }

private:
    Rec& steps_;
    const uint32_t stage_;
    const uint32_t decodes_;
};

// Of half `odd` of each word.
TK_DEVICE PerLane<uint32_t> metadata_of(Warp& warp, const BlockLanes& block, uint32_t odd) {
    return warp.lanes([&](int lane) {
        const uint32_t places = block[lane].places & (odd ? 0xccccccccu : 0x33333333u);
        return places | (odd ? places >> 2 ^ 0x11111111u : places << 2 ^ 0x44444444u);
    });
}

// Of the two halves of a word of numbers, for the rows that a lane has sums of.
struct HalfScales {
    PerLane<RowScales> halves[2];
};

TK_DEVICE HalfScales scales_of(Warp& warp, const BlockLanes& block, uint32_t word) {
    const auto own = warp.lanes([&](int lane) { return block[lane].scales; });
    const auto of_lane = [&](uint32_t holder) {
        return warp.gather(own, [&](int lane) { return static_cast<int>((lane & ~3) + holder); });
    };
    const auto top = of_lane(word), bottom = of_lane(2 + word);
    HalfScales scales;
    TK_UNROLL
    for (uint32_t odd = 0; odd < 2; ++odd) {
        scales.halves[odd] = warp.lanes(
            [&](int lane) { return RowScales{bfloat16_of(top[lane], odd), bfloat16_of(bottom[lane], odd)}; });
    }
    return scales;
}

// ---- results ----

// Rows of weights that a warp multiplies at a time, 16 each: gate and up of the same outputs in K2, two times 16
// outputs in K4.
constexpr uint32_t kWarpTiles = 2;

// How many times a warp decodes a word for a block of channels.
constexpr uint32_t kDecodesPerBlock = kWarpTiles * kHalvesPerBlock / 2;

// Sums of a warp's tiles for kTokens tokens, 8 at a time.
template <uint32_t kTokens>
struct WarpSums {
    PerLane<LaneSums> tiles[kWarpTiles][kTokens / 8];

    TK_DEVICE void clear(Warp& warp) {
        TK_UNROLL
        for (auto& tile : tiles) {
            TK_UNROLL
            for (auto& sums : tile) sums = warp.lanes([](int) { return LaneSums{}; });
        }
    }
};

// Rounds 16 outputs of up to 8 tokens and stores them, two of a token by each lane; outputs beyond the last it does
// not. Only stores depend on which warp this is: where a branch does, ptxas takes the warp for divided from there on,
// and moves what all lanes have in common into a uniform register again for each product.
template <class Product>
TK_DEVICE void store_outputs_of(
    Warp& warp, const GemmArgs& args, uint32_t row, uint32_t num_rows, uint32_t output, const PerLane<LaneSums>& sums) {
    TK_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
        const auto of_tokens = warp.lanes([&](int lane) {
            return from_floats<BFloat16>(sums[lane].values[2 * half], sums[lane].values[2 * half + 1]);
        });
        const auto of_outputs = warp.transpose(of_tokens);
        warp.each_lane([&](int lane) {
            if (lane_group(lane) >= num_rows || output >= Product::outputs(args)) return;
            const uint64_t first = uint64_t{row + lane_group(lane)} * Product::outputs(args) + output + 8 * half;
            reinterpret_cast<uint32_t*>(Product::out(args) + first * sizeof(BFloat16))[lane_in_group(lane)] =
                of_outputs[lane];
        });
    }
}

// output_tiles[i]: 16 outputs of tile i, or beyond the last where there are none. In K2 both tiles are of the same.
template <class Product, uint32_t kTokens>
TK_DEVICE void store_results(Warp& warp,
                             const GemmArgs& args,
                             const TokenTile& tile,
                             const uint32_t (&output_tiles)[kWarpTiles],
                             const WarpSums<kTokens>& sums) {
    constexpr uint32_t kResults = kWarpTiles / Product::kPaths;
    TK_UNROLL
    for (uint32_t i = 0; i < kResults; ++i) {
        const uint32_t output = output_tiles[i] * WeightBlock::kRows;
        TK_UNROLL
        for (uint32_t n = 0; n < kTokens / 8; ++n) {
            if (holds_for_all(warp, 8 * n >= tile.num_rows)) continue;
            PerLane<LaneSums> results = sums.tiles[i][n];
            if constexpr (Product::kPaths == 2) {
                warp.each_lane([&](int lane) {
                    TK_UNROLL
                    for (uint32_t k = 0; k < 4; ++k) {
                        results[lane].values[k] =
                            Product::result(sums.tiles[0][n][lane].values[k], sums.tiles[1][n][lane].values[k]);
                    }
                });
            }
            store_outputs_of<Product>(warp, args, tile.first_row + 8 * n, tile.num_rows - 8 * n, output, results);
        }
    }
}

}  // namespace tracekern
