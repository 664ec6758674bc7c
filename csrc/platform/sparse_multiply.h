// The product of a sparse [16][32] and a dense [32][8] matrix by one warp, Warp::multiply_sparse(): operands as lanes
// hold them, and the product in plain arithmetic for backends without the instruction.
//
// Each chunk of 4 neighbouring columns of the sparse matrix keeps 2 numbers, at the places that 4 bits of metadata
// name: bits 0-1 for the first, 2-3 for the second, which comes behind it. Lanes are in groups of 4; lane t of group g
// holds numbers of rows g and g + 8. What a lane of 32 holds the lane 32 above it holds too, where there is one: it
// computes the same again.
#pragma once

#include "platform/number.h"

namespace tracekern {

// Two kept numbers in each word, the first in the low half: chunk t of rows g and g + 8, then chunk t + 4 of both.
struct SparseRows {
    uint32_t words[4];
};
// Word j: rows 8j + 2t and 8j + 2t + 1 of column g.
struct DenseColumn {
    uint32_t words[4];
};
// Columns 2t and 2t + 1 of row g, then of row g + 8.
struct ProductTile {
    float values[4];
};

// Two numbers of 4 bits, less 8, as bf16: one in the low half of its word, one in the high half of its own. The other
// halves are 0.
struct SplitNibbles {
    uint32_t low;
    uint32_t high;
};

// Metadata of chunks 0-3 of a group's rows is lane 2 * kSelector's, of chunks 4-7 that of the lane behind it: row g in
// the low half, row g + 8 in the high half, 4 bits a chunk. Those of other lanes are not looked at.
constexpr uint32_t kFirstPair = 0x4;   // numbers at places 0 and 1
constexpr uint32_t kSecondPair = 0xe;  // at 2 and 3

TK_HOST_DEVICE constexpr uint32_t lane_group(int lane) {
    return static_cast<uint32_t>(lane) / 4 % 8;
}
TK_HOST_DEVICE constexpr uint32_t lane_in_group(int lane) {
    return static_cast<uint32_t>(lane) % 4;
}

// Of two bf16 in a word.
TK_HOST_DEVICE float bfloat16_of(uint32_t word, uint32_t place) {
    return bits_as<float>(place ? word & 0xffff0000u : word << 16);
}

// Two numbers 0 to 15, in the low 4 bits of each half, as bf16 of the number minus 8. All are exact.
TK_HOST_DEVICE uint32_t signed_nibbles_to_bfloat16(uint32_t nibbles) {
    const float low = static_cast<float>(static_cast<int>(nibbles & 15) - 8);
    const float high = static_cast<float>(static_cast<int>(nibbles >> 16 & 15) - 8);
    return bits_as<uint32_t>(low) >> 16 | (bits_as<uint32_t>(high) & 0xffff0000u);
}

// Byte i is the one that 4 bits of `selector`, from bit 4 i on, name: 0-3 of `low`, 4-7 of `high`.
TK_HOST_DEVICE uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t both = uint64_t{high} << 32 | low;
    uint32_t result = 0;
    for (uint32_t i = 0; i < 4; ++i) {
        result |= (static_cast<uint32_t>(both >> (selector >> 4 * i & 7) * 8) & 0xffu) << 8 * i;
    }
    return result;
}

// What one lane gets of the product. rows(lane, word), column(lane, word), metadata(lane): what another lane holds; all
// lanes ask at once. Products of two bf16 are exact in fp32; sums are rounded one by one, in the order of the columns.
template <uint32_t kSelector, class Rows, class Column, class Metadata>
TK_DEVICE ProductTile sparse_product_of_lane(int lane, Rows rows, Column column, Metadata metadata) {
    const uint32_t first = 4 * lane_group(lane);  // lane of the group
    const uint32_t t = lane_in_group(lane);
    ProductTile product{};
    TK_UNROLL
    for (uint32_t chunk = 0; chunk < 8; ++chunk) {
        const uint32_t places = metadata(first + 2 * kSelector + chunk / 4);
        TK_UNROLL
        for (uint32_t half = 0; half < 2; ++half) {  // row g, row g + 8
            const uint32_t kept = rows(first + chunk % 4, half + chunk / 4 * 2);
            TK_UNROLL
            for (uint32_t number = 0; number < 2; ++number) {
                const uint32_t place = places >> (16 * half + chunk % 4 * 4 + 2 * number) & 3;
                TK_UNROLL
                for (uint32_t c = 0; c < 2; ++c) {
                    const uint32_t holder = 4 * (2 * t + c) + chunk % 2 * 2 + place / 2;
                    const float dense = bfloat16_of(column(holder, chunk / 2), place % 2);
                    product.values[2 * half + c] += bfloat16_of(kept, number) * dense;
                }
            }
        }
    }
    return product;
}

// What one lane gets of Warp::load_columns(place).
template <class F>
TK_DEVICE DenseColumn column_of_lane(int lane, F place) {
    DenseColumn column;
    TK_UNROLL
    for (uint32_t word = 0; word < 4; ++word) {
        const auto* part = static_cast<const uint32_t*>(place(static_cast<int>(8 * word + lane_group(lane))));
        column.words[word] = part[lane_in_group(lane)];
    }
    return column;
}

// What one lane gets of Warp::transpose(). rows(lane): what another lane holds; all lanes ask at once.
template <class Rows>
TK_DEVICE uint32_t transposed_of_lane(int lane, Rows rows) {
    const uint32_t column = lane_group(lane), first = 8 * lane_in_group(lane) + column / 2;
    const uint32_t shift = column % 2 * 16;
    return (rows(first) >> shift & 0xffffu) | (rows(first + 4) >> shift) << 16;
}

}  // namespace tracekern
