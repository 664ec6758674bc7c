// Numbers that one lane moves at once, what it computes with them, and how a warp walks over those of a row.
#pragma once

#include <type_traits>

#include "platform/device.h"

namespace tracekern {

// They are kept as the words of memory they came in: a register for each number of 16 bits would halve how many loads a
// lane can have under way.
template <class T, uint32_t kCount>
class alignas(kCount * sizeof(T)) Pack {
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
    using Word = std::conditional_t<kCount == 1, Bits, uint32_t>;
    static constexpr uint32_t kPerWord = sizeof(Word) / sizeof(T);

    Word words_[kCount / kPerWord];

public:
    // Rounds each.
    TK_DEVICE static Pack of(const float (&numbers)[kCount]) {
        Pack pack;
        TK_UNROLL
        for (uint32_t w = 0; w < kCount / kPerWord; ++w) {
            if constexpr (kPerWord == 2) {
                pack.words_[w] = from_floats<T>(numbers[2 * w], numbers[2 * w + 1]);
            } else {
                pack.words_[w] = bits_as<Word>(from_float<T>(numbers[w]));
            }
        }
        return pack;
    }

    TK_DEVICE float operator[](uint32_t k) const {
        return to_float(bits_as<T>(static_cast<Bits>(words_[k / kPerWord] >> k % kPerWord * 16)));
    }

    // Each times `scale`, rounded.
    TK_DEVICE Pack scaled(float scale) const {
        float products[kCount];
        TK_UNROLL
        for (uint32_t k = 0; k < kCount; ++k) products[k] = multiply_rn((*this)[k], scale);
        return of(products);
    }

    // sums[k] += weight * (*this)[k]: two roundings each.
    TK_DEVICE void add_to(float (&sums)[kCount], float weight) const {
        TK_UNROLL
        for (uint32_t k = 0; k < kCount; ++k) sums[k] = add_rn(sums[k], multiply_rn(weight, (*this)[k]));
    }
};

template <class T>
constexpr uint32_t kPackCount = 16 / sizeof(T);

TK_DEVICE bool can_pack(const void* a, const void* b, uint32_t bytes) {
    return (reinterpret_cast<uint64_t>(a) | reinterpret_cast<uint64_t>(b) | bytes) % 16 == 0;
}

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
        for (uint32_t c = 0; c < kColumns; ++c) units[c] = load_once(row + (has(c) ? first + c * stride : first));
    }
    template <class Unit>
    TK_DEVICE void store(Unit* row, const Unit (&units)[kColumns]) const {
        TK_UNROLL
        for (uint32_t c = 0; c < kColumns; ++c) {
            if (has(c)) store_once(row + first + c * stride, units[c]);
        }
    }
};

// How many of them: none beside the first where numbers are moved one by one, whose code would be as long as that of
// the rows that matter.
template <uint32_t kCount>
TK_HOST_DEVICE constexpr uint32_t columns_of(uint32_t wanted) {
    return kCount == 1 ? 1 : wanted;
}

// Calls visit(columns) until all `count` vectors of a row were each one lane's.
template <uint32_t kColumns, class Visit>
TK_DEVICE void for_columns(Warp& warp, uint32_t count, Visit visit) {
    const uint32_t stride = (count + kColumns - 1) / kColumns;
    warp.strided_rolled(stride, [&](uint32_t first) { visit(Columns<kColumns>{first, stride, count}); });
}

}  // namespace tracekern
