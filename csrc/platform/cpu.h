// CPU backend: a warp is one fiber or one thread, a lane is a turn of a loop. Proves order, coverage and results, never
// durations.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "platform/branching_stores.h"
#include "platform/number.h"
#include "platform/simulated_clock.h"
#include "platform/slow_link.h"
#include "platform/sparse_multiply.h"
#include "platform/vectors.h"

namespace tracekern {

constexpr int kLanes = 32;
constexpr uint32_t kClockShift = 5;  // as CUDA: SimulatedClock goes on by 32 ns

template <class T>
struct PerLane {
    std::array<T, kLanes> values;

    T& operator[](int lane) { return values[static_cast<size_t>(lane)]; }
    const T& operator[](int lane) const { return values[static_cast<size_t>(lane)]; }
};

// ---- clock: each rank reads its own; the executor points every thread that runs warps at it, the host's own without
// one ----

inline constexpr SimulatedClock kHostClock{};
inline thread_local const SimulatedClock* current_clock = &kHostClock;

inline uint64_t read_clock() {
    return current_clock->read();
}
inline uint64_t read_clock_after(uint64_t) {
    return read_clock();
}
inline uint64_t read_cycles() {
    return current_clock->read_cycles();
}
inline uint64_t read_cycles_after(uint64_t) {
    return read_cycles();
}
inline uint32_t first_bit(uint32_t bits) {
    return static_cast<uint32_t>(std::countr_zero(bits));
}
inline uint32_t count_bits(uint32_t bits) {
    return static_cast<uint32_t>(std::popcount(bits));
}
inline uint32_t sm_id() {
    return 0;
}

// ---- memory: all ranks share one coherent memory, so all scopes are the same ----

template <class T>
T load_acquire_system(const T* word) {
    return std::atomic_ref<T>(*const_cast<T*>(word)).load(std::memory_order_acquire);
}
template <class T>
T load_relaxed_system(const T* word) {
    return std::atomic_ref<T>(*const_cast<T*>(word)).load(std::memory_order_relaxed);
}
template <class T>
void store_release_system(T* word, T value) {
    std::atomic_ref<T>(*word).store(value, std::memory_order_release);
}
template <class T>
void store_relaxed_system(T* word, T value) {
    std::atomic_ref<T>(*word).store(value, std::memory_order_relaxed);
}
template <class T>
T load_acquire_device(const T* word) {
    return load_acquire_system(word);
}
template <class T>
void store_release_device(T* word, T value) {
    store_release_system(word, value);
}
template <class T>
T load_acquire_block(const T* shared_word) {
    return load_acquire_system(shared_word);
}
template <class T>
T load_relaxed_block(const T* shared_word) {
    return load_relaxed_system(shared_word);
}
template <class T>
void store_release_block(T* shared_word, T value) {
    store_release_system(shared_word, value);
}
template <class T>
void store_relaxed_block(T* shared_word, T value) {
    store_relaxed_system(shared_word, value);
}
template <class T>
T load_once(const T* place) {
    return *place;
}
template <class T>
void store_once(T* place, const T& value) {
    add_outgoing(place, sizeof(T));
    *place = value;
}
template <class T>
T add_relaxed_device(T* word, T value) {
    return std::atomic_ref<T>(*word).fetch_add(value, std::memory_order_relaxed);
}
inline void count_if(bool enabled, uint32_t* word) {
    if (enabled) add_relaxed_device(word, 1u);
}
template <class T>
T add_acq_rel_device(T* word, T value) {
    return std::atomic_ref<T>(*word).fetch_add(value, std::memory_order_acq_rel);
}
inline uint32_t exchange_relaxed_device(uint32_t* word, uint32_t value) {
    return std::atomic_ref<uint32_t>(*word).exchange(value, std::memory_order_relaxed);
}
template <class T>
T add_relaxed_block(T* shared_word, T value) {
    return add_relaxed_device(shared_word, value);
}
inline bool claim_system(uint32_t* word) {
    uint32_t expected = 0;
    return std::atomic_ref<uint32_t>(*word).compare_exchange_strong(expected, 1, std::memory_order_acq_rel);
}

// ---- numbers: built with -ffp-contract=off ----

inline float multiply_rn(float a, float b) {
    return a * b;
}
inline float add_rn(float a, float b) {
    return a + b;
}
inline float larger_number(float a, float b) {
    return a != a || b > a ? b : a;
}
inline float divide_rn(float a, float b) {
    return a / b;
}
inline float multiply_add_rn(float a, float b, float c) {
    return std::fma(a, b, c);
}
inline float to_float(float x) {
    return x;
}
inline float to_float(Half x) {
    return half_to_float(x);
}
inline float to_float(BFloat16 x) {
    return bfloat16_to_float(x);
}
template <class T>
T from_float(float x) {
    if constexpr (std::is_same_v<T, float>) {
        return x;
    } else if constexpr (std::is_same_v<T, Half>) {
        return float_to_half(x);
    } else {
        return float_to_bfloat16(x);
    }
}
template <class T>
uint32_t from_floats(float low, float high) {
    return from_float<T>(low).bits | uint32_t{from_float<T>(high).bits} << 16;
}

inline uint32_t fp8_from_floats(float low, float high) {
    return float_to_fp8(low).bits | uint32_t{float_to_fp8(high).bits} << 8;
}

inline uint32_t nibbles_minus_8(uint32_t nibbles) {
    return signed_nibbles_to_bfloat16(nibbles);
}
class NibbleSplitter {
public:
    SplitNibbles split(uint32_t nibbles) const {
        const uint32_t both = signed_nibbles_to_bfloat16(nibbles);
        return {both & 0xffffu, both & 0xffff0000u};
    }
};
inline uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
    return select_bytes(low, high, selector);
}

