// Where a block finds the weights of its outputs.
#pragma once

#include "moe/gemm/blocks.h"

namespace tracekern {

// Where the weights of a block's output tile are: kWarps row tiles from each of two places on, one for each warp.
template <class Product, uint32_t kWarps>
struct TileWeights {
    static constexpr uint32_t kOutputs = kWarpTiles / Product::kPaths * kWarps * WeightBlock::kRows;

    TK_DEVICE static uint32_t num_output_tiles(const GemmArgs& args) {
        return (Product::outputs(args) + kOutputs - 1) / kOutputs;
    }
    // The row tiles of all paths.
    TK_DEVICE static uint32_t num_row_tiles(const GemmArgs& args) {
        return Product::kPaths * Product::outputs(args) / WeightBlock::kRows;
    }
    // The first row tile of tile i of the warps, without the path.
    TK_DEVICE static uint32_t first_of(uint32_t output_tile, uint32_t i) {
        const uint32_t first = output_tile * (kOutputs / WeightBlock::kRows);
        return Product::kPaths == 2 ? first : first + i * kWarps;
    }
    // Of a block of channels, tiles i of all warps: the last output tile may be a part of one.
    TK_DEVICE static uint32_t bytes_of(const GemmArgs& args, uint32_t output_tile, uint32_t i) {
        const uint32_t first = first_of(output_tile, i), end = Product::outputs(args) / WeightBlock::kRows;
        const uint32_t left = first < end ? end - first : 0;
        return (left < kWarps ? left : kWarps) * static_cast<uint32_t>(sizeof(WeightBlock));
    }
    // Tile i, from row tile `first` on, of a block of channels.
    TK_DEVICE static const WeightBlock* at(
        const GemmArgs& args, uint32_t expert, uint32_t block, uint32_t i, uint32_t first) {
        const auto* all = reinterpret_cast<const WeightBlock*>(Product::weights(args));
        const uint32_t num_blocks = Product::channels(args) / WeightBlock::kChannels;
        const uint32_t path = Product::kPaths == 2 ? i * (Product::outputs(args) / WeightBlock::kRows) : 0;
        const uint64_t column = uint64_t{expert} * num_blocks + block;
        return all + column * num_row_tiles(args) + path + first;
    }
};

}  // namespace tracekern
