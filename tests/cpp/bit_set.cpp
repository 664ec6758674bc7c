// Sets of small numbers in one word and in several, against std::set: 0 where both always say the same.
#include "moe/bit_set.h"

#include <cstdio>
#include <iterator>
#include <random>
#include <set>

using namespace tracekern;

namespace {

template <uint32_t kSize>
bool is_right() {
    std::mt19937 random(kSize);
    for (uint32_t round = 0; round < 50; ++round) {
        BitSet<kSize> ours;
        std::set<uint32_t> wanted;
        for (uint32_t i = random() % (kSize + 1); i; --i) {
            const uint32_t number = static_cast<uint32_t>(random()) % kSize;
            ours.add(number);
            wanted.insert(number);
        }
        if (ours.count() != wanted.size()) return false;
        for (uint32_t number = 0; number < kSize; ++number) {
            const auto below = std::distance(wanted.begin(), wanted.lower_bound(number));
            if (ours.has(number) != wanted.contains(number)) return false;
            if (ours.count_below(number) != static_cast<uint32_t>(below)) return false;
        }
    }
    return true;
}

}  // namespace

int main() {
    return is_right<8>() && is_right<32>() && is_right<64>() && is_right<65>() && is_right<144>() ? 0 : 1;
}
