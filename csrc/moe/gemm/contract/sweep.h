// K2 and K4 as the contract has them.
//
// Blocks share the tiles. All warps of a block load x of the tile's tokens; then, phase by phase, each sweeps alone
// over all channels with 16 outputs of its own.
#pragma once

#include "comm/give_up.h"
#include "moe/gemm/contract/decode.h"
#include "moe/gemm/product.h"
#include "moe/gemm/token_tiles.h"
#include "moe/rows.h"
#include "trace/recorder.h"

namespace tracekern {

// ---- roles in a tile ----

// Xsh[channel][token] = x of the tile's rows; tokens that are missing are 0. A lane turns two channels of all tokens:
// it reads 4 bytes of each row, and its stores of 16 bytes meet those of its neighbours in pairs only.
template <class Product>
TK_DEVICE void load_x(Warp& warp, const GemmArgs& args, const TileWork& work) {
    const uint32_t num_pairs = Product::channels(args) / 2;
    const auto* rows = reinterpret_cast<const uint32_t*>(Product::in(args)) + uint64_t{work.first_row} * num_pairs;
    ChannelRow* x = warp.shared<SweepShared>().x();
    warp.block_strided(num_pairs, [&](uint32_t i) {
        struct {
            uint32_t words[GemmTile::kTokens / 2];
        } even, odd;
        TK_UNROLL
        for (uint32_t k = 0; k < GemmTile::kTokens / 2; ++k) {
            const uint32_t first = 2 * k < work.num_rows ? rows[uint64_t{2 * k} * num_pairs + i] : 0;
            const uint32_t second = 2 * k + 1 < work.num_rows ? rows[uint64_t{2 * k + 1} * num_pairs + i] : 0;
            even.words[k] = (first & 0xffffu) | second << 16;
            odd.words[k] = first >> 16 | (second & 0xffff0000u);
        }
        x[2 * i] = bits_as<ChannelRow>(even);
        x[2 * i + 1] = bits_as<ChannelRow>(odd);
    });
}

// Sums of the 16 outputs from first_output on.
template <class Product, GemmStaging kStaging, class Rec>
TK_DEVICE void sweep(Warp& warp,
                     Rec& steps,
                     const GemmArgs& args,
                     uint32_t expert,
                     uint32_t first_output,
                     PerLane<LaneSums> (&sums)[Product::kPaths]) {
    const uint32_t num_groups = Product::channels(args) / kChannelsPerGroup;
    const uint32_t num_rows = Product::kPaths * Product::outputs(args);
    const PackedPair* first = Product::weights(args) + uint64_t{expert} * num_groups * num_rows + first_output;
    const auto group_bytes = num_rows * static_cast<uint32_t>(sizeof(PackedPair));
    const WeightRows<Product::kPaths> weights{first, num_groups, group_bytes, Product::outputs(args)};
    TK_UNROLL
    for (uint32_t path = 0; path < Product::kPaths; ++path) sums[path] = warp.lanes([](int) { return LaneSums{}; });
    const ChannelRow* x = warp.shared<SweepShared>().x();
    SweepWith<kStaging>::run(warp, steps, weights, x, sums);
}

template <class Product>
TK_DEVICE float result_of(const PerLane<LaneSums> (&sums)[Product::kPaths], int lane, uint32_t i) {
    if constexpr (Product::kPaths == 1) {
        return sums[0][lane].values[i];
    } else {
        return Product::result(sums[0][lane].values[i], sums[1][lane].values[i]);
    }
}

// Rounds the sums of a warp's 16 outputs and stores them, turned so that 16 outputs of a token leave together. Only
// this warp's lanes meet: blocks have no barrier here.
template <class Product>
TK_DEVICE void store_outputs(Warp& warp,
                             const GemmArgs& args,
                             const TileWork& work,
                             uint32_t first_output,
                             const PerLane<LaneSums> (&sums)[Product::kPaths]) {
    OutputTile& tile = warp.shared<SweepShared>().outputs[warp.warp];
    warp.each_lane([&](int lane) {
        const uint32_t token = 2 * lane_in_group(lane);
        TK_UNROLL
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t both = from_floats<BFloat16>(result_of<Product>(sums, lane, 2 * half),
                                                        result_of<Product>(sums, lane, 2 * half + 1));
            const uint32_t output = lane_group(lane) + 8 * half;
            tile.at(token, output) = {static_cast<uint16_t>(both)};
            tile.at(token + 1, output) = {static_cast<uint16_t>(both >> 16)};
        }
    });
    warp.sync();
    warp.strided(GemmTile::kTokens * OutputTile::kParts, [&](uint32_t i) {
        const uint32_t token = i / OutputTile::kParts, part = i % OutputTile::kParts;
        if (token >= work.num_rows) return;
        const uint64_t first = uint64_t{work.first_row + token} * Product::outputs(args) + first_output;
        auto* out = reinterpret_cast<OutputPart*>(Product::out(args) + first * sizeof(BFloat16));
        store_once(out + part, tile.tokens[token][part]);
    });
    warp.sync();
}

