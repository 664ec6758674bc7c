// K2 and K4 as a ring of stages in shared memory. One warp, the producer, copies weights and x of some channels ahead
// of the consumers, which multiply them. A stage is what is copied together, and a slot the place of every kSlots-th.
//
// Producer and consumers go through the same tiles in the same order, and count their stages alike. What passes between
// them is in shared memory and of this block alone:
//
//   full[slot]    phase n ends when stage n * kSlots + slot has arrived: the producer announces its bytes, the copies
//                 release them, and wait() acquires them for each lane of a consumer. So it does for the tile's rows,
//                 which the producer stores in the slot before
//   empty[slot]   phase n ends when all consumers are through with that stage. Each arrives once, behind a warp.sync()
//                 that orders the reads of its other lanes; the producer's wait() acquires them, so that no copy
//                 overtakes a read
//   given_up      the tile in which the producer gave up. Relaxed: it is stored in front of the arrivals that end the
//                 rest of that tile, and consumers look behind its last stage. One that is tiles behind may read
//                 either value; both say that its own tile is whole
//
// The producer waits for consumers alone and consumers for copies and the producer, never the other way round for the
// same stage, and no warp of another block is waited for: the waits end, without a limit, when memory answers. After an
// abort the producer starts no further copy. It ends the rest of its tile's stages without bytes, so that consumers,
// who look for nothing else on their way, wait for all copies that are under way, get through the tile, and store none
// of it: nobody writes to the memory of a block that is gone.
#pragma once

#include "comm/give_up.h"
#include "moe/gemm/tile_weights.h"

namespace tracekern {

// ---- tiles ----

struct BlockTile {
    uint32_t number;  // of all of the launch
    uint32_t list;
    uint32_t token_tile;  // of its list
    uint32_t output_tile;

    TK_DEVICE TokenTile rows(const GemmArgs& args) const {
        return args.tile_list[tile_list_begin(list, args.num_listed) + token_tile];
    }
};

// Calls f.operator()<kTokens>(tile) for the block's tiles of a load until it returns false, wide ones first. Tiles of
// the same tokens are neighbours, and so are those of one expert: blocks that run side by side read the same x, or the
// same weights.
template <GemmLoad kLoad, class F>
TK_DEVICE void for_each_tile(Warp& warp, const GemmArgs& args, uint32_t num_output_tiles, F f) {
    const uint32_t token_step = warp.num_blocks / num_output_tiles, output_step = warp.num_blocks % num_output_tiles;
    uint32_t next = warp.block, before = 0;
    const auto walk = [&]<uint32_t kList>() {
        const uint32_t end = before + args.tile_count[kList] * num_output_tiles;
        BlockTile tile{next, kList, (next - before) / num_output_tiles, (next - before) % num_output_tiles};
        TK_NO_UNROLL
        for (; holds_for_all(warp, tile.number < end); tile.number += warp.num_blocks) {
            if (!f.template operator()<kTileWidths[kList]>(tile)) return false;
            // Without a division each time.
            const bool carries = tile.output_tile + output_step >= num_output_tiles;
            tile.token_tile += token_step + carries;
            tile.output_tile += output_step - (carries ? num_output_tiles : 0);
        }
        next = tile.number;
        before = end;
        return true;
    };
    if constexpr (kLoad == GemmLoad::few) {
        if (walk.template operator()<1>()) walk.template operator()<0>();
    } else {
        if (walk.template operator()<3>()) walk.template operator()<2>();
    }
}

// ---- the ring ----

template <class Slot, uint32_t kSlots>
struct RingShared {
    Slot slots[kSlots];
    TransactionBarrier full[kSlots];
    TransactionBarrier empty[kSlots];
    BlockGaveUp given_up;

    // By all warps of the block.
    TK_DEVICE void begin(Warp& warp, uint32_t num_consumers) {
        if (warp.warp == 0) {
            warp.leader([&] {
                for (uint32_t slot = 0; slot < kSlots; ++slot) {
                    full[slot].init(1);
                    empty[slot].init(num_consumers);
                }
                given_up.begin();
            });
        }
        warp.block_sync();
    }
};

// How far a warp is.
template <uint32_t kSlots>
struct RingPlace {
    uint32_t slot = 0;
    uint32_t round = 0;  // the phase of the slot's barriers

