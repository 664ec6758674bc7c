// From packed words to the operands of a multiplication, and from its product to sums. Numbers stay unscaled until they
// are multiplied: the scale is applied to the product.
#pragma once

#include "moe/gemm/events.h"
#include "moe/gemm/layout.h"
#include "trace/recorder.h"

namespace tracekern {

// A scale of each of the two rows that a lane has sums of: g and g + 8 of the warp's 16.
struct RowScales {
    float top;
    float bottom;
};

// Sums of a lane, placed like a ProductTile.
struct LaneSums {
    float values[4];

    TK_DEVICE void add_scaled(const ProductTile& product, RowScales scale) {
        TK_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            values[i] = multiply_add_rn(product.values[i], i < 2 ? scale.top : scale.bottom, values[i]);
        }
    }
};

TK_DEVICE float scale_of(uint64_t word) {
    return bits_as<float>(static_cast<uint32_t>(word >> 32) & 0xffff0000u);
}

// Chunks t and t + 4 of a row as two bf16 each: 0, and the number at the slot that the lower bit of its place names.
struct ChunkPair {
    uint32_t low;
    uint32_t high;
};
TK_DEVICE ChunkPair decode_chunks(uint64_t word, uint32_t t) {
    const uint32_t numbers = nibbles_minus_8(static_cast<uint32_t>(word) >> 4 * t);
    const uint32_t places = static_cast<uint32_t>(word >> 32) >> 2 * t;
    // The number's bytes are 0 and 1, or 2 and 3, and byte 4 is 0: in front of it where the slot is 1, behind it else.
    constexpr uint32_t kLow[] = {0x4410, 0x1044}, kHigh[] = {0x4432, 0x3244};
    return {permute_bytes(numbers, 0, kLow[0] + (places & 1) * (kLow[1] - kLow[0])),
            permute_bytes(numbers, 0, kHigh[0] + (places >> 8 & 1) * (kHigh[1] - kHigh[0]))};
}

TK_DEVICE SparseRows decode_rows(uint64_t top, uint64_t bottom, uint32_t t) {
    const ChunkPair a = decode_chunks(top, t);
    const ChunkPair b = decode_chunks(bottom, t);
    return {{a.low, b.low, a.high, b.high}};
}

// Metadata of 4 chunks of both rows, from chunk 4 * part on: a chunk keeps the pair that the upper bit of its place
// names.
TK_DEVICE uint32_t decode_metadata(uint64_t top, uint64_t bottom, uint32_t part) {
    const uint32_t places =
        permute_bytes(static_cast<uint32_t>(top >> 32), static_cast<uint32_t>(bottom >> 32), 0x0400 + 0x0101 * part);
    // The upper bits of a row's 4 places, which stand 2 apart, move 4 apart.
    uint32_t pairs = places >> 1 & 0x00550055u;
    pairs = (pairs | pairs << 4) & 0x05050505u;
    pairs = (pairs | pairs << 2) & 0x11111111u;
    return pairs * (kSecondPair - kFirstPair) + kFirstPair * 0x11111111u;
}

// The rows of weights that a warp sweeps over. kPaths of them meet the same x: gate and up in K2, one in K4.
template <uint32_t kPaths>
struct WeightRows {
    const PackedPair* first;  // the first of the warp's 16, of group 0
    uint32_t num_groups;
    uint32_t group_stride;
    uint32_t path_stride;

    TK_DEVICE const PackedPair* at(uint32_t group, uint32_t path, uint32_t row) const {
        return first + uint64_t{group} * group_stride + path * path_stride + row;
    }
};

// ---- the steps of a half of a group: `steps` is a recorder, Recorder<false> where they are not wanted ----

// Something that is there when all four words are.
TK_DEVICE uint64_t behind(const uint32_t (&words)[4]) {
    return uint64_t{words[0] | words[1]} << 32 | words[2] | words[3];
}

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
    warp.lanes([&](int lane) {
        sums[lane].add_scaled(product[lane], scales[lane]);
        return 0;
    });
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

}  // namespace tracekern
