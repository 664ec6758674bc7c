// The layout of a call, by one block: which rows are whose, and which tiles there are. Counts never leave the device.
#pragma once

#include "moe/gemm/events.h"
#include "moe/gemm/layout.h"
#include "trace/recorder.h"

namespace tracekern {

// inverse[choice] = how many choices of the expert stand before it. Returns how many there are. One warp, 32 choices at
// a time: on machines with more lanes the others have nothing to do.
TK_DEVICE uint32_t rank_choices_of(Warp& warp, const GemmArgs& args, uint32_t expert) {
    const uint32_t num_choices = args.num_choices();
    uint32_t count = 0;
    TK_NO_UNROLL
    for (uint32_t first = 0; first < num_choices; first += 32) {
        const auto is_of_expert = [&](int lane) {
            const uint32_t choice = first + static_cast<uint32_t>(lane);
            return lane < 32 && choice < num_choices && args.topk_ids[choice] == static_cast<int32_t>(expert);
        };
        const uint32_t bits = warp.ballot(is_of_expert);
        warp.each_lane([&](int lane) {
            if (!is_of_expert(lane)) return;
            const uint32_t before = bits & ((1u << lane) - 1);
            args.inverse[first + static_cast<uint32_t>(lane)] = static_cast<int32_t>(count + count_bits(before));
        });
        count += count_bits(bits);
    }
    return count;
}

// expert_offset and inverse of the choices; one of no expert, or of one that is not listed, has no row.
template <class Rec>
TK_DEVICE void place_rows(Warp& warp, Rec& recorder, const GemmArgs& args) {
    auto& counts = warp.shared<uint32_t[kMaxGemmExperts]>();
    warp.block_strided(args.num_experts, [&](uint32_t expert) { counts[expert] = 0; });
    warp.block_sync();

    // Each warp ranks the choices of some experts.
    TK_NO_UNROLL
    for (uint32_t listed = warp.warp; listed < args.num_listed; listed += warp.num_warps) {
        const uint32_t expert = args.listed_expert(listed);
        if (expert >= args.num_experts) continue;
        TK_RANGE(recorder, GemmEvent::rank_choices, expert);
        const uint32_t count = rank_choices_of(warp, args, expert);
        warp.leader([&] { counts[expert] = count; });
        TK_END(count);
    }
    warp.block_sync();

    // An expert's rows begin behind those of all before it.
    TK_NO_UNROLL
    for (uint32_t expert = warp.warp; expert <= args.num_experts; expert += warp.num_warps) {
        const uint32_t before = warp.sum_over(expert, [&](uint32_t other) { return counts[other]; });
        warp.leader([&] { args.expert_offset[expert] = before; });
    }
    warp.block_sync();

    warp.block_strided(args.num_choices(), [&](uint32_t choice) {
        const auto expert = static_cast<uint32_t>(args.topk_ids[choice]);
        const bool has_row = expert < args.num_experts && counts[expert] != 0;
        const int32_t first = has_row ? static_cast<int32_t>(args.expert_offset[expert]) : 0;
        args.inverse[choice] = has_row ? first + args.inverse[choice] : -1;
    });
}

TK_DEVICE void count_tiles(Warp& warp, const GemmArgs& args) {
    TK_NO_UNROLL
    for (uint32_t listed = warp.warp; listed <= args.num_listed; listed += warp.num_warps) {
        const uint32_t before = warp.sum_over(
            listed, [&](uint32_t other) { return num_token_tiles(args.num_rows_of(args.listed_expert(other))); });
        warp.leader([&] { args.tile_end[listed] = before; });
    }
}

// How many tiles some experts have in each list, two counts in a word.
struct TileCounts {
    static constexpr uint32_t kBits = 13;  // an expert has one tile at most in each list but the last
    static_assert(kMaxGemmExperts < 1 << kBits && kNumTileWidths == 4);
    uint32_t words[2];