    TK_DEVICE uint32_t stage() const { return round * kSlots + slot; }
    TK_DEVICE void advance() {
        if (++slot == kSlots) {
            slot = 0;
            ++round;
        }
    }
};

// Looks for an abort once a stage, for the word that was loaded a stage before: the producer does not wait for it. One
// lane loads. A word that all lanes had alike ptxas would move to a uniform register at once, which waits for it.
class AbortAhead {
public:
    TK_DEVICE AbortAhead(Warp& warp, const uint32_t* abort) : warp_(warp), abort_(abort) { look(); }
    TK_DEVICE bool seen() {
        const bool was_seen = warp_.ballot([&](int lane) { return word_[lane] != 0; }) != 0;
        look();
        return was_seen;
    }

private:
    TK_DEVICE void look() {
        word_ = warp_.lanes([&](int lane) { return abort_ && lane == 0 ? look_at_abort(abort_) : 0u; });
    }

    Warp& warp_;
    const uint32_t* abort_;
    PerLane<uint32_t> word_;
};

// Copies the weights of a tile, stage by stage.
template <class Kernel>
class WeightCopies {
public:
    using Weights = typename Kernel::Weights;

    TK_DEVICE WeightCopies(const GemmArgs& args, uint32_t expert, const BlockTile& tile)
        : from_{Weights::at(args, expert, 0, 0, Weights::first_of(tile.output_tile, 0)),
                Weights::at(args, expert, 0, 1, Weights::first_of(tile.output_tile, 1))},
          bytes_{Weights::bytes_of(args, tile.output_tile, 0), Weights::bytes_of(args, tile.output_tile, 1)},
          stride_(Weights::num_row_tiles(args)) {}

