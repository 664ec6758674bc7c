// Sums of weighted rows, by one warp: what a token's rank does with its results and, where experts' ranks add up, they
// do with theirs. In fp32, a rounding for each product and each sum, in the order of the list.
#pragma once

#include "moe/experts.h"

namespace tracekern {

// One row of a sum, as it is or what an expert makes of it.
struct alignas(8) Contribution {
    char* row;
    float weight;
    Expert expert;
    uint32_t peer;    // whose result it is, where it is awaited
    uint32_t result;  // and which
};

// Which vectors of a row: [begin, begin + count), as many numbers in each as kCount.
struct RowPart {
    uint32_t begin;
    uint32_t count;

    // The share `index` of `num_parts`.
    TK_DEVICE static RowPart of(uint32_t num_units, uint32_t index, uint32_t num_parts) {
        const uint32_t part_units = (num_units + num_parts - 1) / num_parts;
        const uint32_t begin = index * part_units;
        if (begin >= num_units) return {0, 0};
        return {begin, num_units - begin < part_units ? num_units - begin : part_units};
    }
};

// Loads that a lane has under way at a time: of vectors of a row, and of rows.
struct SumLoads {
    uint32_t columns;
    uint32_t rows;
};
// They and the sums fit into the registers that a block of 512 threads leaves. 2 of 8 rows are as many, but made
// `pipelined` a tenth slower for 4,096 tokens.
constexpr SumLoads kSumLoads{4, 2};
// For blocks of 1,024 threads, and where several blocks share an SM.
constexpr SumLoads kFewSumLoads{1, 4};

template <class T, uint32_t kCount, uint32_t kColumns>
using SumPacks = Pack<T, kCount>[kColumns];
template <uint32_t kCount, uint32_t kColumns>
using Sums = float[kColumns][kCount];

template <bool kByExperts, class T, uint32_t kCount, uint32_t kColumns>
TK_DEVICE void add_packs(Sums<kCount, kColumns>& sums,
                         const SumPacks<T, kCount, kColumns>& packs,
                         const Contribution& from) {
    TK_UNROLL
    for (uint32_t c = 0; c < kColumns; ++c) {
        (kByExperts ? from.expert(packs[c]) : packs[c]).add_to(sums[c], from.weight);
    }
}

template <class T, uint32_t kRows, bool kByExperts, uint32_t kCount, uint32_t kColumns, class Load>
TK_DEVICE void add_rows(Sums<kCount, kColumns>& sums, const Contribution* list, uint32_t num_rows, Load load) {
    SumPacks<T, kCount, kColumns> packs[kRows];
    TK_NO_UNROLL
    for (; num_rows >= kRows; num_rows -= kRows, list += kRows) {
        TK_UNROLL
        for (uint32_t r = 0; r < kRows; ++r) load(packs[r], list[r].row);
        TK_UNROLL
        for (uint32_t r = 0; r < kRows; ++r) add_packs<kByExperts, T>(sums, packs[r], list[r]);
    }
    TK_NO_UNROLL
    for (; num_rows; --num_rows, ++list) {
        load(packs[0], list->row);
        add_packs<kByExperts, T>(sums, packs[0], *list);
    }
}

// The same where all contributions are of one row, which is read once.
template <class T, bool kByExperts, uint32_t kCount, uint32_t kColumns, class Load>
TK_DEVICE void add_one_row(Sums<kCount, kColumns>& sums, const Contribution* list, uint32_t num_rows, Load load) {
    if (num_rows == 0) return;
    SumPacks<T, kCount, kColumns> packs;
    load(packs, list[0].row);
    TK_NO_UNROLL
    for (uint32_t i = 0; i < num_rows; ++i) add_packs<kByExperts, T>(sums, packs, list[i]);
}

// dst = sum of the rows in `list`, in a part of them.
template <class T, uint32_t kCount, bool kByExperts, bool kOneRow, SumLoads kLoads>
TK_DEVICE void sum_part(Warp& warp, char* dst, const Contribution* list, uint32_t num_rows, RowPart part) {
    using Unit = Pack<T, kCount>;
    constexpr uint32_t kColumns = columns_of<kCount>(kLoads.columns);
    for_columns<kColumns>(warp, part.count, [&](const Columns<kColumns>& columns) {
        Sums<kCount, kColumns> sums = {};
        const auto load = [&](SumPacks<T, kCount, kColumns>& packs, const char* row) {
            columns.load(packs, reinterpret_cast<const Unit*>(row) + part.begin);
        };
        if constexpr (kOneRow) {
            add_one_row<T, kByExperts>(sums, list, num_rows, load);
        } else {
            add_rows<T, kLoads.rows, kByExperts>(sums, list, num_rows, load);
        }
        Unit rounded[kColumns];
        TK_UNROLL
        for (uint32_t c = 0; c < kColumns; ++c) rounded[c] = Unit::of(sums[c]);
        columns.store(reinterpret_cast<Unit*>(dst) + part.begin, rounded);
    });
    for (uint32_t i = 0; i < num_rows; ++i) {
        poison(reinterpret_cast<Unit*>(list[i].row) + part.begin, part.count * sizeof(Unit));
    }
}

// dst = sum of the rows in `list`, the share `index` of `num_parts` of it. All rows and dst are aligned alike.
template <class T, bool kByExperts, bool kOneRow, SumLoads kLoads = kSumLoads>
TK_DEVICE void sum_rows(Warp& warp,
                        char* dst,
                        const Contribution* list,
                        uint32_t num_rows,
                        uint32_t hidden,
                        uint32_t index,
                        uint32_t num_parts) {
    const bool packed = can_pack(dst, num_rows ? list[0].row : nullptr, hidden * sizeof(T));
    const uint32_t num_units = packed ? hidden / kPackCount<T> : hidden;
    const RowPart part = RowPart::of(num_units, index, num_parts);
    if (part.count == 0) return;
    if (packed) {
        sum_part<T, kPackCount<T>, kByExperts, kOneRow, kLoads>(warp, dst, list, num_rows, part);
    } else {
        sum_part<T, 1, kByExperts, kOneRow, kLoads>(warp, dst, list, num_rows, part);
    }
}

}  // namespace tracekern
