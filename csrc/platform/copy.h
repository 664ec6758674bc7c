// A warp's copy loop for GPUs. Two batches of loads take turns: one is on its way while the other is stored. One load
// at a time, a 14 KB row takes 28 times the latency of memory.
#pragma once

#include <cstdint>

#include "platform/qualifiers.h"

namespace tracekern {

// The backend's.
template <class T>
TK_DEVICE T load_once(const T* place);
template <class T>
TK_DEVICE void store_once(T* place, const T& value);

template <class T, uint32_t kLanes, uint32_t kBatch>
TK_DEVICE void copy_batched(T* dst, const T* src, uint32_t n, uint32_t lane) {
    constexpr uint32_t kStep = kBatch * kLanes;
    const auto load = [&](T(&batch)[kBatch], uint32_t first) {
        TK_UNROLL
        for (uint32_t k = 0; k < kBatch; ++k) batch[k] = load_once(src + first + k * kLanes);
    };
    const auto store = [&](const T(&batch)[kBatch], uint32_t first) {
        TK_UNROLL
        for (uint32_t k = 0; k < kBatch; ++k) store_once(dst + first + k * kLanes, batch[k]);
    };
    const uint32_t whole = n / kStep * kStep;  // steps
    if (whole) {
        T even[kBatch], odd[kBatch];
        uint32_t i = lane;
        load(even, i);
        TK_NO_UNROLL
        for (;;) {
            if (i + kStep >= whole) {
                store(even, i);
                break;
            }
            load(odd, i + kStep);
            store(even, i);
            i += kStep;
            if (i + kStep >= whole) {
                store(odd, i);
                break;
            }
            load(even, i + kStep);
            store(odd, i);
            i += kStep;
        }
    }
    TK_NO_UNROLL
    for (uint32_t i = whole + lane; i < n; i += kLanes) store_once(dst + i, load_once(src + i));
}

// One by one: for rows that 16 bytes do not divide.
template <class T, uint32_t kLanes>
TK_DEVICE void copy_one_by_one(T* dst, const T* src, uint32_t n, uint32_t lane) {
    TK_NO_UNROLL
    for (uint32_t i = lane; i < n; i += kLanes) dst[i] = src[i];
}

}  // namespace tracekern
