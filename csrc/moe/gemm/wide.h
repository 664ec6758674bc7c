// Staging `wide`: a ring whose consumers multiply as warpgroups. Four warps decode 64 rows of weights into registers,
// and x of all tokens stays in shared memory, where one product reads it for all four.
#pragma once

#include "moe/gemm/stages.h"
#include "platform/warpgroup.h"

namespace tracekern {

// kRegisters: of a consumer's lane. What the producer's warpgroup gives up makes it possible.
template <GemmLoad kLoad>
struct WideShape;
template <>
struct WideShape<GemmLoad::few> {
    static constexpr uint32_t kTokens = kFewTokens;
    static constexpr uint32_t kWarpgroups = 4, kSlots = 5, kRegisters = 104, kProducerRegisters = 56;
};
template <>
struct WideShape<GemmLoad::many> {
    static constexpr uint32_t kTokens = kManyTokens;
    static constexpr uint32_t kWarpgroups = 2, kSlots = 4, kRegisters = 240, kProducerRegisters = 24;
};

template <class Shape>
struct alignas(1024) WideSlot {
    static constexpr uint32_t kBlocks = kBoxChannels / WeightBlock::kChannels;

    char x[Shape::kTokens / kBoxRows][kBoxBytes];
    WeightBlock weights[kBlocks][kWarpTiles][Shape::kWarpgroups * kWarpsPerGroup];
    TokenTile rows;
};

// Products with all blocks of a stage, from half to half and in each through the warp's tiles, kGroup of them at a
// time. kDepth groups are under way; one is scaled and added while the next are made.
template <uint32_t kTokens, uint32_t kGroup, uint32_t kDepth, uint32_t kNumBlocks, class Rec, class Slot>
class WideStage {
public:
    TK_DEVICE WideStage(Warp& warp,
                        Rec& steps,
                        uint32_t stage,
                        const NibbleSplitter& splitter,
                        const Slot& slot,
                        WarpSums<kTokens>& sums)
        : warp_(warp),
          sample_(steps, stage, kNumBlocks * kDecodesPerBlock),
          splitter_(splitter),
          slot_(slot),
          columns_(slot.x),
          sums_(sums) {}

    template <class GiveBack>
    TK_DEVICE void multiply(GiveBack give_back) {
        load_blocks(warp_, slot_, 0, blocks_[0]);
        TK_UNROLL
        for (uint32_t group = 0; group < kGroups + kDepth - 1; ++group) {
            if (group < kGroups) start_group(group);
            if (group + 1 < kDepth) continue;
            const uint32_t done = group + 1 - kDepth, first = done * kGroup;
            if (group < kGroups) {
                finish_products<kDepth - 1>(warp_, products_[done % kDepth]);
            } else {
                finish_products<0>(warp_, products_[done % kDepth]);
            }
            if (group == kGroups) give_back();
            TK_UNROLL
            for (uint32_t i = 0; i < kGroup; ++i) add(first + i, products_[done % kDepth][i]);
        }
    }

private:
    static constexpr uint32_t kPerBlock = kHalvesPerBlock * kWarpTiles, kGroups = kNumBlocks * kPerBlock / kGroup;
    static_assert(kWarpTiles % kGroup == 0, "the products of a group are of one half");
    using Product = PerLane<WideProduct<kTokens>>;

    TK_DEVICE void start_group(uint32_t group) {
        const uint32_t first = group * kGroup, block = first / kPerBlock;
        if (first % kPerBlock == kPerBlock / 2 && block + 1 < kNumBlocks) {
            load_blocks(warp_, slot_, block + 1, blocks_[block + 1]);
        }
        const uint32_t half = first / kWarpTiles % kHalvesPerBlock;
        PerLane<uint32_t> metadata[kGroup];
        TK_UNROLL
        for (uint32_t i = 0; i < kGroup; ++i) {
            const uint32_t tile = (first + i) % kWarpTiles;
            decode(first + i);
            metadata[i] = metadata_of(warp_, blocks_[block][tile], half % 2);
            settle(rows_[tile].halves[half % 2], metadata[i]);
        }
        begin_products(warp_);
        TK_UNROLL
        for (uint32_t i = 0; i < kGroup; ++i) start(first + i, metadata[i], products_[group % kDepth][i]);
        end_products(warp_);
    }

    // What product n needs, if the one of the even half has not decoded it.
    TK_DEVICE void decode(uint32_t n) {
        const uint32_t block = n / kPerBlock, tile = n % kWarpTiles, word = n / (2 * kWarpTiles) % 2;
        if (n / kWarpTiles % 2) return;
        sample_.record_if(warp_, n == DecodeSample<Rec>::kTile, rows_[tile], [&] {
            scales_[n / (2 * kWarpTiles)][tile] = scales_of(warp_, blocks_[block][tile], word);
            rows_[tile] = decode_word(warp_, splitter_, blocks_[block][tile], word);
        });
    }
    TK_DEVICE void start(uint32_t n, const PerLane<uint32_t>& metadata, Product& product) {
        const uint32_t block = n / kPerBlock, tile = n % kWarpTiles, half = n / kWarpTiles % kHalvesPerBlock;
        const uint32_t word = half / 2, odd = half % 2;
        const DenseColumns x = columns_.part(block * (kBoxParts / Slot::kBlocks) + word);
        if (word == 0) {
            start_product<0>(warp_, product, rows_[tile].halves[odd], x, odd, metadata);
        } else {
            start_product<1>(warp_, product, rows_[tile].halves[odd], x, odd, metadata);
        }
    }
    TK_DEVICE void add(uint32_t n, const Product& product) {
        const uint32_t tile = n % kWarpTiles, half = n / kWarpTiles;
        const auto& scale = scales_[half / 2][tile].halves[half % 2];
        TK_UNROLL
        for (uint32_t i = 0; i < kTokens / 8; ++i) {
            warp_.each_lane(
                [&](int lane) { sums_.tiles[tile][i][lane].add_scaled(product[lane].tiles[i], scale[lane]); });
        }
    }

