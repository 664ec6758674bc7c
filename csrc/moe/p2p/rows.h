// What a warp does with one row of numbers: several at once where the addresses allow it.
#pragma once

#include "moe/p2p/layout.h"

namespace tracekern {

// Numbers that one lane moves at once.
template <class T, uint32_t kCount>
struct alignas(kCount * sizeof(T)) Pack {
    T values[kCount];
};
template <class T>
constexpr uint32_t kPackCount = 16 / sizeof(T);

TK_DEVICE bool can_pack(const void* a, const void* b, uint32_t bytes) {
    return (reinterpret_cast<uint64_t>(a) | reinterpret_cast<uint64_t>(b) | bytes) % 16 == 0;
}

template <class T, uint32_t kCount>
TK_DEVICE void scale_packs(Warp& warp, char* dst, const char* src, float scale, uint32_t hidden) {
    using Unit = Pack<T, kCount>;
    warp.strided(hidden / kCount, [&](uint32_t i) {
        Unit unit = reinterpret_cast<const Unit*>(src)[i];
        TK_UNROLL
        for (uint32_t k = 0; k < kCount; ++k)
            unit.values[k] = from_float<T>(multiply_rn(to_float(unit.values[k]), scale));
        reinterpret_cast<Unit*>(dst)[i] = unit;
    });
}

// dst[i] = src[i] * scale, rounded to T. dst may be src.
template <class T>
TK_DEVICE void scale_row(Warp& warp, char* dst, const char* src, float scale, uint32_t hidden) {
    if (can_pack(dst, src, hidden * sizeof(T))) {
        scale_packs<T, kPackCount<T>>(warp, dst, src, scale, hidden);
    } else {
        scale_packs<T, 1>(warp, dst, src, scale, hidden);
    }
}

}  // namespace tracekern
