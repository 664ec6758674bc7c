// Staging `direct`: each lane loads the words of its own two rows, some groups ahead, and decodes them when they are
// due. No lane needs another's.
#pragma once

#include "moe/gemm/contract/decode.h"

namespace tracekern {

// The words of a group of channels: rows g and g + 8 of each path.
template <uint32_t kPaths>
struct DirectGroup {
    struct Words {
        PackedPair top;
        PackedPair bottom;
    };
    PerLane<Words> words[kPaths];
    PerLane<uint32_t> e[kPaths];

    template <class Rec>
    TK_DEVICE void load(Warp& warp, Rec& steps, const WeightRows<kPaths>& weights, uint32_t group) {
        TK_RANGE(steps, GemmEvent::stage, group);
        TK_UNROLL
        for (uint32_t path = 0; path < kPaths; ++path) {
            words[path] = warp.lanes([&](int lane) {
                const PackedPair* top = weights.at(group, path, lane_group(lane));
                return Words{load_once(top), load_once(top + 8)};
            });
        }
    }

    // Lanes 0 and 1 of a group of lanes make the metadata of half 0, lanes 2 and 3 that of half 1: a multiplication
    // looks at those alone that its selector names, so that one register serves both. On record as half 0.
    template <class Rec>
    TK_DEVICE void make_metadata(Warp& warp, Rec& steps, uint32_t group) {
        TK_RANGE(steps, GemmEvent::park, group, 0u);
        TK_UNROLL
        for (uint32_t path = 0; path < kPaths; ++path) {
            e[path] = warp.lanes([&](int lane) {
                const Words& own = words[path][lane];
                const uint32_t t = lane_in_group(lane);
                const uint32_t places_0 = places_of(own.top.halves[0], own.bottom.halves[0]);
                const uint32_t places_1 = places_of(own.top.halves[1], own.bottom.halves[1]);
                return decode_metadata(t < 2 ? places_0 : places_1, t % 2);
            });
        }
        TK_END_AFTER(uint64_t{e[0][0]} << 32 | e[kPaths - 1][0]);
    }

    template <uint32_t kHalf>
    TK_DEVICE PerLane<SparseRows> rows(Warp& warp, uint32_t path) const {
        return warp.lanes([&](int lane) {
            const Words& own = words[path][lane];
            return decode_rows(own.top.halves[kHalf], own.bottom.halves[kHalf], lane_in_group(lane));
        });
    }
    template <uint32_t kHalf>
    TK_DEVICE const PerLane<uint32_t>& metadata(uint32_t path) const {
        return e[path];
    }
    template <uint32_t kHalf>
    TK_DEVICE PerLane<RowScales> scales(Warp& warp, uint32_t path) const {
        return warp.lanes([&](int lane) {
            const Words& own = words[path][lane];
            return RowScales{scale_of(own.top.halves[kHalf]), scale_of(own.bottom.halves[kHalf])};
        });
    }
};

// The products with kAhead groups from `first` on, while those behind them are loaded; or with those that are left. A
// round before that has no branch, so that a group is decoded while another is multiplied: where no group is left it
// loads the last one again, but not where steps are on record.
template <bool kIsLast, uint32_t kPaths, uint32_t kAhead, class Rec>
TK_DEVICE void multiply_round(Warp& warp,
                              Rec& steps,
                              const WeightRows<kPaths>& weights,
                              const ChannelRow* x,
                              uint32_t first,
                              DirectGroup<kPaths> (&ahead)[kAhead],
                              PerLane<LaneSums> (&sums)[kPaths]) {
    TK_UNROLL
    for (uint32_t i = 0; i < kAhead; ++i) {
        const uint32_t group = first + i, next = group + kAhead;
        if (kIsLast && group >= weights.num_groups) break;
        ahead[i].make_metadata(warp, steps, group);
        multiply_half<0>(warp, steps, x + group * kChannelsPerGroup, ahead[i], group, sums);
        multiply_half<1>(warp, steps, x + group * kChannelsPerGroup, ahead[i], group, sums);
        if (kIsLast || (Rec::kTraced && next >= weights.num_groups)) continue;
        ahead[i].load(warp, steps, weights, next < weights.num_groups ? next : weights.num_groups - 1);
    }
}

template <>
struct SweepWith<GemmStaging::direct> {
    // sums[path] = the products with all groups of x.
    template <uint32_t kPaths, class Rec>
    TK_DEVICE static void run(Warp& warp,
                              Rec& steps,
                              const WeightRows<kPaths>& weights,
                              const ChannelRow* x,
                              PerLane<LaneSums> (&sums)[kPaths]) {
        // Groups under way to a lane: more hide more of memory's latency and take more registers, and K4 lives from
        // many blocks on an SM. Without the instruction the product takes the registers.
        constexpr uint32_t kAhead = kLanes == 32 ? kPaths + 1 : 1;
        DirectGroup<kPaths> ahead[kAhead];
        TK_UNROLL
        for (uint32_t i = 0; i < kAhead; ++i) {
            if (i < weights.num_groups) ahead[i].load(warp, steps, weights, i);
        }
        const uint32_t num_whole = weights.num_groups / kAhead * kAhead;
        TK_NO_UNROLL
        for (uint32_t first = 0; first < num_whole; first += kAhead) {
            multiply_round<false>(warp, steps, weights, x, first, ahead, sums);
        }
        multiply_round<true>(warp, steps, weights, x, num_whole, ahead, sums);
    }
};

}  // namespace tracekern
