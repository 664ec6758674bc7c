// A warp's copy loop for GPUs: several loads under way before the first store. One at a time, a 14 KB row takes 28
// times the latency of memory.
#pragma once

#include <cstdint>

#include "platform/qualifiers.h"

namespace tracekern {

template <class T, uint32_t kLanes>
TK_DEVICE void copy_batched(T* dst, const T* src, uint32_t n, uint32_t lane) {
    constexpr uint32_t kBatch = 8;
    uint32_t i = lane;
    for (; i + (kBatch - 1) * kLanes < n; i += kBatch * kLanes) {
        T batch[kBatch];
#pragma unroll
        for (uint32_t k = 0; k < kBatch; ++k) batch[k] = src[i + k * kLanes];
#pragma unroll
        for (uint32_t k = 0; k < kBatch; ++k) dst[i + k * kLanes] = batch[k];
    }
    for (; i < n; i += kLanes) dst[i] = src[i];
}

}  // namespace tracekern
