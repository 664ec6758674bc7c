// How the weights of int4 experts are packed, how a call is cut into tiles, and what its kernels get. Host and device
// agree on it here; docs/int4_sparse.md tells the whole contract.
#pragma once

#include "moe/context.h"
#include "platform/bulk.h"
#include "platform/device.h"

namespace tracekern {

// ---- weights ----

// One of 8 chunks of 4 channels each: one number that is not 0, and the place of it.
//
//   bits 0-31   8 numbers of 4 bits: q4 - 8
//   bits 32-47  8 places of 2 bits in the chunk
//   bits 48-63  the scale of all 8, bf16
constexpr uint32_t kChunksPerWord = 8;
constexpr uint32_t kChannelsPerHalf = 4 * kChunksPerWord;
constexpr uint32_t kChannelsPerGroup = 2 * kChannelsPerHalf;  // of a g2

// w[expert][g2][row][half]: half h of group g2 has the channels from 64 * g2 + 32 * h on.
struct alignas(16) PackedPair {
    uint64_t halves[2];
};

// Prepared weights: the same bits in blocks of 16 rows and 128 channels, w[expert][channels / 128][rows / 16]. A lane
// has in 16 bytes all that it decodes of a block: g = lane / 4, t = lane % 4, half h has the block's channels from 32 h
// on.
struct WeightBlock {
    static constexpr uint32_t kRows = 16;
    static constexpr uint32_t kChannels = 128;

    struct alignas(16) Lane {
        // Word f, of halves 2 f in its low 16 bits and 2 f + 1 in the high ones: number j is that of chunk
        // t + 4 (j / 2) of row g + 8 (j % 2).
        uint32_t numbers[2];
        // 4 bits n: places of chunk 4 (t % 2) + n % 4 of row g + 8 (n / 4), that of half 2 (t / 2) in the low 2 bits,
        // that of half 2 (t / 2) + 1 in the high ones.
        uint32_t places;
        // bf16 of row g + 8 (t / 2), halves 2 (t % 2) and 2 (t % 2) + 1.
        uint32_t scales;
    } lanes[32];
};

// ---- tiles ----

// Some rows of an expert that are multiplied together by staging `wide` or `ring`. An expert's rows are cut into tiles
// of 64, and what is left of them is one tile of the least of four widths. Each width has a list of its own.
struct alignas(16) TokenTile {
    uint32_t expert;
    uint32_t first_row;
    uint32_t num_rows;
    uint32_t unused;
};
constexpr uint32_t kTileWidths[] = {8, 16, 32, 64};
constexpr uint32_t kNumTileWidths = 4;
constexpr uint32_t kLargestTile = kTileWidths[kNumTileWidths - 1];

// The list of a tile, by its width.
TK_HOST_DEVICE constexpr uint32_t tile_list_of(uint32_t num_rows) {
    return (num_rows > 8) + (num_rows > 16) + (num_rows > 32);
}
// Where a list begins. An expert has one tile at most in each but the last, which is open.
TK_HOST_DEVICE constexpr uint32_t tile_list_begin(uint32_t list, uint32_t num_listed) {
    return list * num_listed;
}
constexpr uint32_t kOpenListRows = 33;  // rows that a tile of the last list has at least

// Each product has a launch for tiles of few tokens, 8 or 16, and one for those of many, 32 or 64.
enum class GemmLoad : uint32_t { few, many };
constexpr uint32_t kFewTokens = 16;
constexpr uint32_t kManyTokens = 64;

// What a block computes with the other stagings at a time: some outputs of some tokens of one expert, in phases one
// after the other. A warp has as many rows of a phase as its multiplication does.
struct GemmTile {
    static constexpr uint32_t kTokens = 8;
    static constexpr uint32_t kWarps = 4;
    static constexpr uint32_t kWarpOutputs = 16;
    static constexpr uint32_t kPhaseOutputs = kWarps * kWarpOutputs;
    static constexpr uint32_t kPhases = 2;
    static constexpr uint32_t kOutputs = kPhases * kPhaseOutputs;
};

TK_HOST_DEVICE constexpr uint32_t num_token_tiles(uint32_t num_tokens) {
    return (num_tokens + GemmTile::kTokens - 1) / GemmTile::kTokens;
}

// One channel of all tokens of a tile.
struct alignas(16) ChannelRow {
    BFloat16 tokens[GemmTile::kTokens];
};

// What a warp's lanes computed, turned so that a token's outputs stand together, in parts that a lane moves at once.
struct alignas(16) OutputPart {
    BFloat16 outputs[8];
};
struct OutputTile {
    static constexpr uint32_t kParts = GemmTile::kWarpOutputs / 8;
    OutputPart tokens[GemmTile::kTokens][kParts];

