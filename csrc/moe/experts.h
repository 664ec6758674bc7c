// The experts as every family calls them: what an expert makes of a row. Today it scales the row, a stand-in that costs
// next to nothing and tells experts apart; networks come here, behind the same calls.
#pragma once

#include "moe/rows.h"

namespace tracekern {

struct Expert {
    float scale;

    // Of numbers that a lane holds; each result is rounded.
    template <class T, uint32_t kCount>
    TK_DEVICE Pack<T, kCount> operator()(const Pack<T, kCount>& numbers) const {
        return numbers.scaled(scale);
    }

    // dst = what it makes of the row src, `hidden` numbers of type T each; one warp. dst may be src.
    template <class T>
    TK_DEVICE void apply(Warp& warp, char* dst, const char* src, uint32_t hidden) const {
        if (can_pack(dst, src, hidden * sizeof(T))) {
            apply_to_packs<T, kPackCount<T>>(warp, dst, src, hidden);
        } else {
            apply_to_packs<T, 1>(warp, dst, src, hidden);
        }
    }

private:
    template <class T, uint32_t kCount>
    TK_DEVICE void apply_to_packs(Warp& warp, char* dst, const char* src, uint32_t hidden) const {
        using Unit = Pack<T, kCount>;
        constexpr uint32_t kColumns = columns_of<kCount>(4);
        for_columns<kColumns>(warp, hidden / kCount, [&](const Columns<kColumns>& columns) {
            Unit units[kColumns] = {};
            columns.load(units, reinterpret_cast<const Unit*>(src));
            TK_UNROLL
            for (uint32_t c = 0; c < kColumns; ++c) units[c] = (*this)(units[c]);
            columns.store(reinterpret_cast<Unit*>(dst), units);
        });
    }
};

// Those of all ranks.
struct Experts {
    const float* scale;  // [expert]

    TK_DEVICE Expert operator[](uint32_t expert) const { return {scale[expert]}; }
};

}  // namespace tracekern
