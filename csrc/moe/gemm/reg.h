// Staging `reg`: no ring. A lane loads its 16 bytes of some blocks of channels ahead into registers, each byte once,
// and x of 8 tokens is in shared memory. No instruction of sm_90 alone.
#pragma once

#include "comm/give_up.h"
#include "moe/gemm/narrow.h"
#include "moe/gemm/tile_weights.h"
#include "moe/gemm/token_tiles.h"

namespace tracekern {

// Shared memory of a block; x [8][channels] follows it, of which part p of row r, 16 bytes, is at p ^ r.
struct alignas(16) RegShared {
    uint32_t has_aborted[2];  // of tiles in turns: a warp may still read the one when another writes the next

    TK_HOST_DEVICE static constexpr uint64_t bytes(uint32_t channels) {
        return sizeof(RegShared) + uint64_t{channels} * GemmTile::kTokens * sizeof(BFloat16);
    }
    TK_DEVICE Vector16* x_row(uint32_t row, uint32_t channels) {
        return reinterpret_cast<Vector16*>(this + 1) + uint64_t{row} * (channels / 8);
    }
};

template <GemmStage kOwnStage, GemmDetail kOwnDetail>
struct GemmReg {
    using Product = GemmProduct<kOwnStage>;
    using Args = GemmArgs;
    using Untraced = GemmReg<kOwnStage, GemmDetail::parts>;
    static constexpr GemmStage kStage = kOwnStage;
    static constexpr GemmDetail kDetail = kOwnDetail;
    static constexpr uint32_t kNumWarps = 8;
    static constexpr uint32_t kMaxThreads = kNumWarps * static_cast<uint32_t>(kLanes);
    static constexpr uint32_t kMinBlocks = 2;
    static constexpr bool kIsOneBlock = false;
    // Blocks of channels under way to a lane.
    static constexpr uint32_t kAhead = 3;
    using Weights = TileWeights<Product, kNumWarps>;

    TK_HOST_DEVICE static uint64_t shared_bytes(const GemmArgs& args, uint32_t) {
        return RegShared::bytes(Product::channels(args));
    }

    // Blocks share the tiles in pieces: neighbours have the same tokens, whose x is loaded once.
    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const GemmArgs& args, typename Rec::Args trace) {
        Rec recorder(trace, warp, static_cast<uint32_t>(Product::kRole));
        const NibbleSplitter splitter;
        const uint32_t num_output_tiles = Weights::num_output_tiles(args);
        const uint64_t num_tiles = uint64_t{args.tile_end[args.num_listed]} * num_output_tiles;
        const auto first = static_cast<uint32_t>(warp.block * num_tiles / warp.num_blocks);
        const auto end = static_cast<uint32_t>((warp.block + 1) * num_tiles / warp.num_blocks);
        uint32_t row_of_x = ~0u;
        TK_NO_UNROLL
        for (uint32_t tile = first; tile < end; ++tile) {
            if (block_has_aborted(warp, args, tile % 2)) return;
            const TileWork work = find_tile(warp, args, tile, num_output_tiles);
            if (work.first_row != row_of_x) preload(warp, recorder, args, work);
            row_of_x = work.first_row;
            compute(warp, recorder, args, splitter, work);
        }
    }

private:
    // The same in all warps of the block, which meet here: behind it x may be the next tile's.
    TK_DEVICE static bool block_has_aborted(Warp& warp, const GemmArgs& args, uint32_t turn) {
        perturb(warp);
        auto& shared = warp.shared<RegShared>();
        if (warp.warp == 0) {
            warp.leader([&] { shared.has_aborted[turn] = args.abort ? look_at_abort(args.abort) : 0; });
        }
        warp.block_sync();
        return shared.has_aborted[turn] != 0;
    }

    template <class Rec>
    TK_DEVICE static void preload(Warp& warp, Rec& recorder, const GemmArgs& args, const TileWork& work) {
        perturb(warp);
        TK_RANGE(recorder, GemmEvent::preload, work.expert, work.first_row, work.output_tile, work.num_rows);
        auto& shared = warp.shared<RegShared>();
        const uint32_t channels = Product::channels(args), num_parts = channels / 8;
        const auto* rows = reinterpret_cast<const Vector16*>(Product::in(args)) + uint64_t{work.first_row} * num_parts;
        warp.block_strided(work.num_rows * num_parts, [&](uint32_t i) {
            const uint32_t row = i / num_parts, part = i % num_parts;
            shared.x_row(row, channels)[part ^ row] = rows[i];
        });
        TK_END_AFTER_BARRIER(warp);
    }

