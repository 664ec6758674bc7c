// HIP backend (gfx90a, gfx942): a warp is a wavefront of 64 lanes. Builtins only; compile-checked, not run on AMD
// hardware yet.
//
// What allocates the heap on an AMD GPU has to ask for fine-grained memory, hipExtMallocWithFlags(&data, bytes,
// hipDeviceMallocFinegrained), shared by hipIpcGetMemHandle: of other memory AMD promises coherence at the end of a
// kernel only, but flags and rows of peers are read and written while kernels run.
#pragma once

#include <cstdint>
#include <type_traits>

#include "platform/branching_stores.h"
#include "platform/gpu_warp.h"
#include "platform/number.h"
#include "platform/sparse_multiply.h"

namespace tracekern {

constexpr int kLanes = 64;
constexpr uint32_t kClockShift = 0;  // s_memrealtime goes on by 10 ns

// A vector of the compiler's own: an array of structs would be copied through scratch memory.
using Vector16 = uint32_t __attribute__((ext_vector_type(4)));
using Vector8 = uint32_t __attribute__((ext_vector_type(2)));

// s_memrealtime is a scalar load: its result is there only after lgkmcnt(0).
TK_DEVICE uint64_t read_clock() {
    uint64_t ticks;
    asm volatile("s_memrealtime %0\n\ts_waitcnt lgkmcnt(0)" : "=s"(ticks)::"memory");
    return ticks;
}
// The value has to be in a scalar register before the read can be issued.
TK_DEVICE uint64_t read_clock_after(uint64_t value) {
    const int low = __builtin_amdgcn_readfirstlane(static_cast<int>(value));
    uint64_t ticks;
    asm volatile("s_memrealtime %0\n\ts_waitcnt lgkmcnt(0)" : "=s"(ticks) : "s"(low) : "memory");
    return ticks;
}
// s_memtime counts cycles of the core clock.
TK_DEVICE uint64_t read_cycles() {
    uint64_t cycles;
    asm volatile("s_memtime %0\n\ts_waitcnt lgkmcnt(0)" : "=s"(cycles)::"memory");
    return cycles;
}
TK_DEVICE uint64_t read_cycles_after(uint64_t value) {
    const int low = __builtin_amdgcn_readfirstlane(static_cast<int>(value));
    uint64_t cycles;
    asm volatile("s_memtime %0\n\ts_waitcnt lgkmcnt(0)" : "=s"(cycles) : "s"(low) : "memory");
    return cycles;
}
TK_DEVICE uint32_t first_bit(uint32_t bits) {
    return static_cast<uint32_t>(__builtin_ctz(bits));
}
TK_DEVICE uint32_t count_bits(uint32_t bits) {
    return static_cast<uint32_t>(__builtin_popcount(bits));
}
TK_DEVICE uint32_t sm_id() {
    // Hardware register HW_ID (4), bits 8..14: compute unit, shader array and engine of gfx9.
    return __builtin_amdgcn_s_getreg(4 | 8 << 6 | (7 - 1) << 11);
}

template <class T>
TK_DEVICE T load_acquire_system(const T* word) {
    return __hip_atomic_load(word, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
template <class T>
TK_DEVICE T load_relaxed_system(const T* word) {
    return __hip_atomic_load(word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
template <class T>
TK_DEVICE void store_relaxed_system(T* word, T value) {
    __hip_atomic_store(word, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
TK_DEVICE void fence_release_system() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");  // system scope
    // The fence writes the caches back. clang 19 waits for that only where the same kernel has stores of its own under
    // way, but what it writes back may be another block's or kernel's.
    asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
}
template <class T>
TK_DEVICE void store_release_system(T* word, T value) {
    fence_release_system();
    store_relaxed_system(word, value);
}
template <class T>
TK_DEVICE T load_acquire_device(const T* word) {
    return __hip_atomic_load(word, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T>
TK_DEVICE void store_release_device(T* word, T value) {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
    asm volatile("s_waitcnt vmcnt(0)" ::: "memory");  // as above
    __hip_atomic_store(word, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T>
TK_DEVICE T load_acquire_block(const T* shared_word) {
    return __hip_atomic_load(shared_word, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_WORKGROUP);
}
template <class T>
TK_DEVICE T load_relaxed_block(const T* shared_word) {
    return __hip_atomic_load(shared_word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
template <class T>
TK_DEVICE void store_release_block(T* shared_word, T value) {
    __hip_atomic_store(shared_word, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_WORKGROUP);
}
template <class T>
TK_DEVICE void store_relaxed_block(T* shared_word, T value) {
    __hip_atomic_store(shared_word, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
template <class T>
TK_DEVICE T load_once(const T* place) {
    return *place;
}
template <class T>
TK_DEVICE void store_once(T* place, const T& value) {
    *place = value;
}
template <class T>
TK_DEVICE T add_relaxed_device(T* word, T value) {
    return __hip_atomic_fetch_add(word, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
TK_DEVICE void count_if(bool enabled, uint32_t* word) {
    if (enabled) add_relaxed_device(word, 1u);
}
template <class T>
TK_DEVICE T add_acq_rel_device(T* word, T value) {
    return __hip_atomic_fetch_add(word, value, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}
TK_DEVICE uint32_t exchange_relaxed_device(uint32_t* word, uint32_t value) {
    return __hip_atomic_exchange(word, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T>
TK_DEVICE T add_relaxed_block(T* shared_word, T value) {
    return __hip_atomic_fetch_add(shared_word, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
TK_DEVICE bool claim_system(uint32_t* word) {
    uint32_t expected = 0;
    return __hip_atomic_compare_exchange_strong(
        word, &expected, 1u, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}

#pragma clang fp contract(off)
TK_DEVICE float multiply_rn(float a, float b) {
    return a * b;
}
TK_DEVICE float add_rn(float a, float b) {
    return a + b;
}
TK_DEVICE float larger_number(float a, float b) {
    return __builtin_fmaxf(a, b);
}
TK_DEVICE float divide_rn(float a, float b) {
    return a / b;
}
TK_DEVICE float multiply_add_rn(float a, float b, float c) {
    return __builtin_fmaf(a, b, c);
}
TK_DEVICE float to_float(float x) {
    return x;
}
TK_DEVICE float to_float(Half x) {
    return static_cast<float>(bits_as<_Float16>(x));
}
TK_DEVICE float to_float(BFloat16 x) {
    return bfloat16_to_float(x);
}
template <class T>
TK_DEVICE T from_float(float x) {
    if constexpr (std::is_same_v<T, float>) {
        return x;
    } else if constexpr (std::is_same_v<T, Half>) {
        return bits_as<Half>(static_cast<_Float16>(x));
    } else {
        return float_to_bfloat16(x);
    }
}
template <class T>
TK_DEVICE uint32_t from_floats(float low, float high) {
    return from_float<T>(low).bits | uint32_t{from_float<T>(high).bits} << 16;
}

// gfx942 converts to a format of its own, with another largest number.
TK_DEVICE uint32_t fp8_from_floats(float low, float high) {
    return float_to_fp8(low).bits | uint32_t{float_to_fp8(high).bits} << 8;
}

TK_DEVICE uint32_t nibbles_minus_8(uint32_t nibbles) {
    return signed_nibbles_to_bfloat16(nibbles);
}
class NibbleSplitter {
public:
    TK_DEVICE SplitNibbles split(uint32_t nibbles) const {
        const uint32_t both = signed_nibbles_to_bfloat16(nibbles);
        return {both & 0xffffu, both & 0xffff0000u};
    }
};
TK_DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
    return select_bytes(low, high, selector);
}

class Warp : public GpuWarp<Warp, kLanes> {
public:
    TK_DEVICE explicit Warp(LaunchSize size)
        : GpuWarp(__builtin_amdgcn_workgroup_id_x(),
                  size.num_blocks,
                  __builtin_amdgcn_workitem_id_x() / kLanes,
                  size.warps_per_block,
                  __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u))) {}

    template <class T>
    TK_DEVICE T shuffle(const PerLane<T>& x, int lane) {
        return broadcast(x.value, lane);
    }
    template <class F>
    TK_DEVICE uint32_t sum(F f) {
        uint32_t total = f(static_cast<int>(lane_));
        for (uint32_t distance = kLanes / 2; distance; distance /= 2) {
            total += __builtin_amdgcn_ds_bpermute(static_cast<int>((lane_ ^ distance) * 4), static_cast<int>(total));
        }
        return total;
    }
    template <uint32_t kWidth, class F>
    TK_DEVICE PerLane<uint32_t> max_within(F f) {
        uint32_t largest = f(static_cast<int>(lane_));
        for (uint32_t distance = kWidth / 2; distance; distance /= 2) {
            const auto other = static_cast<uint32_t>(
                __builtin_amdgcn_ds_bpermute(static_cast<int>((lane_ ^ distance) * 4), static_cast<int>(largest)));
            largest = other > largest ? other : largest;
        }
        return {largest};
    }
    template <class F>
    TK_DEVICE uint32_t ballot(F f) {
        return static_cast<uint32_t>(__builtin_amdgcn_ballot_w64(f(static_cast<int>(lane_))));
    }
    template <class F>
    TK_DEVICE void elect(F f) {
        leader(f);
    }
    template <class T, class F>
    TK_DEVICE PerLane<T> gather(const PerLane<T>& x, F source) {
        return {broadcast(x.value, source(static_cast<int>(lane_)))};
    }
    TK_DEVICE PerLane<DenseColumn> load_transposed(const void* rows) {
        const auto lane = static_cast<int>(lane_);
        DenseColumn column;
        TK_UNROLL
        for (uint32_t word = 0; word < 4; ++word) {
            const uint32_t row = 8 * word + 2 * lane_in_group(lane);
            const auto* numbers = static_cast<const BFloat16*>(rows) + row * 8 + lane_group(lane);
            column.words[word] = numbers[0].bits | uint32_t{numbers[8].bits} << 16;
        }
        return {column};
    }
    // Asks each lane for what it holds: the sparse instructions of gfx942 lay their operands out otherwise.
    template <uint32_t kSelector>
    TK_DEVICE PerLane<ProductTile> multiply_sparse(const PerLane<SparseRows>& rows,
                                                   const PerLane<DenseColumn>& column,
                                                   const PerLane<uint32_t>& metadata) {
        const auto lane = static_cast<int>(lane_);
        return {sparse_product_of_lane<kSelector>(
            lane,
            [&](uint32_t from, uint32_t word) { return broadcast(rows.value.words[word], static_cast<int>(from)); },
            [&](uint32_t from, uint32_t word) { return broadcast(column.value.words[word], static_cast<int>(from)); },
            [&](uint32_t from) { return broadcast(metadata.value, static_cast<int>(from)); })};
    }
    template <uint32_t kSelector>
    TK_DEVICE PerLane<ProductTile> multiply_unordered(const PerLane<SparseRows>& rows,
                                                      const PerLane<DenseColumn>& column,
                                                      const PerLane<uint32_t>& metadata) {
        return multiply_sparse<kSelector>(rows, column, metadata);
    }
    template <class F>
    TK_DEVICE PerLane<DenseColumn> load_columns(F place) {
        return {column_of_lane(static_cast<int>(lane_), place)};
    }
    TK_DEVICE PerLane<uint32_t> transpose(const PerLane<uint32_t>& rows) {
        const auto of_lane = [&](uint32_t from) { return broadcast(rows.value, static_cast<int>(from)); };
        return {transposed_of_lane(static_cast<int>(lane_), of_lane)};
    }
    template <class T>
    TK_DEVICE T& shared() {
        extern __attribute__((shared)) uint64_t shared_words[];
        return *reinterpret_cast<T*>(shared_words);
    }
    TK_DEVICE void sync() {
        __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
        __builtin_amdgcn_wave_barrier();
    }
    TK_DEVICE void block_sync() {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
        __builtin_amdgcn_s_barrier();
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    }
    // s_barrier holds the wave, so that nothing has to depend on the count.
    TK_DEVICE uint32_t block_sync_count() {
        block_sync();
        return num_warps * kLanes;
    }
    TK_DEVICE void relax(uint32_t& spins) {
        ++spins;
        __builtin_amdgcn_s_sleep(1);
    }
    // Stops all kernels of this process on the device for good; what this wave wrote before is in memory.
    TK_DEVICE void trap() const {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
        asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
        __builtin_trap();
    }

private:
    template <class T>
    TK_DEVICE T broadcast(T value, int lane) {
        if constexpr (sizeof(T) == 8) {
            const uint64_t bits = bits_as<uint64_t>(value);
            const uint64_t low = broadcast(static_cast<uint32_t>(bits), lane);
            const uint64_t high = broadcast(static_cast<uint32_t>(bits >> 32), lane);
            return bits_as<T>(high << 32 | low);
        } else {
            static_assert(sizeof(T) <= 4);
            return static_cast<T>(__builtin_amdgcn_ds_bpermute(lane * 4, static_cast<int>(value)));
        }
    }
};

struct WarpGroup {
    const uint32_t id, num_warps;

    TK_DEVICE WarpGroup(uint32_t id, uint32_t num_warps, Warp& warp, uint32_t* arrivals)
        : id(id), num_warps(num_warps), warp_(warp), count_(arrivals + (id - 1)) {}
    TK_DEVICE void block_sync() const {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
        const uint32_t ticket = warp_.once([&] { return add_relaxed_block(count_, 1u); });
        const uint32_t goal = (ticket / num_warps + 1) * num_warps;
        while (__hip_atomic_load(count_, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP) < goal) {
            __builtin_amdgcn_s_sleep(1);
        }
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    }
    TK_DEVICE uint32_t block_sync_count() const {
        block_sync();
        return num_warps * kLanes;
    }

private:
    Warp& warp_;
    uint32_t* const count_;
};

}  // namespace tracekern