// What a block gives its warps; platform/cpu_executor.hpp implements it twice.
class BlockContext {
public:
    virtual void sync() = 0;
    // Lets others run. `spins` counts the calls since the wait began; the caller starts it at 0.
    virtual void relax(uint32_t& spins) = 0;
    // Stops all warps of the launch at once; never returns.
    virtual void trap() = 0;
    void* shared = nullptr;

protected:
    ~BlockContext() = default;
};

class Warp {
public:
    Warp(BlockContext& context, uint32_t block, uint32_t num_blocks, uint32_t warp, uint32_t num_warps)
        : block(block), num_blocks(num_blocks), warp(warp), num_warps(num_warps), context_(context) {}

    const uint32_t block, num_blocks;
    const uint32_t warp, num_warps;  // of this block

    bool is_leader() const { return true; }

    // f(lane) on every lane: with a result of each, or without one.
    template <class F>
    auto lanes(F f) {
        PerLane<decltype(f(0))> result;
        for (int lane = 0; lane < kLanes; ++lane) result.values[lane] = f(lane);
        return result;
    }
    template <class F>
    void each_lane(F f) {
        for (int lane = 0; lane < kLanes; ++lane) f(lane);
    }
    template <class T>
    T shuffle(const PerLane<T>& x, int lane) {
        return x.values[lane];
    }
    // f(i) for every i below n, lanes side by side.
    template <class F>
    void strided(uint32_t n, F f) {
        for (uint32_t i = 0; i < n; ++i) f(i);
    }
    // The same where f is long: its code is not repeated to have several under way.
    template <class F>
    void strided_rolled(uint32_t n, F f) {
        strided(n, f);
    }
    // strided() with all warps of the block side by side; each warp gets its share.
    template <class F>
    void block_strided(uint32_t n, F f) {
        for (uint32_t first = warp * kLanes; first < n; first += num_warps * kLanes) {
            for (uint32_t i = first; i < n && i < first + kLanes; ++i) f(i);
        }
    }
    // f(i) summed over all i below n.
    template <class F>
    uint32_t sum_over(uint32_t n, F f) {
        uint32_t total = 0;
        for (uint32_t i = 0; i < n; ++i) total += f(i);
        return total;
    }
    // f(lane) summed over all lanes.
    template <class F>
    uint32_t sum(F f) {
        uint32_t total = 0;
        for (int lane = 0; lane < kLanes; ++lane) total += f(lane);
        return total;
    }
    // The largest f(lane) among the lanes of each group of kWidth neighbours, for all of them.
    template <uint32_t kWidth, class F>
    PerLane<uint32_t> max_within(F f) {
        const PerLane<uint32_t> own = lanes(f);
        return lanes([&](int lane) {
            const auto first = own.values.begin() + lane / kWidth * kWidth;
            return *std::max_element(first, first + kWidth);
        });
    }
    // Bit i: f(i) of lane i, of the first 32.
    template <class F>
    uint32_t ballot(F f) {
        uint32_t bits = 0;
        for (int lane = 0; lane < kLanes; ++lane) bits |= uint32_t{f(lane)} << lane;
        return bits;
    }
    // One lane calls f; all lanes get its result. Orders the other lanes' memory accesses before and after it.
    template <class F>
    auto once(F f) {
        sync();
        return f();
    }
    // The same without a result.
    template <class F>
    void leader(F f) {
        sync();
        f();
    }
    // kBatch: on GPUs, vectors of a lane that are loaded side by side.
    template <class F>
    void elect(F f) {
        leader(f);
    }
    template <class T, uint32_t kBatch = 8>
    void copy_vectors(void* dst, const void* src, uint32_t n) {
        add_outgoing(dst, size_t{n} * sizeof(T));
        std::memcpy(dst, src, size_t{n} * sizeof(T));
    }
    template <class T, class F>
    PerLane<T> gather(const PerLane<T>& x, F source) {
        return lanes([&](int lane) { return x[source(lane)]; });
    }
    PerLane<DenseColumn> load_transposed(const void* rows) {
        return lanes([&](int lane) {
            DenseColumn column;
            for (uint32_t word = 0; word < 4; ++word) {
                const uint32_t row = 8 * word + 2 * lane_in_group(lane);
                const auto* numbers = static_cast<const BFloat16*>(rows) + row * 8 + lane_group(lane);
                column.words[word] = numbers[0].bits | uint32_t{numbers[8].bits} << 16;
            }
            return column;
        });
    }
    template <uint32_t kSelector>
    PerLane<ProductTile> multiply_sparse(const PerLane<SparseRows>& rows,
                                         const PerLane<DenseColumn>& column,
                                         const PerLane<uint32_t>& metadata) {
        return lanes([&](int lane) {
            return sparse_product_of_lane<kSelector>(
                lane,
                [&](uint32_t from, uint32_t word) { return rows.values[from].words[word]; },
                [&](uint32_t from, uint32_t word) { return column.values[from].words[word]; },
                [&](uint32_t from) { return metadata.values[from]; });
        });
    }
    template <uint32_t kSelector>
    PerLane<ProductTile> multiply_unordered(const PerLane<SparseRows>& rows,
                                            const PerLane<DenseColumn>& column,
                                            const PerLane<uint32_t>& metadata) {
        return multiply_sparse<kSelector>(rows, column, metadata);
    }
    template <class F>
    PerLane<DenseColumn> load_columns(F place) {
        return lanes([&](int lane) { return column_of_lane(lane, place); });
    }
    PerLane<uint32_t> transpose(const PerLane<uint32_t>& rows) {
        return lanes(
            [&](int lane) { return transposed_of_lane(lane, [&](uint32_t from) { return rows.values[from]; }); });
    }
    template <class T>
    T& shared() {
        return *static_cast<T*>(context_.shared);
    }
    // Lanes are turns of one thread: nothing to order, but what is stored beyond a slow link has to leave first.
    void sync() {
        uint32_t spins = 0;
        drain_outgoing([&] { context_.relax(spins); });
    }
    void block_sync() {
        sync();
        context_.sync();
    }
    // The same with a result, the threads that have arrived, for a clock read to depend on.
    uint32_t block_sync_count() {
        block_sync();
        return num_warps * kLanes;
    }
    void relax(uint32_t& spins) {
        sync();
        context_.relax(spins);
    }
    void trap() const { context_.trap(); }

private:
    BlockContext& context_;
};

struct WarpGroup {
    const uint32_t id, num_warps;

    WarpGroup(uint32_t id, uint32_t num_warps, Warp& warp, uint32_t* arrivals)
        : id(id), num_warps(num_warps), warp_(warp), count_(arrivals[id - 1]) {}
    void block_sync() const {
        warp_.sync();
        const uint32_t ticket = count_.fetch_add(1, std::memory_order_acq_rel);
        const uint32_t goal = (ticket / num_warps + 1) * num_warps;
        for (uint32_t spins = 0; count_.load(std::memory_order_acquire) < goal;) warp_.relax(spins);
    }
    uint32_t block_sync_count() const {
        block_sync();
        return num_warps * kLanes;
    }

private:
    Warp& warp_;
    const std::atomic_ref<uint32_t> count_;
};

}  // namespace tracekern