    template <class Rec>
    TK_DEVICE static void compute(
        Warp& warp, Rec& recorder, const GemmArgs& args, const NibbleSplitter& splitter, const TileWork& work) {
        const uint32_t tiles[] = {Weights::first_of(work.output_tile, 0) + warp.warp,
                                  Weights::first_of(work.output_tile, 1) + warp.warp};
        WarpSums<GemmTile::kTokens> sums;
        sums.clear(warp);
        TK_SEQUENCE(recorder);
        TK_NEXT(GemmEvent::sweep, work.expert, work.token_tile, work.output_tile, 0u);
        with_steps<kDetail>(warp, recorder, args, work.tile, [&](auto& steps) {
            multiply_all(warp, steps, args, splitter, work.expert, tiles, sums);
        });
        TK_NEXT(GemmEvent::epilogue, work.expert, work.token_tile, work.output_tile, 0u);
        store_results<Product>(warp, args, {work.expert, work.first_row, work.num_rows, 0}, tiles, sums);
    }

    // The row tiles of a warp, block of channels by block. One without outputs reads those of the first.
    class WarpWeights {
    public:
        TK_DEVICE WarpWeights(const GemmArgs& args, uint32_t expert, const uint32_t (&tiles)[kWarpTiles])
            : stride_(Weights::num_row_tiles(args)) {
            TK_UNROLL
            for (uint32_t i = 0; i < kWarpTiles; ++i) {
                const bool is_there = tiles[i] * WeightBlock::kRows < Product::outputs(args);
                next_[i] = Weights::at(args, expert, 0, i, is_there ? tiles[i] : 0);
            }
        }
        template <class Rec>
        TK_DEVICE void load_next(Warp& warp, Rec& steps, uint32_t block, BlockLanes (&lanes)[kWarpTiles]) {
            TK_RANGE(steps, GemmEvent::stage, 2 * block);
            TK_UNROLL
            for (uint32_t i = 0; i < kWarpTiles; ++i) {
                lanes[i] = warp.lanes([&](int lane) { return load_once(&next_[i]->lanes[lane % 32]); });
                next_[i] += stride_;
            }
        }

    private:
        const WeightBlock* next_[kWarpTiles];
        const uint32_t stride_;
    };

    template <class Rec>
    TK_DEVICE static void multiply_all(Warp& warp,
                                       Rec& steps,
                                       const GemmArgs& args,
                                       const NibbleSplitter& splitter,
                                       uint32_t expert,
                                       const uint32_t (&tiles)[kWarpTiles],
                                       WarpSums<GemmTile::kTokens>& sums) {
        const uint32_t channels = Product::channels(args), num_blocks = channels / WeightBlock::kChannels;
        WarpWeights weights(args, expert, tiles);
        BlockLanes ahead[kAhead][kWarpTiles];
        TK_UNROLL
        for (uint32_t i = 0; i < kAhead; ++i) {
            if (i < num_blocks) weights.load_next(warp, steps, i, ahead[i]);
        }
        // Where a lane finds its 16 bytes of x in half 0 of a word, and in half 1, of block 0.
        const auto x_place = [&](uint32_t odd) {
            return warp.lanes([&](int lane) {
                const uint32_t row = lane % 8;
                return warp.shared<RegShared>().x_row(row, channels) + ((odd * 4 + lane / 8) ^ row);
            });
        };
        const PerLane<Vector16*> x[] = {x_place(0), x_place(1)};
        TK_NO_UNROLL
        for (uint32_t first = 0; first < num_blocks; first += kAhead) {
            TK_UNROLL
            for (uint32_t i = 0; i < kAhead; ++i) {
                const uint32_t block = first + i;
                if (block >= num_blocks) break;
                const EachStep<Rec> each(steps, block);
                multiply_block(warp, each, splitter, ahead[i], sums, [&](int lane, uint32_t, uint32_t half) {
                    return x[half % 2][lane] + (block * kHalvesPerBlock + half) / 2 * 8;
                });
                if (block + kAhead < num_blocks) weights.load_next(warp, steps, block + kAhead, ahead[i]);
            }
        }
    }
};

}  // namespace tracekern
