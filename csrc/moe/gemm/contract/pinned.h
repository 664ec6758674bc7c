// Staging `pinned`, as the contract has it: two lanes of each group of 4 load for all, every lane decodes its two
// chunks, and park() gathers the metadata into the lanes that a selector names. One group of channels is under way.
#pragma once

#include "moe/gemm/contract/decode.h"

namespace tracekern {

// What a lane holds of a staged group of channels: its chunks t and t + 4 of rows g (top) and g + 8 (bottom), for both
// halves.
struct StageOut {
    // int8 x 4: the two numbers of chunk t, then those of chunk t + 4.
    uint32_t top_h0, bot_h0, top_h1, bot_h1;
    // bf16 x 4: top and bottom of half 0, then of half 1.
    uint64_t sc_pack;
    // top | bottom << 4: which pair chunks t (lo) and t + 4 (hi) keep.
    uint16_t nib_h0_lo, nib_h0_hi, nib_h1_lo, nib_h1_hi;

    // Something that is there when all of it is.
    TK_DEVICE uint64_t all() const {
        const uint32_t nibbles = uint32_t{nib_h0_lo} | nib_h0_hi | nib_h1_lo | nib_h1_hi;
        return sc_pack | top_h0 | bot_h0 | top_h1 | bot_h1 | nibbles;
    }
};

// Chunks t and t + 4 of a row as int8 x 4.
TK_DEVICE uint32_t pack_chunks(uint64_t word, uint32_t t) {
    uint32_t packed = 0;
    TK_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t chunk = t + 4 * i;
        const int number = static_cast<int>(word >> 4 * chunk & 15) - 8;
        const auto slot = static_cast<uint32_t>(word >> (32 + 2 * chunk) & 1);
        packed |= (static_cast<uint32_t>(number) & 0xffu) << (16 * i + 8 * slot);
    }
    return packed;
}
TK_DEVICE uint16_t pack_nibbles(uint64_t top, uint64_t bottom, uint32_t chunk) {
    const auto nibble = [&](uint64_t word) { return word >> (33 + 2 * chunk) & 1 ? kSecondPair : kFirstPair; };
    return static_cast<uint16_t>(nibble(top) | nibble(bottom) << 4);
}

// Lanes 2 and 3 of a group of lanes load the group's top and bottom row and hand them to the others. In the contract
// they are free while half 0 is multiplied; the instructions take all lanes, so that none is.
template <uint32_t kPaths>
TK_DEVICE PerLane<StageOut> stage(Warp& warp, const WeightRows<kPaths>& weights, uint32_t group, uint32_t path) {
    constexpr int kSrcT = 2;
    const auto loaded = warp.lanes([&](int lane) {
        const uint32_t t = lane_in_group(lane);
        if (t < kSrcT) return PackedPair{};
        return load_once(weights.at(group, path, lane_group(lane) + (t == kSrcT ? 0 : 8)));
    });
    const auto x = warp.lanes([&](int lane) { return loaded[lane].halves[0]; });
    const auto y = warp.lanes([&](int lane) { return loaded[lane].halves[1]; });
    const auto src_top = [](int lane) { return static_cast<int>(lane_group(lane) << 2) + kSrcT; };
    const auto src_bot = [](int lane) { return static_cast<int>(lane_group(lane) << 2) + kSrcT + 1; };
    const auto top_x = warp.gather(x, src_top), bot_x = warp.gather(x, src_bot);
    const auto top_y = warp.gather(y, src_top), bot_y = warp.gather(y, src_bot);
    return warp.lanes([&](int lane) {
        const uint32_t t = lane_in_group(lane);
        const uint64_t top0 = top_x[lane], bot0 = bot_x[lane], top1 = top_y[lane], bot1 = bot_y[lane];
        StageOut out;
        out.top_h0 = pack_chunks(top0, t);
        out.bot_h0 = pack_chunks(bot0, t);
        out.top_h1 = pack_chunks(top1, t);
        out.bot_h1 = pack_chunks(bot1, t);
        out.sc_pack = top0 >> 48 | bot0 >> 48 << 16 | top1 >> 48 << 32 | bot1 >> 48 << 48;
        out.nib_h0_lo = pack_nibbles(top0, bot0, t);
        out.nib_h0_hi = pack_nibbles(top0, bot0, t + 4);
        out.nib_h1_lo = pack_nibbles(top1, bot1, t);
        out.nib_h1_hi = pack_nibbles(top1, bot1, t + 4);
        return out;
    });
}