// ---- the kernel ----

// The same in all warps of the block, which meet here: behind it x may be the next tile's. The word is in the outputs
// of the first warp, which it writes behind the barrier of preload only.
TK_DEVICE bool block_has_aborted(Warp& warp, const GemmArgs& args) {
    auto& seen = warp.shared<uint32_t>();
    if (warp.warp == 0) warp.leader([&] { seen = args.abort ? look_at_abort(args.abort) : 0; });
    warp.block_sync();
    return seen != 0;
}

template <GemmStage kOwnStage, GemmStaging kStaging, GemmDetail kDetail>
struct GemmSweep {
    using Product = GemmProduct<kOwnStage>;
    using Args = GemmArgs;
    using Untraced = GemmSweep<kOwnStage, kStaging, GemmDetail::parts>;
    static constexpr GemmStage kStage = kOwnStage;
    static constexpr uint32_t kNumWarps = GemmTile::kWarps;
    static constexpr uint32_t kMaxThreads = kNumWarps * static_cast<uint32_t>(kLanes);
    static constexpr bool kIsOneBlock = false;

    TK_HOST_DEVICE static uint64_t shared_bytes(const GemmArgs& args, uint32_t) {
        return SweepShared::bytes(Product::channels(args));
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const GemmArgs& args, typename Rec::Args trace) {
        Rec recorder(trace, warp, static_cast<uint32_t>(Product::kRole));
        const uint32_t num_output_tiles = Product::outputs(args) / GemmTile::kOutputs;
        const uint32_t num_tiles = args.tile_end[args.num_listed] * num_output_tiles;
        TK_NO_UNROLL
        for (uint32_t tile = warp.block; tile < num_tiles; tile += warp.num_blocks) {
            if (block_has_aborted(warp, args)) return;
            const TileWork work = find_tile(warp, args, tile, num_output_tiles);
            preload(warp, recorder, args, work);
            run_phases(warp, recorder, args, work);
        }
    }

private:
    template <class Rec>
    TK_DEVICE static void preload(Warp& warp, Rec& recorder, const GemmArgs& args, const TileWork& work) {
        TK_RANGE(recorder, GemmEvent::preload, work.expert, work.first_row, work.output_tile, work.num_rows);
        load_x<Product>(warp, args, work);
        TK_END_AFTER_BARRIER(warp);
    }

    template <class Rec>
    TK_DEVICE static void run_phases(Warp& warp, Rec& recorder, const GemmArgs& args, const TileWork& work) {
        TK_SEQUENCE(recorder);
        TK_NO_UNROLL
        for (uint32_t phase = 0; phase < GemmTile::kPhases; ++phase) {
            const uint32_t first_output = work.output_tile * GemmTile::kOutputs + phase * GemmTile::kPhaseOutputs +
                                          warp.warp * GemmTile::kWarpOutputs;
            PerLane<LaneSums> sums[Product::kPaths];
            TK_NEXT(GemmEvent::sweep, work.expert, work.token_tile, work.output_tile, phase);
            sweep_in_detail(warp, recorder, args, work, first_output, sums);
            TK_NEXT(GemmEvent::epilogue, work.expert, work.token_tile, work.output_tile, phase);
            store_outputs<Product>(warp, args, work, first_output, sums);
        }
    }

    // sweep(), with its steps on record where the call wants those of this tile.
    template <class Rec>
    TK_DEVICE static void sweep_in_detail(Warp& warp,
                                          Rec& recorder,
                                          const GemmArgs& args,
                                          const TileWork& work,
                                          uint32_t first_output,
                                          PerLane<LaneSums> (&sums)[Product::kPaths]) {
        with_steps<kDetail>(warp, recorder, args, work.tile, [&](auto& steps) {
            sweep<Product, kStaging>(warp, steps, args, work.expert, first_output, sums);
        });
    }
};

}  // namespace tracekern
