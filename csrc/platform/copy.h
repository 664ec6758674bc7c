// A warp's copy loop for GPUs, a batch of loads at a time: one by one, a 14 KB row takes 28 times the latency of
// memory. Two batches that take turns would gain nothing: the compiler waits for both of them at once.
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
    src += lane;
    dst += lane;
    T batch[kBatch];
    TK_NO_UNROLL
    for (; n >= kStep; n -= kStep, src += kStep, dst += kStep) {
        TK_UNROLL
        for (uint32_t k = 0; k < kBatch; ++k) batch[k] = load_once(src + k * kLanes);
        TK_UNROLL
        for (uint32_t k = 0; k < kBatch; ++k) store_once(dst + k * kLanes, batch[k]);
    }
    // What is left, half a batch at a time.
    TK_NO_UNROLL
    for (uint32_t i = 0; i < n; i += kStep / 2, src += kStep / 2, dst += kStep / 2) {
        TK_UNROLL
        for (uint32_t k = 0; k < kBatch / 2; ++k) {
            if (i + k * kLanes + lane < n) batch[k] = load_once(src + k * kLanes);
        }
        TK_UNROLL
        for (uint32_t k = 0; k < kBatch / 2; ++k) {
            if (i + k * kLanes + lane < n) store_once(dst + k * kLanes, batch[k]);
        }
    }
}

// One by one: for rows that 16 bytes do not divide.
template <class T, uint32_t kLanes>
TK_DEVICE void copy_one_by_one(T* dst, const T* src, uint32_t n, uint32_t lane) {
    TK_NO_UNROLL
    for (uint32_t i = lane; i < n; i += kLanes) dst[i] = src[i];
}

}  // namespace tracekern
