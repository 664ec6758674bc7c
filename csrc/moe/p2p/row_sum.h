// Sums of weighted rows, by one warp: what a token's rank does with its results and, where experts' ranks add up, they
// do with theirs. In fp32, a rounding for each product and each sum, in the order of the list.
#pragma once

#include <type_traits>

#include "moe/p2p/rows.h"

namespace tracekern {

// One row of a sum. A scaled one is an expert's: row * scale is rounded to the row's type first.
struct alignas(8) Contribution {
    char* row;
    float weight;
    float scale;
    uint32_t peer;    // whose result it is, where it is awaited
    uint32_t result;  // and which
};

// Shared memory: each warp's list of contributions, behind the counts.
TK_HOST_DEVICE uint64_t contributions_offset(const MoeShape& shape, const P2PLayout& layout) {
    return (CountShared::bytes(shape, layout) + 15) / 16 * 16;
}
TK_HOST_DEVICE uint64_t dedup_shared_bytes(const MoeShape& shape, const P2PLayout& layout, uint32_t warps_per_block) {
    return contributions_offset(shape, layout) + uint64_t{warps_per_block} * shape.topk * sizeof(Contribution);
}
TK_DEVICE Contribution* contributions_of(Warp& warp, const P2PArgs& args) {
    char* lists = &warp.shared<char>() + contributions_offset(args.shape, args.layout);
    return reinterpret_cast<Contribution*>(lists) + warp.warp * args.shape.topk;
}

// Which vectors of a row: [begin, begin + count), as many numbers in each as kCount.
struct RowPart {
    uint32_t begin;
    uint32_t count;
};

template <class T, uint32_t kCount, bool kScaled, uint32_t kColumns>
TK_DEVICE void add_packs(float (&sums)[kColumns][kCount],
                         const Pack<T, kCount> (&packs)[kColumns],
                         const Contribution& from) {
    TK_UNROLL
    for (uint32_t c = 0; c < kColumns; ++c) {
        TK_UNROLL
        for (uint32_t k = 0; k < kCount; ++k) {
            float value = to_float(packs[c].values[k]);
            if constexpr (kScaled) value = to_float(from_float<T>(multiply_rn(value, from.scale)));
            sums[c][k] = add_rn(sums[c][k], multiply_rn(from.weight, value));
        }
    }
}

// Adds up all rows for the vectors that a lane has under way; of kRows rows they are at a time.
template <class T, uint32_t kCount, bool kScaled, uint32_t kWidth, uint32_t kRows>
struct ManyRows {
    static constexpr uint32_t kColumns = kWidth;
    template <class Load>
    TK_DEVICE static void add(float (&sums)[kColumns][kCount], const Contribution* list, uint32_t num_rows, Load load) {
        for (uint32_t first = 0; first < num_rows; first += kRows) {
            Pack<T, kCount> packs[kRows][kColumns] = {};
            TK_UNROLL
            for (uint32_t r = 0; r < kRows; ++r) {
                if (first + r < num_rows) load(packs[r], list[first + r].row);
            }
            TK_UNROLL
            for (uint32_t r = 0; r < kRows; ++r) {
                if (first + r < num_rows) add_packs<T, kCount, kScaled>(sums, packs[r], list[first + r]);
            }
        }
    }
};

// The same where all contributions are of one row, which is read once.
template <class T, uint32_t kCount, bool kScaled, uint32_t kWidth>
struct OneRow {
    static constexpr uint32_t kColumns = kWidth;
    template <class Load>
    TK_DEVICE static void add(float (&sums)[kColumns][kCount], const Contribution* list, uint32_t num_rows, Load load) {
        Pack<T, kCount> packs[kColumns] = {};
        if (num_rows) load(packs, list[0].row);
        for (uint32_t i = 0; i < num_rows; ++i) add_packs<T, kCount, kScaled>(sums, packs, list[i]);
    }
};

template <class T, uint32_t kCount, class Rows>
TK_DEVICE void sum_packs(Warp& warp, char* dst, const Contribution* list, uint32_t num_rows, RowPart part) {
    using Unit = Pack<T, kCount>;
    constexpr uint32_t kColumns = Rows::kColumns;
    for_columns<kColumns>(warp, part.count, [&](const Columns<kColumns>& columns) {
        float sums[kColumns][kCount] = {};
        Rows::add(sums, list, num_rows, [&](Unit(&packs)[kColumns], const char* row) {
            columns.load(packs, reinterpret_cast<const Unit*>(row) + part.begin);
        });
        Unit rounded[kColumns];
        TK_UNROLL
        for (uint32_t c = 0; c < kColumns; ++c) {
            TK_UNROLL
            for (uint32_t k = 0; k < kCount; ++k) rounded[c].values[k] = from_float<T>(sums[c][k]);
        }
        columns.store(reinterpret_cast<Unit*>(dst) + part.begin, rounded);
    });
    for (uint32_t i = 0; i < num_rows; ++i) {
        poison(reinterpret_cast<Unit*>(list[i].row) + part.begin, part.count * sizeof(Unit));
    }
}

// As many loads under way as 128 registers hold without a spill; conversions of fp16 take more of them. With half as
// many the way back of `reduce` took 463 us for 4,096 tokens, with about as many 370 (2 H200, 2026-11-21).
template <class T, uint32_t kCount, bool kScaled, bool kOneRow>
TK_DEVICE void sum_part(Warp& warp, char* dst, const Contribution* list, uint32_t num_rows, RowPart part) {
    if constexpr (kOneRow) {
        constexpr uint32_t kColumns = std::is_same_v<T, Half> ? 3 : 4;
        sum_packs<T, kCount, OneRow<T, kCount, kScaled, kColumns>>(warp, dst, list, num_rows, part);
    } else if constexpr (!kScaled) {
        sum_packs<T, kCount, ManyRows<T, kCount, kScaled, 3, 2>>(warp, dst, list, num_rows, part);
    } else if (num_rows <= 2) {
        sum_packs<T, kCount, ManyRows<T, kCount, kScaled, 4, 1>>(warp, dst, list, num_rows, part);
    } else {
        sum_packs<T, kCount, ManyRows<T, kCount, kScaled, 2, 6>>(warp, dst, list, num_rows, part);
    }
}

// dst = sum of the rows in `list`, the share `index` of `num_parts` of it. All rows and dst are aligned alike.
template <class T, bool kScaled, bool kOneRow>
TK_DEVICE void sum_rows(Warp& warp,
                        char* dst,
                        const Contribution* list,
                        uint32_t num_rows,
                        uint32_t hidden,
                        uint32_t index,
                        uint32_t num_parts) {
    const bool packed = can_pack(dst, num_rows ? list[0].row : nullptr, hidden * sizeof(T));
    const uint32_t num_units = packed ? hidden / kPackCount<T> : hidden;
    const uint32_t part_units = (num_units + num_parts - 1) / num_parts;
    const uint32_t begin = index * part_units;
    if (begin >= num_units) return;
    const RowPart part{begin, num_units - begin < part_units ? num_units - begin : part_units};
    if (packed) {
        sum_part<T, kPackCount<T>, kScaled, kOneRow>(warp, dst, list, num_rows, part);
    } else {
        sum_part<T, 1, kScaled, kOneRow>(warp, dst, list, num_rows, part);
    }
}

}  // namespace tracekern