    Warp& warp_;
    const DecodeSample<Rec> sample_;
    const NibbleSplitter& splitter_;
    const Slot& slot_;
    const DenseColumns columns_;
    WarpSums<kTokens>& sums_;
    BlockLanes blocks_[kNumBlocks][kWarpTiles];
    HalfScales scales_[kNumBlocks * kHalvesPerBlock / 2][kWarpTiles];
    HalfRows rows_[kWarpTiles];
    Product products_[kDepth][kGroup];
};

// Where products are short more of them are started together: the four warps meet for each group.
template <uint32_t kTokens>
constexpr uint32_t kGroupOf = kTokens <= 8 ? 2 : 1;

template <GemmStage kOwnStage, GemmDetail kOwnDetail>
struct GemmWide {
    using Product = GemmProduct<kOwnStage>;
    using Args = GemmArgs;
    using Untraced = GemmWide<kOwnStage, GemmDetail::parts>;
    static constexpr GemmStage kStage = kOwnStage;
    static constexpr GemmDetail kDetail = kOwnDetail;
    static constexpr GemmLoad kLoad = load_of(kStage);
    using Shape = WideShape<kLoad>;
    static constexpr uint32_t kSlots = Shape::kSlots;
    static constexpr uint32_t kConsumers = Shape::kWarpgroups * kWarpsPerGroup;
    static constexpr uint32_t kNumWarps = kConsumers + kWarpsPerGroup;
    static constexpr uint32_t kMaxThreads = kNumWarps * static_cast<uint32_t>(kLanes);
    static constexpr bool kIsOneBlock = false;
    static constexpr bool kCopiesBoxes = true;
    using Slot = WideSlot<Shape>;
    static constexpr uint32_t kBlocks = Slot::kBlocks;
    using Shared = RingShared<Slot, kSlots>;
    using Weights = TileWeights<Product, kConsumers>;
    // Of many tokens other blocks read the same weights for the expert's next tile.
    static constexpr Reuse kWeightReuse = kLoad == GemmLoad::few ? Reuse::once : Reuse::again;

    TK_HOST_DEVICE static uint64_t shared_bytes(const GemmArgs&, uint32_t) { return sizeof(Shared); }

    // The 24 registers that the producer of `many` has leave no room for a recorder: it is on record where its steps
    // are wanted, which no call is timed by.
    static constexpr bool kRecordsProducer = kLoad == GemmLoad::few || kDetail == GemmDetail::steps;
    static constexpr uint32_t kRecordedWarps = kRecordsProducer ? kNumWarps : kConsumers;
    template <class Rec>
    using ProducerRec = std::conditional_t<kRecordsProducer, Rec, Recorder<false>>;

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const GemmArgs& args, typename Rec::Args trace) {
        if constexpr (kHasWarpgroups) {
            auto& shared = warp.shared<Shared>();
            shared.begin(warp, kConsumers);
            if (warp.warp < kConsumers) {
                take_registers<Shape::kRegisters>();
                Rec recorder(trace, warp, static_cast<uint32_t>(GemmRole::consumer));
                consume<GemmWide>(warp, recorder, args, shared);
            } else {
                // Three of its four warps are there for their registers alone.
                keep_registers<Shape::kProducerRegisters>();
                ProducerRec<Rec> recorder(trace, warp, static_cast<uint32_t>(GemmRole::producer));
                if (warp.warp == kConsumers) produce<GemmWide>(warp, recorder, args, shared);
            }
        } else {
            warp.trap();
        }
    }

    // ---- x, for the producer ----

    TK_DEVICE static uint32_t num_boxes(const TokenTile& rows) { return (rows.num_rows + kBoxRows - 1) / kBoxRows; }
    TK_DEVICE static uint32_t x_bytes(const TokenTile& rows, uint32_t) { return num_boxes(rows) * kBoxBytes; }
    TK_DEVICE static void copy_x(
        const GemmArgs& args, Slot& slot, const TokenTile& rows, uint32_t block, uint32_t, TransactionBarrier& full) {
        TK_NO_UNROLL
        for (uint32_t box = 0; box < num_boxes(rows); ++box) {
            const uint32_t row = rows.first_row + box * kBoxRows;
            copy_box(slot.x[box], args.x_map, block * WeightBlock::kChannels, row, full);
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
        const auto multiply = [&]<uint32_t kNumBlocks>(uint32_t first) {
            consume_stage<GemmWide>(warp, steps, shared, at, [&](const Slot& slot, auto give_back) {
                if (first == 0) rows = slot.rows;
                WideStage<kTokens, kGroupOf<kTokens>, 2, kNumBlocks, Rec, Slot> stage(
                    warp, steps, at.stage(), splitter, slot, sums);
                stage.multiply(give_back);
            });
        };
        const uint32_t num_blocks = Product::channels(args) / WeightBlock::kChannels;
        uint32_t block = 0;
        TK_NO_UNROLL
        for (; block + kBlocks <= num_blocks; block += kBlocks) multiply.template operator()<kBlocks>(block);
        if (block < num_blocks) multiply.template operator()<1>(block);
    }
};

}  // namespace tracekern
