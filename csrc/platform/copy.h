// A warp's copy loop for GPUs: several loads under way before the first store. One at a time, a 14 KB row takes 28
// times the latency of memory.
#pragma once

#include <cstdint>

#include "platform/qualifiers.h"

namespace tracekern {

template <class T, uint32_t kLanes>
TK_DEVICE void copy_batched(T* dst, const T* src, uint32_t n, uint32_t lane) {
    constexpr uint32_t kBatch = 8;
    for (uint32_t i = lane; i < n; i += kBatch * kLanes) {
        T batch[kBatch];
        // Beyond the end the first one again: a branch would part the loads.
#pragma unroll
        for (uint32_t k = 0; k < kBatch; ++k) batch[k] = src[i + k * kLanes < n ? i + k * kLanes : i];
#pragma unroll
        for (uint32_t k = 0; k < kBatch; ++k) {
            if (i + k * kLanes < n) dst[i + k * kLanes] = batch[k];
        }
    }
}

}  // namespace tracekern
