// How a warp walks over the numbers of a row: several vectors of them at once.
#pragma once

#include "moe/pack.h"

namespace tracekern {

// The vectors of a row that one lane has under way at a time: one after the other each would take the latency of
// memory. Where the last are missing their lanes load the first again, and store nothing.
template <uint32_t kColumns>
struct Columns {
    uint32_t first;
    uint32_t stride;
    uint32_t count;  // vectors of the row

    TK_DEVICE bool has(uint32_t c) const { return first + c * stride < count; }
    template <class Unit>
    TK_DEVICE void load(Unit (&units)[kColumns], const Unit* row) const {
        TK_UNROLL
        for (uint32_t c = 0; c < kColumns; ++c) units[c] = row[has(c) ? first + c * stride : first];
    }
    template <class Unit>
    TK_DEVICE void store(Unit* row, const Unit (&units)[kColumns]) const {
        TK_UNROLL
        for (uint32_t c = 0; c < kColumns; ++c) {
            if (has(c)) row[first + c * stride] = units[c];
        }
    }
};

// Calls visit(columns) until all `count` vectors of a row were each one lane's.
template <uint32_t kColumns, class Visit>
TK_DEVICE void for_columns(Warp& warp, uint32_t count, Visit visit) {
    const uint32_t stride = (count + kColumns - 1) / kColumns;
    warp.strided(stride, [&](uint32_t first) { visit(Columns<kColumns>{first, stride, count}); });
}

}  // namespace tracekern