    TK_DEVICE uint32_t of(uint32_t list) const {
        const uint32_t word = list / 2 ? words[1] : words[0];  // not by index, which would put both into memory
        return list % 2 ? word >> kBits : word & ((1u << kBits) - 1);
    }
};

// Word `word` of the counts of one expert.
TK_DEVICE uint32_t tile_counts_of(uint32_t num_rows, uint32_t word) {
    const uint32_t whole = num_rows / kLargestTile, left = num_rows % kLargestTile;
    const uint32_t list = tile_list_of(left);
    const uint32_t own = left && list / 2 == word ? 1u << list % 2 * TileCounts::kBits : 0;
    return own + (word == 1 ? whole << TileCounts::kBits : 0);
}

// Each warp writes the tiles of some experts behind those of all experts before.
TK_DEVICE void list_tiles(Warp& warp, const GemmArgs& args) {
    constexpr uint32_t kLastList = kNumTileWidths - 1;
    TK_NO_UNROLL
    for (uint32_t listed = warp.warp; listed <= args.num_listed; listed += warp.num_warps) {
        TileCounts before;
        TK_UNROLL
        for (uint32_t word = 0; word < 2; ++word) {
            before.words[word] = warp.sum_over(listed, [&](uint32_t other) {
                return tile_counts_of(args.num_rows_of(args.listed_expert(other)), word);
            });
        }
        if (listed == args.num_listed) {
            warp.strided(kNumTileWidths, [&](uint32_t list) { args.tile_count[list] = before.of(list); });
            continue;
        }
        const uint32_t expert = args.listed_expert(listed), num_rows = args.num_rows_of(expert);
        const uint32_t num_tiles = (num_rows + kLargestTile - 1) / kLargestTile;
        warp.strided(num_tiles, [&](uint32_t i) {
            const uint32_t first = i * kLargestTile, left = num_rows - first;
            const uint32_t rows = left < kLargestTile ? left : kLargestTile, list = tile_list_of(rows);
            const uint32_t place = before.of(list) + (list == kLastList ? i : 0);
            args.tile_list[tile_list_begin(list, args.num_listed) + place] = {
                expert, args.rows_of(expert)[0] + first, rows, 0};
        });
    }
}

template <class Rec>
TK_DEVICE void lay_out_tiles(Warp& warp, Rec& recorder, const GemmArgs& args) {
    TK_RANGE(recorder, GemmEvent::lay_out_tiles);
    if (args.tile_list) {
        list_tiles(warp, args);
    } else {
        count_tiles(warp, args);
    }
}

struct GemmPlaceRows {
    using Args = GemmArgs;
    static constexpr GemmStage kStage = GemmStage::layout;
    static constexpr uint32_t kMaxThreads = 1024;
    static constexpr uint32_t kNumWarps = 32;
    static constexpr bool kIsOneBlock = true;

    TK_HOST_DEVICE static uint64_t shared_bytes(const GemmArgs& args, uint32_t) {
        return args.num_experts * sizeof(uint32_t);
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const GemmArgs& args, typename Rec::Args trace) {
        Rec recorder(trace, warp, static_cast<uint32_t>(GemmRole::layout));
        place_rows(warp, recorder, args);
        lay_out_tiles(warp, recorder, args);
    }
};

// expert_offset of regions, of each of which the first rows are there.
TK_DEVICE void place_regions(Warp& warp, const GemmArgs& args) {
    warp.block_strided(args.num_experts, [&](uint32_t expert) {
        const uint32_t first = expert * args.rows_per_expert;
        args.rows_of(expert)[0] = first;
        args.rows_of(expert)[1] = first + args.row_counts[expert];
    });
    warp.block_sync();
}

// The layout where the rows are there, and expert_offset or row_counts says whose they are.
struct GemmLayOutTiles {
    using Args = GemmArgs;
    static constexpr GemmStage kStage = GemmStage::tiles;
    static constexpr uint32_t kMaxThreads = 1024;
    static constexpr uint32_t kNumWarps = 32;
    static constexpr bool kIsOneBlock = true;

    TK_HOST_DEVICE static uint64_t shared_bytes(const GemmArgs&, uint32_t) { return 0; }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const GemmArgs& args, typename Rec::Args trace) {
        Rec recorder(trace, warp, static_cast<uint32_t>(GemmRole::layout));
        if (args.row_counts) place_regions(warp, args);
        lay_out_tiles(warp, recorder, args);
    }
};

}  // namespace tracekern
