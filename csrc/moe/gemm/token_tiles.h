// The tiles of 8 tokens of stagings without a ring: which expert a tile is of.
#pragma once

#include "moe/gemm/layout.h"

namespace tracekern {

struct TileWork {
    uint32_t tile;
    uint32_t expert;
    uint32_t token_tile;  // of all experts
    uint32_t output_tile;
    uint32_t first_row;
    uint32_t num_rows;  // 1 to 8
};

// Tiles of the same tokens are neighbours: blocks that run side by side read the same x. The expert of a token tile is
// the first whose tiles end behind it, which passes over experts without tokens.
TK_DEVICE TileWork find_tile(Warp& warp, const GemmArgs& args, uint32_t tile, uint32_t num_output_tiles) {
    TileWork work;
    work.tile = tile;
    work.token_tile = tile / num_output_tiles;
    work.output_tile = tile - work.token_tile * num_output_tiles;
    const uint32_t listed = warp.sum_over(
        args.num_listed, [&](uint32_t before) { return args.tile_end[before + 1] <= work.token_tile ? 1u : 0u; });
    work.expert = args.listed_expert(listed);
    const uint32_t first = (work.token_tile - args.tile_end[listed]) * GemmTile::kTokens;
    const uint32_t* rows = args.rows_of(work.expert);
    work.first_row = rows[0] + first;
    const uint32_t left = rows[1] - work.first_row;
    work.num_rows = left < GemmTile::kTokens ? left : GemmTile::kTokens;
    return work;
}

}  // namespace tracekern
