// Staging `ring`: a ring whose consumers multiply warp by warp, on any device with bulk copies.
#pragma once

#include "moe/gemm/narrow.h"
#include "moe/gemm/stages.h"

namespace tracekern {

// kMinBlocks: blocks that an SM is to have at once.
template <GemmLoad kLoad>
struct NarrowShape {
    static constexpr uint32_t kTokens = kLoad == GemmLoad::few ? kFewTokens : kManyTokens;
    static constexpr uint32_t kWarps = 8, kSlots = 2, kMinBlocks = kLoad == GemmLoad::few ? 2 : 1;
};

template <class Shape>
struct alignas(128) NarrowSlot {
    static constexpr uint32_t kBlocks = 4;
    // Rows of 16 bytes more than a multiple of 128: those of 8 tokens that are loaded together are in other banks.
    static constexpr uint32_t kRowBytes = kBlocks * WeightBlock::kChannels * sizeof(BFloat16) + 16;

    WeightBlock weights[kBlocks][kWarpTiles][Shape::kWarps];
    char x[Shape::kTokens][kRowBytes];
    TokenTile rows;
};

template <GemmStage kOwnStage, GemmDetail kOwnDetail>
struct GemmRing {
    using Product = GemmProduct<kOwnStage>;
    using Args = GemmArgs;
    using Untraced = GemmRing<kOwnStage, GemmDetail::parts>;
    static constexpr GemmStage kStage = kOwnStage;
    static constexpr GemmDetail kDetail = kOwnDetail;
    static constexpr GemmLoad kLoad = load_of(kStage);
    using Shape = NarrowShape<kLoad>;
    static constexpr uint32_t kSlots = Shape::kSlots;
    static constexpr uint32_t kConsumers = Shape::kWarps;
    static constexpr uint32_t kNumWarps = kConsumers + 1;
    static constexpr uint32_t kMaxThreads = kNumWarps * static_cast<uint32_t>(kLanes);
    static constexpr uint32_t kMinBlocks = Shape::kMinBlocks;
    static constexpr bool kIsOneBlock = false;
    using Slot = NarrowSlot<Shape>;
    static constexpr uint32_t kBlocks = Slot::kBlocks;
    using Shared = RingShared<Slot, kSlots>;
    using Weights = TileWeights<Product, kConsumers>;
    static constexpr Reuse kWeightReuse = kLoad == GemmLoad::few ? Reuse::once : Reuse::again;

    TK_HOST_DEVICE static uint64_t shared_bytes(const GemmArgs&, uint32_t) { return sizeof(Shared); }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const GemmArgs& args, typename Rec::Args trace) {
        if constexpr (kHasBulkCopies) {
            auto& shared = warp.shared<Shared>();
            shared.begin(warp, kConsumers);
            if (warp.warp < kConsumers) {
                Rec recorder(trace, warp, static_cast<uint32_t>(GemmRole::consumer));
                consume<GemmRing>(warp, recorder, args, shared);
            } else {
                Rec recorder(trace, warp, static_cast<uint32_t>(GemmRole::producer));
                produce<GemmRing>(warp, recorder, args, shared);
            }
        } else {
            warp.trap();
        }
    }

    // ---- x, for the producer ----

    TK_DEVICE static uint32_t row_bytes(uint32_t num_blocks) {
        return num_blocks * WeightBlock::kChannels * static_cast<uint32_t>(sizeof(BFloat16));
    }
    TK_DEVICE static uint32_t x_bytes(const TokenTile& rows, uint32_t num_blocks) {
        return rows.num_rows * row_bytes(num_blocks);
    }
    TK_DEVICE static void copy_x(const GemmArgs& args,
                                 Slot& slot,
                                 const TokenTile& rows,
                                 uint32_t first_block,
                                 uint32_t num_blocks,
                                 TransactionBarrier& full) {
        const uint64_t whole_row = Product::channels(args) * sizeof(BFloat16);
        const char* first = Product::in(args) + rows.first_row * whole_row + row_bytes(first_block);
        for (uint32_t row = 0; row < rows.num_rows; ++row) {
            copy_bulk<Reuse::again>(slot.x[row], first + row * whole_row, row_bytes(num_blocks), full);
        }
    }

    // ---- the stages of a tile, for consumers ----

    template <uint32_t kTokens, class Rec>
    TK_DEVICE static void multiply_tile(Warp& warp,
                                        Rec& steps,
                                        const GemmArgs& args,
                                        const NibbleSplitter& splitter,
                                        Shared& shared,
                                        RingPlace<kSlots>& at,
                                        TokenTile& rows,
                                        WarpSums<kTokens>& sums) {
        const uint32_t num_blocks = Product::channels(args) / WeightBlock::kChannels;
        TK_NO_UNROLL
        for (uint32_t first = 0; first < num_blocks; first += kBlocks) {
            consume_stage<GemmRing>(warp, steps, shared, at, [&](const Slot& slot, auto give_back) {
                if (first == 0) rows = slot.rows;
                const uint32_t left = num_blocks - first, count = left < kBlocks ? left : kBlocks;
                const DecodeSample<Rec> sample(steps, at.stage(), count * kDecodesPerBlock);
                TK_NO_UNROLL
                for (uint32_t block = first; block < num_blocks && block < first + kBlocks; ++block) {
                    multiply_block_of(warp, OneDecode<Rec>(sample, block == first), splitter, slot, block, sums);
                }
                give_back();
            });
        }
    }

private:
    template <uint32_t kTokens, class Steps>
    TK_DEVICE static void multiply_block_of(Warp& warp,
                                            const Steps& steps,
                                            const NibbleSplitter& splitter,
                                            const Slot& slot,
                                            uint32_t block,
                                            WarpSums<kTokens>& sums) {
        BlockLanes weights[kWarpTiles];
        load_blocks(warp, slot, block % kBlocks, weights);
        multiply_block(warp, steps, splitter, weights, sums, [&](int lane, uint32_t i, uint32_t half) {
            const uint32_t channel = block % kBlocks * WeightBlock::kChannels + half * kChannelsPerHalf;
            return slot.x[8 * i + lane % 8] + channel * sizeof(BFloat16) + lane / 8 * sizeof(Vector16);
        });
    }
};

}  // namespace tracekern