    // Of a block of channels.
    TK_DEVICE uint32_t bytes() const { return bytes_[0] + bytes_[1]; }
    // Starts the copies of the next num_blocks blocks of channels, by one lane.
    TK_DEVICE void start(typename Kernel::Slot& slot, uint32_t num_blocks, TransactionBarrier& full) const {
        TK_UNROLL
        for (uint32_t block = 0; block < Kernel::kBlocks; ++block) {
            if (block == num_blocks) break;
            TK_UNROLL
            for (uint32_t i = 0; i < kWarpTiles; ++i) {
                const WeightBlock* from = from_[i] + uint64_t{block} * stride_;
                if (bytes_[i]) copy_bulk<Kernel::kWeightReuse>(slot.weights[block][i], from, bytes_[i], full);
            }
        }
    }
    TK_DEVICE void advance() {
        TK_UNROLL
        for (auto& from : from_) from += Kernel::kBlocks * stride_;
    }

private:
    const WeightBlock* from_[kWarpTiles];
    uint32_t bytes_[kWarpTiles];
    uint32_t stride_;
};

// Kernel::copy_x() starts the copies of x for so many blocks of channels, by one lane; they are Kernel::x_bytes().
template <class Kernel, class Rec>
TK_DEVICE void produce(Warp& warp, Rec& recorder, const GemmArgs& args, typename Kernel::Shared& shared) {
    const uint32_t num_blocks = Kernel::Product::channels(args) / WeightBlock::kChannels;
    RingPlace<Kernel::kSlots> at;
    AbortAhead abort(warp, args.abort);
    bool gives_up = false;
    TK_RANGE(recorder, GemmEvent::produce_stages, Kernel::kSlots);
    const auto produce_tile = [&](auto& steps, const BlockTile& tile) {
        const TokenTile rows = tile.rows(args);
        WeightCopies<Kernel> weights(args, rows.expert, tile);
        TK_NO_UNROLL
        for (uint32_t first = 0; first < num_blocks; first += Kernel::kBlocks) {
            perturb(warp);
            {
                TK_WAIT(steps, GemmEvent::wait_slot, at.stage());
                if (at.round) shared.empty[at.slot].wait(warp, at.round - 1);
            }
            gives_up = gives_up || abort.seen();
            TK_RANGE(steps, GemmEvent::issue_copy, at.stage());
            warp.elect([&] {
                auto& slot = shared.slots[at.slot];
                auto& full = shared.full[at.slot];
                if (gives_up) {
                    shared.given_up.tell(tile.number);
                    full.arrive();
                } else {
                    const uint32_t left = num_blocks - first, count = left < Kernel::kBlocks ? left : Kernel::kBlocks;
                    slot.rows = rows;
                    full.arrive_and_expect(count * weights.bytes() + Kernel::x_bytes(rows, count));
                    weights.start(slot, count, full);
                    Kernel::copy_x(args, slot, rows, first, count, full);
                }
            });
            weights.advance();
            at.advance();
        }
    };
    const uint32_t num_output_tiles = Kernel::Weights::num_output_tiles(args);
    for_each_tile<Kernel::kLoad>(warp, args, num_output_tiles, [&]<uint32_t kTokens>(const BlockTile& tile) {
        with_steps<Kernel::kDetail>(warp, recorder, args, tile.number, [&](auto& steps) { produce_tile(steps, tile); });
        return !gives_up;
    });
    TK_END(at.stage());
}

// What the lanes of a warp have of a block of channels of a slot.
template <class Slot>
TK_DEVICE void load_blocks(Warp& warp, const Slot& slot, uint32_t block, BlockLanes (&lanes)[kWarpTiles]) {
    TK_UNROLL
    for (uint32_t i = 0; i < kWarpTiles; ++i) {
        lanes[i] = warp.lanes([&](int lane) { return slot.weights[block][i][warp.warp].lanes[lane % 32]; });
    }
}

// Calls multiply(slot, give_back) when the next stage has arrived. give_back() says that this warp has read the slot.
template <class Kernel, class Rec, class Multiply>
TK_DEVICE void consume_stage(
    Warp& warp, Rec& steps, typename Kernel::Shared& shared, RingPlace<Kernel::kSlots>& at, Multiply multiply) {
    perturb(warp);
    TK_SEQUENCE(steps);
    {
        TK_WAIT(tk_sequence, GemmEvent::wait_stage, at.stage());
        shared.full[at.slot].wait(warp, at.round);
    }
    TK_NEXT(GemmEvent::multiply_stage, at.stage());
    multiply(shared.slots[at.slot], [&] { warp.leader([&] { shared.empty[at.slot].arrive(); }); });
    at.advance();
}

// Whether stages of a tile, all of which have come, had no bytes.
template <class Shared>
TK_DEVICE bool has_given_up(Warp& warp, const Shared& shared, const BlockTile& tile) {
    return holds_for_all(warp, shared.given_up.is_told(tile.number));
}

// Kernel::multiply_tile(warp, steps, args, splitter, shared, at, rows, sums) goes through all stages of a tile, whose
// rows it reads from the first. Returns whether they had bytes.
template <class Kernel, uint32_t kTokens, class Rec>
TK_DEVICE bool consume_tile(Warp& warp,
                            Rec& recorder,
                            const GemmArgs& args,
                            const NibbleSplitter& splitter,
                            typename Kernel::Shared& shared,
                            RingPlace<Kernel::kSlots>& at,
                            const BlockTile& tile) {
    TokenTile rows{};
    WarpSums<kTokens> sums;
    sums.clear(warp);
    {
        TK_RANGE(recorder, GemmEvent::multiply_tile, kTokens, tile.token_tile, tile.output_tile);
        with_steps<Kernel::kDetail>(warp, recorder, args, tile.number, [&](auto& steps) {
            Kernel::multiply_tile(warp, steps, args, splitter, shared, at, rows, sums);
        });
        TK_END(rows.expert);
    }
    if (has_given_up(warp, shared, tile)) return false;
    TK_RANGE(recorder, GemmEvent::epilogue, rows.expert, tile.token_tile, tile.output_tile, 0u);
    const uint32_t outputs[] = {Kernel::Weights::first_of(tile.output_tile, 0) + warp.warp,
                                Kernel::Weights::first_of(tile.output_tile, 1) + warp.warp};
    store_results<typename Kernel::Product>(warp, args, rows, outputs, sums);
    return true;
}

template <class Kernel, class Rec>
TK_DEVICE void consume(Warp& warp, Rec& recorder, const GemmArgs& args, typename Kernel::Shared& shared) {
    const NibbleSplitter splitter;
    RingPlace<Kernel::kSlots> at;
    const uint32_t num_output_tiles = Kernel::Weights::num_output_tiles(args);
    for_each_tile<Kernel::kLoad>(warp, args, num_output_tiles, [&]<uint32_t kTokens>(const BlockTile& tile) {
        return consume_tile<Kernel, kTokens>(warp, recorder, args, splitter, shared, at, tile);
    });
}

}  // namespace tracekern
