// From packed words to the operands of a multiplication, and from its product to sums. Numbers stay unscaled until they
// are multiplied: the scale is applied to the product.
#pragma once

#include "moe/gemm/product.h"
#include "trace/recorder.h"

namespace tracekern {

TK_DEVICE float scale_of(uint64_t word) {
    return bits_as<float>(static_cast<uint32_t>(word >> 32) & 0xffff0000u);
}

// Places of the chunks of both rows, those of the top one in the lower half.
TK_DEVICE uint32_t places_of(uint64_t top, uint64_t bottom) {
    return permute_bytes(static_cast<uint32_t>(top >> 32), static_cast<uint32_t>(bottom >> 32), 0x5410);
}

// Selectors of permute_bytes(numbers, 0, ...), whose bytes 4 to 7 are 0: a chunk is its number with a 0 behind it, or
// in front of it where its slot is 1. `slots` has the slot of a row in bit 0, and that of another in bit 16. Products
// make the selectors: they run beside the shifts and the bit operations, which take most of the loop.
struct ChunkSelector {
    uint32_t slot_0;
    uint32_t slot_1;

    TK_DEVICE constexpr uint32_t step() const { return (slot_1 - slot_0) & 0xffffu; }
    TK_DEVICE uint32_t of_low(uint32_t slots) const { return slot_0 + slots * step(); }
    TK_DEVICE uint32_t of_high(uint32_t slots) const {
        return static_cast<uint32_t>((uint64_t{slots} * (step() << 16) + (uint64_t{slot_0} << 32)) >> 32);
    }
};

// Chunks t and t + 4 of both rows as two bf16 each: 0, and the number at the slot that the lower bit of its place
// names.
TK_DEVICE SparseRows decode_rows(uint64_t top, uint64_t bottom, uint32_t t) {
    constexpr ChunkSelector kFirst{0x4410, 0x1044}, kSecond{0x4432, 0x3244};
    const uint32_t places = places_of(top, bottom) >> 2 * t;
    const uint32_t first = places & 0x00010001u, second = places >> 8 & 0x00010001u;
    const uint32_t a = nibbles_minus_8(static_cast<uint32_t>(top) >> 4 * t);
    const uint32_t b = nibbles_minus_8(static_cast<uint32_t>(bottom) >> 4 * t);
    return {{permute_bytes(a, 0, kFirst.of_low(first)),
             permute_bytes(b, 0, kFirst.of_high(first)),
             permute_bytes(a, 0, kSecond.of_low(second)),
             permute_bytes(b, 0, kSecond.of_high(second))}};
}

// Metadata of 4 chunks of both rows, from chunk 4 * part on: a chunk keeps the pair that the upper bit of its place
// names.
TK_DEVICE uint32_t decode_metadata(uint32_t places, uint32_t part) {
    // The upper bits of a row's 4 places, which stand 2 apart, move 4 apart. Sums do for ors: what they carry ends in
    // bits that are dropped.
    uint32_t pairs = permute_bytes(places, 0, 0x4240 + 0x0101 * part) & 0x00aa00aau;
    pairs = pairs * 0x11 & 0x0a0a0a0au;
    pairs = pairs * 0x05 & 0x22222222u;
    return pairs * ((kSecondPair - kFirstPair) / 2) + kFirstPair * 0x11111111u;
}

// The rows of weights that a warp sweeps over. kPaths of them meet the same x: gate and up in K2, one in K4.
template <uint32_t kPaths>
struct WeightRows {
    const PackedPair* first;  // the first of the warp's 16, of group 0
    uint32_t num_groups;
    uint32_t group_bytes;  // of all rows
    uint32_t path_stride;

    TK_DEVICE const PackedPair* at(uint32_t group, uint32_t path, uint32_t row) const {
        const auto* own = reinterpret_cast<const char*>(first + path * path_stride + row);
        return reinterpret_cast<const PackedPair*>(own + uint64_t{group} * group_bytes);
    }
};

// ---- the steps of a half of a group: `steps` is a recorder, Recorder<false> where they are not wanted ----

template <uint32_t kHalf, class Rec>
TK_DEVICE PerLane<DenseColumn> load_b(Warp& warp, Rec& steps, const ChannelRow* x, uint32_t group) {
    TK_RANGE(steps, GemmEvent::load_b, group, kHalf);
    const auto column = warp.load_transposed(x + kHalf * kChannelsPerHalf);
    TK_END_AFTER(behind(column[0].words));
    return column;
}

template <uint32_t kHalf, class Rec, class Operands>
TK_DEVICE PerLane<SparseRows> decode(Warp& warp, Rec& steps, const Operands& operands, uint32_t group, uint32_t path) {
    TK_RANGE(steps, GemmEvent::decode, group, kHalf, path);
    const auto rows = operands.template rows<kHalf>(warp, path);
    TK_END_AFTER(behind(rows[0].words));
    return rows;
}

template <uint32_t kHalf, class Rec, class Operands>
TK_DEVICE void multiply(Warp& warp,
                        Rec& steps,
                        const Operands& operands,
                        const PerLane<SparseRows>& rows,
                        const PerLane<DenseColumn>& column,
                        uint32_t group,
                        uint32_t path,
                        PerLane<LaneSums>& sums) {
    TK_RANGE(steps, GemmEvent::multiply, group, kHalf, path);
    const auto product = warp.template multiply_sparse<kHalf>(rows, column, operands.template metadata<kHalf>(path));
    const auto scales = operands.template scales<kHalf>(warp, path);
    warp.each_lane([&](int lane) { sums[lane].add_scaled(product[lane], scales[lane]); });
    TK_END_AFTER(behind(bits_as<SparseRows>(sums[0]).words));
}

// One multiplication for each path, all with the same x: the channels of a group. Operands has, for half kHalf of the
// group, rows<kHalf>(warp, path), metadata<kHalf>(path) and scales<kHalf>(warp, path).
template <uint32_t kHalf, uint32_t kPaths, class Rec, class Operands>
TK_DEVICE void multiply_half(Warp& warp,
                             Rec& steps,
                             const ChannelRow* x,
                             const Operands& operands,
                             uint32_t group,
                             PerLane<LaneSums> (&sums)[kPaths]) {
    const auto column = load_b<kHalf>(warp, steps, x, group);
    TK_UNROLL
    for (uint32_t path = 0; path < kPaths; ++path) {
        const auto rows = decode<kHalf>(warp, steps, operands, group, path);
        multiply<kHalf>(warp, steps, operands, rows, column, group, path, sums[path]);
    }
}

// How the weights of a warp come to the multiplication: run(warp, steps, weights, x, sums) sweeps over all groups of
// channels. Each staging has its own.
template <GemmStaging kStaging>
struct SweepWith;

}  // namespace tracekern
