// What a warp is on every GPU: a thread is a lane, and does what its warp is given.
#pragma once

#include <cstdint>

#include "platform/copy.h"

namespace tracekern {

template <class T>
struct PerLane {
    T value;

    TK_DEVICE T& operator[](int) { return value; }
    TK_DEVICE const T& operator[](int) const { return value; }
};

// Own: the backend's Warp, with sync(), shuffle(), sum() and what else differs.
template <class Own, int kLanes>
class GpuWarp {
public:
    const uint32_t block, num_blocks;
    const uint32_t warp, num_warps;  // of this block

    TK_DEVICE bool is_leader() const { return lane_ == 0; }

    template <class F>
    TK_DEVICE auto lanes(F f) {
        return PerLane<decltype(f(0))>{f(static_cast<int>(lane_))};
    }
    template <class F>
    TK_DEVICE void each_lane(F f) {
        f(static_cast<int>(lane_));
    }
    template <class F>
    TK_DEVICE void strided(uint32_t n, F f) {
        for (uint32_t i = lane_; i < n; i += kLanes) f(i);
    }
    template <class F>
    TK_DEVICE void strided_rolled(uint32_t n, F f) {
        TK_NO_UNROLL
        for (uint32_t i = lane_; i < n; i += kLanes) f(i);
    }
    template <class F>
    TK_DEVICE void block_strided(uint32_t n, F f) {
        for (uint32_t i = warp * kLanes + lane_; i < n; i += num_warps * kLanes) f(i);
    }
    template <class F>
    TK_DEVICE uint32_t sum_over(uint32_t n, F f) {
        uint32_t sum = 0;
        for (uint32_t i = lane_; i < n; i += kLanes) sum += f(i);
        return own().sum([&](int) { return sum; });
    }
    template <class F>
    TK_DEVICE auto once(F f) {
        decltype(f()) result{};
        own().sync();
        if (lane_ == 0) result = f();
        own().sync();
        return own().shuffle(PerLane<decltype(f())>{result}, 0);
    }
    template <class F>
    TK_DEVICE void leader(F f) {
        own().sync();
        if (lane_ == 0) f();
        own().sync();
    }
    template <class T, uint32_t kBatch = 8>
    TK_DEVICE void copy_vectors(void* dst, const void* src, uint32_t n) {
        if constexpr (sizeof(T) == 16) {
            copy_batched<T, kLanes, kBatch>(static_cast<T*>(dst), static_cast<const T*>(src), n, lane_);
        } else {
            copy_one_by_one<T, kLanes>(static_cast<T*>(dst), static_cast<const T*>(src), n, lane_);
        }
    }

protected:
    TK_DEVICE GpuWarp(uint32_t own_block, uint32_t blocks, uint32_t own_warp, uint32_t warps, uint32_t lane)
        : block(own_block), num_blocks(blocks), warp(own_warp), num_warps(warps), lane_(lane) {}

    const uint32_t lane_;

private:
    TK_DEVICE Own& own() { return static_cast<Own&>(*this); }
};

}  // namespace tracekern