// The metadata of a half in the lanes that its selector names, chunks 0-3 in the first and 4-7 in the second; 0 in the
// others.
template <uint32_t kHalf>
TK_DEVICE PerLane<uint32_t> park(Warp& warp, const PerLane<StageOut>& out) {
    const auto nibbles = warp.lanes([&](int lane) {
        const StageOut& own = out[lane];
        return kHalf == 0 ? own.nib_h0_lo | uint32_t{own.nib_h0_hi} << 16
                          : own.nib_h1_lo | uint32_t{own.nib_h1_hi} << 16;
    });
    auto e = warp.lanes([](int) { return uint32_t{0}; });
    TK_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
        const auto src = [&](int lane) { return static_cast<int>(lane_group(lane) << 2 | i); };
        const auto token = warp.gather(nibbles, src);
        e = warp.lanes([&](int lane) {
            const uint32_t own = token[lane] >> lane_in_group(lane) % 2 * 16;
            return e[lane] | (own & 0xfu) << 4 * i | (own >> 4 & 0xfu) << (16 + 4 * i);
        });
    }
    return warp.lanes([&](int lane) { return lane_in_group(lane) / 2 == kHalf ? e[lane] : 0; });
}

// Two int8 as bf16, from bit `shift` on.
TK_DEVICE uint32_t unpack_chunk(uint32_t packed, uint32_t shift) {
    const float first = static_cast<int8_t>(packed >> shift);
    const float second = static_cast<int8_t>(packed >> (shift + 8));
    return bits_as<uint32_t>(first) >> 16 | (bits_as<uint32_t>(second) & 0xffff0000u);
}

template <uint32_t kPaths>
struct Slot {
    PerLane<StageOut> out[kPaths];
    PerLane<uint32_t> e[kPaths][2];  // [path][half]

    template <class Rec>
    TK_DEVICE void stage_group(Warp& warp, Rec& steps, const WeightRows<kPaths>& weights, uint32_t group) {
        TK_RANGE(steps, GemmEvent::stage, group);
        TK_UNROLL
        for (uint32_t path = 0; path < kPaths; ++path) out[path] = stage(warp, weights, group, path);
        TK_END_AFTER(out[0][0].all() | out[kPaths - 1][0].all());
    }
    template <uint32_t kHalf, class Rec>
    TK_DEVICE void park_half(Warp& warp, Rec& steps, uint32_t group) {
        TK_RANGE(steps, GemmEvent::park, group, kHalf);
        TK_UNROLL
        for (uint32_t path = 0; path < kPaths; ++path) e[path][kHalf] = park<kHalf>(warp, out[path]);
        TK_END_AFTER(uint64_t{e[0][kHalf][0]} << 32 | e[kPaths - 1][kHalf][0]);
    }

    template <uint32_t kHalf>
    TK_DEVICE PerLane<SparseRows> rows(Warp& warp, uint32_t path) const {
        return warp.lanes([&](int lane) {
            const StageOut& own = out[path][lane];
            const uint32_t top = kHalf == 0 ? own.top_h0 : own.top_h1;
            const uint32_t bottom = kHalf == 0 ? own.bot_h0 : own.bot_h1;
            return SparseRows{
                {unpack_chunk(top, 0), unpack_chunk(bottom, 0), unpack_chunk(top, 16), unpack_chunk(bottom, 16)}};
        });
    }
    template <uint32_t kHalf>
    TK_DEVICE const PerLane<uint32_t>& metadata(uint32_t path) const {
        return e[path][kHalf];
    }
    template <uint32_t kHalf>
    TK_DEVICE PerLane<RowScales> scales(Warp& warp, uint32_t path) const {
        return warp.lanes([&](int lane) {
            const auto pair = static_cast<uint32_t>(out[path][lane].sc_pack >> 32 * kHalf);
            return RowScales{bfloat16_of(pair, 0), bfloat16_of(pair, 1)};
        });
    }
};

template <>
struct SweepWith<GemmStaging::pinned> {
    // sums[path] = the products with all groups of x.
    template <uint32_t kPaths, class Rec>
    TK_DEVICE static void run(Warp& warp,
                              Rec& steps,
                              const WeightRows<kPaths>& weights,
                              const ChannelRow* x,
                              PerLane<LaneSums> (&sums)[kPaths]) {
        Slot<kPaths> next;
        next.stage_group(warp, steps, weights, 0);
        next.template park_half<0>(warp, steps, 0);
        next.template park_half<1>(warp, steps, 0);
        TK_NO_UNROLL
        for (uint32_t group = 0; group < weights.num_groups; ++group, x += kChannelsPerGroup) {
            const Slot<kPaths> cur = next;
            const bool has_next = group + 1 < weights.num_groups;
            if (has_next) next.stage_group(warp, steps, weights, group + 1);
            multiply_half<0>(warp, steps, x, cur, group, sums);
            if (has_next) next.template park_half<0>(warp, steps, group + 1);
            multiply_half<1>(warp, steps, x, cur, group, sums);
            if (has_next) next.template park_half<1>(warp, steps, group + 1);
        }
    }
};

}  // namespace tracekern