    TK_DEVICE BFloat16& at(uint32_t token, uint32_t output) { return tokens[token][output / 8].outputs[output % 8]; }
};

// Shared memory of a block of K2 or K4; Xsh[channels] follows it.
struct alignas(16) SweepShared {
    OutputTile outputs[GemmTile::kWarps];

    TK_HOST_DEVICE static constexpr uint64_t bytes(uint32_t channels) {
        return sizeof(SweepShared) + uint64_t{channels} * sizeof(ChannelRow);
    }
    TK_DEVICE ChannelRow* x() { return reinterpret_cast<ChannelRow*>(this + 1); }
};
// Of 7168 channels an H100 has room for two blocks on each SM, which takes 1 KiB for itself of each: not a byte more.
static_assert(2 * (SweepShared::bytes(7168) + (1 << 10)) <= 228 << 10);

// ---- the call ----

constexpr uint32_t kMaxGemmExperts = 4096;
constexpr uint32_t kMaxGemmTopk = 16;

// Row-major and contiguous. Rows of an expert stand together. They are packed, those of the first expert first, or each
// expert has a region of its own. M: their number, at most num_tokens * topk, or the rows of all regions.
struct GemmArgs {
    RowMap x_map;  // of the rows that K2 or K4 reads; made by its launch
    uint32_t num_tokens;
    uint32_t topk;
    uint32_t num_experts;
    uint32_t num_listed;  // experts that this call computes
    uint32_t hidden;
    uint32_t intermediate;
    uint32_t num_rows;           // M
    uint32_t rows_per_expert;    // of a region
    uint32_t offset_stride;      // of expert_offset: 1 where rows are packed, 2 of regions
    const uint32_t* expert_ids;  // Eids [num_listed]; nullptr: all of them
    const uint32_t* abort;       // not 0: K2 and K4 return at once; nullptr: there is none
    const char* x;               // [num_tokens][hidden] bf16
    const int32_t* topk_ids;     // [num_tokens][topk]
    const float* topk_weights;   // [num_tokens][topk]
    const PackedPair* w13;       // [num_experts][hidden / 64][2 * intermediate]: gate rows, then up rows; or prepared
    const PackedPair* w2;        // [num_experts][intermediate / 64][hidden]; or prepared
    uint32_t* expert_offset;     // OffE [num_experts + 1]: the first row of each expert; of regions [num_experts][2]
    const uint32_t* row_counts;  // [num_experts]: the rows of each region, its first ones; nullptr: rows are packed
    uint32_t* tile_end;          // TileEnd [num_listed + 1]: token tiles of the experts before this one
    TokenTile* tile_list;        // lists of all widths, see tile_list_begin(); nullptr: tile_end is made instead
    uint32_t* tile_count;        // [kNumTileWidths]
    int32_t* inverse;            // Inv [num_tokens][topk]: the row, -1 for none
    char* x_rows;                // X_perm [M][hidden] bf16
    char* middle_rows;           // X2_perm [M][intermediate] bf16
    char* result_rows;           // Y_perm [M][hidden] bf16
    char* out;                   // [num_tokens][hidden] bf16
    uint32_t detail;             // every how many-th tile is on record step by step; 0: none

    TK_DEVICE uint32_t listed_expert(uint32_t listed) const { return expert_ids ? expert_ids[listed] : listed; }
    // The first row of an expert and the one behind its last, which in OffE is the first of the next expert.
    TK_DEVICE uint32_t* rows_of(uint32_t expert) const { return expert_offset + expert * offset_stride; }
    // 0 for an expert that there is not: on a GPU expert_ids is not checked before a call.
    TK_DEVICE uint32_t num_rows_of(uint32_t expert) const {
        return expert < num_experts ? rows_of(expert)[1] - rows_of(expert)[0] : 0;
    }
    TK_DEVICE uint32_t num_choices() const { return num_tokens * topk; }
};

}  // namespace tracekern
