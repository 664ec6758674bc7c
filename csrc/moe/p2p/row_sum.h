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

template <class T, uint32_t kCount, bool kScaled>
TK_DEVICE void add_pack(float (&sums)[kCount], const Pack<T, kCount>& pack, const Contribution& from) {
    TK_UNROLL
    for (uint32_t k = 0; k < kCount; ++k) {
        float value = to_float(pack.values[k]);
        if constexpr (kScaled) value = to_float(from_float<T>(multiply_rn(value, from.scale)));
        sums[k] = add_rn(sums[k], multiply_rn(from.weight, value));
    }
}

// Each lane has kDepth vectors of a row under way at a time, and those of the next row. kOneRow: all contributions are
// of one row, which is read once. The depths are what 128 registers hold; conversions of fp16 take more of them.
template <class T, uint32_t kCount, bool kScaled, bool kOneRow>
TK_DEVICE void sum_packs(Warp& warp, char* dst, const Contribution* list, uint32_t num_rows, RowPart part) {
    using Unit = Pack<T, kCount>;
    constexpr uint32_t kDepth = kOneRow && !std::is_same_v<T, Half> ? 4 : 3;
    const uint32_t columns = (part.count + kDepth - 1) / kDepth;
    Unit* out = reinterpret_cast<Unit*>(dst) + part.begin;
    // The last vectors may be missing: their lanes do the first one again and drop it.
    const auto at = [&](uint32_t column, uint32_t d) {
        return column + d * columns < part.count ? column + d * columns : column;
    };
    warp.strided(columns, [&](uint32_t column) {
        float sums[kDepth][kCount] = {};
        Unit units[kDepth] = {};
        const auto load = [&](uint32_t i) {
            const Unit* row = reinterpret_cast<const Unit*>(list[i].row) + part.begin;
            TK_UNROLL
            for (uint32_t d = 0; d < kDepth; ++d) units[d] = row[at(column, d)];
        };
        if (num_rows) load(0);
        for (uint32_t i = 0; i < num_rows; ++i) {
            Unit now[kDepth];
            TK_UNROLL
            for (uint32_t d = 0; d < kDepth; ++d) now[d] = units[d];
            if (!kOneRow && i + 1 < num_rows) load(i + 1);  // on its way while this one is added
            TK_UNROLL
            for (uint32_t d = 0; d < kDepth; ++d) add_pack<T, kCount, kScaled>(sums[d], now[d], list[i]);
        }
        TK_UNROLL
        for (uint32_t d = 0; d < kDepth; ++d) {
            Unit unit;
            TK_UNROLL
            for (uint32_t k = 0; k < kCount; ++k) unit.values[k] = from_float<T>(sums[d][k]);
            if (column + d * columns < part.count) out[column + d * columns] = unit;
        }
    });
    for (uint32_t i = 0; i < num_rows; ++i) {
        poison(reinterpret_cast<Unit*>(list[i].row) + part.begin, part.count * sizeof(Unit));
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
        sum_packs<T, kPackCount<T>, kScaled, kOneRow>(warp, dst, list, num_rows, part);
    } else {
        sum_packs<T, 1, kScaled, kOneRow>(warp, dst, list, num_rows, part);
    }
}

}  // namespace tracekern
