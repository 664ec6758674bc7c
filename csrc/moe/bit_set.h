// A set of small numbers that a lane keeps in registers, a bit each: as many words as there are numbers for, known when
// it is compiled.
#pragma once

#include <type_traits>

#include "platform/device.h"

namespace tracekern {

// Of numbers below kSize.
template <uint32_t kSize>
class BitSet {
    using Word = std::conditional_t<kSize <= 32, uint32_t, uint64_t>;
    static constexpr uint32_t kWordBits = 8 * sizeof(Word);
    static constexpr uint32_t kWords = (kSize + kWordBits - 1) / kWordBits;

    Word words_[kWords] = {};

    // The bit of a number in a word; 0 in the others.
    TK_DEVICE static Word bit(uint32_t number, uint32_t word) {
        if constexpr (kWords == 1) {
            return Word{1} << number;
        } else {
            return Word{number / kWordBits == word} << number % kWordBits;
        }
    }
    TK_DEVICE static uint32_t count_bits_of(Word word) {
        if constexpr (sizeof(Word) == sizeof(uint32_t)) {
            return count_bits(word);
        } else {
            return count_bits(static_cast<uint32_t>(word)) + count_bits(static_cast<uint32_t>(word >> 32));
        }
    }

public:
    TK_DEVICE void add(uint32_t number) {
        TK_UNROLL
        for (uint32_t w = 0; w < kWords; ++w) words_[w] |= bit(number, w);
    }
    TK_DEVICE bool has(uint32_t number) const {
        Word found = 0;
        TK_UNROLL
        for (uint32_t w = 0; w < kWords; ++w) found |= words_[w] & bit(number, w);
        return found != 0;
    }
    TK_DEVICE uint32_t count() const {
        uint32_t count = 0;
        TK_UNROLL
        for (uint32_t w = 0; w < kWords; ++w) count += count_bits_of(words_[w]);
        return count;
    }
    // How many it has that are smaller.
    TK_DEVICE uint32_t count_below(uint32_t number) const {
        uint32_t count = 0;
        TK_UNROLL
        for (uint32_t w = 0; w < kWords; ++w) {
            const bool is_own = kWords == 1 || number / kWordBits == w;
            const Word all = kWords > 1 && number / kWordBits > w ? ~Word{0} : 0;
            count += count_bits_of(words_[w] & (is_own ? bit(number, w) - 1 : all));
        }
        return count;
    }
};

}  // namespace tracekern
