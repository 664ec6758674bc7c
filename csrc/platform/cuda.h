// CUDA backend: a warp is a warp.
#pragma once

#include <cstdint>
#include <type_traits>

#include "platform/gpu_warp.h"
#include "platform/number.h"
#include "platform/predicated_stores.h"
#include "platform/sparse_multiply.h"
#include "platform/vectors.h"

namespace tracekern {

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint32_t kClockShift = 5;  // %globaltimer goes on by 32 ns

TK_DEVICE uint64_t read_clock() {
    uint64_t ticks;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ticks)::"memory");
    return ticks;
}
TK_DEVICE uint64_t read_cycles() {
    uint64_t cycles;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
    return cycles;
}

// A timer read waits for nothing it does not depend on: after a barrier or an acquire it would return the time of
// arrival (0-32 ns shown for 20,032 ns). The branch makes the read depend on `value`: never taken, a
// grid has blocks, but no compiler knows. It becomes a predicate on the read; a predicate written here does not,
// ptxas 13.0 reads first and selects afterwards.
#define TK_READ_AFTER(timer, result, value)                           \
    asm volatile(                                                     \
        "{\n\t.reg .pred %%p;\n\t.reg .b32 %%low, %%high, %%any;\n\t" \
        "mov.b64 {%%low, %%high}, %1;\n\t"                            \
        "mov.u32 %%any, %%nctaid.x;\n\t"                              \
        "or.b32 %%any, %%any, %%low;\n\t"                             \
        "or.b32 %%any, %%any, %%high;\n\t"                            \
        "setp.ne.u32 %%p, %%any, 0;\n\t"                              \
        "@!%%p bra UNREAD;\n\t"                                       \
        "mov.u64 %0, %%" timer                                        \
        ";\n\t"                                                       \
        "UNREAD:\n\t}"                                                \
        : "+l"(result)                                                \
        : "l"(value)                                                  \
        : "memory")
TK_DEVICE uint64_t read_clock_after(uint64_t value) {
    uint64_t ticks = 0;
    TK_READ_AFTER("globaltimer", ticks, value);
    return ticks;
}
TK_DEVICE uint64_t read_cycles_after(uint64_t value) {
    uint64_t cycles = 0;
    TK_READ_AFTER("clock64", cycles, value);
    return cycles;
}
#undef TK_READ_AFTER

TK_DEVICE uint32_t first_bit(uint32_t bits) {
    return static_cast<uint32_t>(__ffs(static_cast<int>(bits))) - 1;
}
TK_DEVICE uint32_t sm_id() {
    uint32_t id;
    asm("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}

TK_DEVICE uint64_t load_acquire_system(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}
TK_DEVICE uint32_t load_acquire_system(const uint32_t* word) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}
TK_DEVICE uint64_t load_relaxed_system(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}
TK_DEVICE uint32_t load_relaxed_system(const uint32_t* word) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}
TK_DEVICE void store_release_system(uint64_t* word, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
TK_DEVICE void store_release_system(uint32_t* word, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
TK_DEVICE void store_relaxed_system(uint64_t* word, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
TK_DEVICE void store_relaxed_system(uint32_t* word, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
TK_DEVICE uint64_t load_acquire_device(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}
TK_DEVICE void store_release_device(uint64_t* word, uint64_t value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

TK_DEVICE uint32_t shared_address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
TK_DEVICE uint64_t load_acquire_block(const uint64_t* shared_word) {
    uint64_t value;
    asm volatile("ld.acquire.cta.shared.u64 %0, [%1];" : "=l"(value) : "r"(shared_address(shared_word)) : "memory");
    return value;
}
TK_DEVICE uint64_t load_relaxed_block(const uint64_t* shared_word) {
    uint64_t value;
    asm volatile("ld.relaxed.cta.shared.u64 %0, [%1];" : "=l"(value) : "r"(shared_address(shared_word)) : "memory");
    return value;
}
TK_DEVICE void store_release_block(uint64_t* shared_word, uint64_t value) {
    asm volatile("st.release.cta.shared.u64 [%0], %1;" ::"r"(shared_address(shared_word)), "l"(value) : "memory");
}
TK_DEVICE void store_relaxed_block(uint64_t* shared_word, uint64_t value) {
    asm volatile("st.relaxed.cta.shared.u64 [%0], %1;" ::"r"(shared_address(shared_word)), "l"(value) : "memory");
}

// Rows pass through an SM once: kept out of its L1 cache they leave the room to what is read again. Not so stores: with
// L1::no_allocate they end in memory and not in the L2 cache, where the next kernel looks for them (a combine of few
// tokens took 39 us instead of 26, H100). Volatile, so that no load moves above the acquire in front of it. Rows that
// no 16 bytes divide take what the compiler makes of them.
template <class T>
TK_DEVICE T load_once(const T* place) {
    if constexpr (sizeof(T) == sizeof(Vector16)) {
        Vector16 value;
        asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(value.words[0]), "=r"(value.words[1]), "=r"(value.words[2]), "=r"(value.words[3])
                     : "l"(place));
        return bits_as<T>(value);
    } else {
        return *place;
    }
}
template <class T>
TK_DEVICE void store_once(T* place, const T& given) {
    if constexpr (sizeof(T) == sizeof(Vector16)) {
        const auto value = bits_as<Vector16>(given);
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(place),
                     "r"(value.words[0]),
                     "r"(value.words[1]),
                     "r"(value.words[2]),
                     "r"(value.words[3])
                     : "memory");
    } else {
        *place = given;
    }
}

TK_DEVICE uint32_t add_relaxed_device(uint32_t* word, uint32_t value) {
    uint32_t old;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(word), "r"(value) : "memory");
    return old;
}
TK_DEVICE uint64_t add_relaxed_device(uint64_t* word, uint64_t value) {
    uint64_t old;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(word), "l"(value) : "memory");
    return old;
}
TK_DEVICE uint32_t add_acq_rel_device(uint32_t* word, uint32_t value) {
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(word), "r"(value) : "memory");
    return old;
}
TK_DEVICE uint64_t add_acq_rel_device(uint64_t* word, uint64_t value) {
    uint64_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(word), "l"(value) : "memory");
    return old;
}
TK_DEVICE uint32_t exchange_relaxed_device(uint32_t* word, uint32_t value) {
    uint32_t old;
    asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(old) : "l"(word), "r"(value) : "memory");
    return old;
}
TK_DEVICE uint32_t add_relaxed_block(uint32_t* shared_word, uint32_t value) {
    return atomicAdd(shared_word, value);
}
TK_DEVICE bool claim_system(uint32_t* word) {
    uint32_t old;
    asm volatile("atom.acq_rel.sys.global.cas.b32 %0, [%1], 0, 1;" : "=r"(old) : "l"(word) : "memory");
    return old == 0;
}

TK_DEVICE float multiply_rn(float a, float b) {
    return __fmul_rn(a, b);
}
TK_DEVICE float add_rn(float a, float b) {
    return __fadd_rn(a, b);
}
TK_DEVICE float larger_number(float a, float b) {
    return fmaxf(a, b);
}
TK_DEVICE float divide_rn(float a, float b) {
    return __fdiv_rn(a, b);
}
TK_DEVICE float multiply_add_rn(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
}
TK_DEVICE float to_float(float x) {
    return x;
}
TK_DEVICE float to_float(Half x) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
    return result;
}
TK_DEVICE float to_float(BFloat16 x) {
    return bfloat16_to_float(x);
}
// Two by one instruction. The one that converts a single number runs on a slow unit of the core: never used.
template <class T>
TK_DEVICE uint32_t from_floats(float low, float high) {
    uint32_t word;
    if constexpr (std::is_same_v<T, Half>) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    }
    return word;
}
template <class T>
TK_DEVICE T from_float(float x) {
    if constexpr (std::is_same_v<T, float>) {
        return x;
    } else {
        return {static_cast<uint16_t>(from_floats<T>(x, 0.0f))};
    }
}

TK_DEVICE uint32_t fp8_from_floats(float low, float high) {
#if __CUDA_ARCH__ >= 890
    uint16_t both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
#else
    return float_to_fp8(low).bits | uint32_t{float_to_fp8(high).bits} << 8;
#endif
}

TK_DEVICE uint32_t count_bits(uint32_t bits) {
    return static_cast<uint32_t>(__popc(bits));
}

// A nibble in the low bits of the bf16 128 is 128 + nibble: one multiply-add, and no conversion, which runs on a slow
// unit. One instruction masks and sets the bits of 128; of two constants the compiler would make two.
TK_DEVICE uint32_t nibbles_minus_8(uint32_t nibbles) {
    constexpr uint32_t kNibbles = 0x000f000fu, k128 = 0x43004300u, kOne = 0x3f803f80u, kMinus136 = 0xc308c308u;
    uint32_t biased, numbers;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(biased) : "r"(nibbles), "r"(kNibbles), "r"(k128));  // a & b | c
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(numbers) : "r"(biased), "r"(kOne), "r"(kMinus136));
    return numbers;
}
// The same, each number alone. Of constants that ptxas knows it makes some anew wherever it wants them. A grid has one
// dimension, but ptxas does not know.
class NibbleSplitter {
public:
    TK_DEVICE NibbleSplitter() {
        uint32_t zero;
        asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(zero));
        nibbles_ = 0x000f000fu ^ zero;
        one_low_ = 0x00003f80u ^ zero;
        one_high_ = 0x3f800000u ^ zero;
    }
    TK_DEVICE SplitNibbles split(uint32_t nibbles) const {
        uint32_t biased;
        SplitNibbles numbers;
        asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(biased) : "r"(nibbles), "r"(nibbles_), "n"(0x43004300u));
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(numbers.low) : "r"(biased), "r"(one_low_), "r"(0x0000c308u));
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(numbers.high) : "r"(biased), "r"(one_high_), "r"(0xc3080000u));
        return numbers;
    }

private:
    uint32_t nibbles_, one_low_, one_high_;
};
TK_DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
    uint32_t bytes;
    // Not __byte_perm(), which first takes from the selector what the instruction would read as a sign.
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
    return bytes;
}

class Warp : public GpuWarp<Warp, kLanes> {
public:
    TK_DEVICE explicit Warp(LaunchSize)
        : GpuWarp(blockIdx.x, gridDim.x, threadIdx.x / kLanes, blockDim.x / kLanes, threadIdx.x % kLanes) {}
    TK_DEVICE Warp(uint32_t own_block, uint32_t blocks, uint32_t thread, uint32_t num_threads)
        : GpuWarp(own_block, blocks, thread / kLanes, (num_threads + kLanes - 1) / kLanes, thread % kLanes) {}

    template <class T>
    TK_DEVICE T shuffle(const PerLane<T>& x, int lane) {
        return __shfl_sync(kAllLanes, x.value, lane);
    }
    template <class F>
    TK_DEVICE uint32_t sum(F f) {
        return __reduce_add_sync(kAllLanes, f(static_cast<int>(lane_)));
    }
    template <uint32_t kWidth, class F>
    TK_DEVICE PerLane<uint32_t> max_within(F f) {
        uint32_t largest = f(static_cast<int>(lane_));
        TK_UNROLL
        for (uint32_t distance = kWidth / 2; distance; distance /= 2) {
            const uint32_t other = __shfl_xor_sync(kAllLanes, largest, distance);
            largest = other > largest ? other : largest;
        }
        return {largest};
    }
    template <class F>
    TK_DEVICE uint32_t ballot(F f) {
        return __ballot_sync(kAllLanes, f(static_cast<int>(lane_)));
    }
    // The compiler knows that it is one: copies want it, which would be a loop over lanes else.
    template <class F>
    TK_DEVICE void elect(F f) {
        __syncwarp();
#if __CUDA_ARCH__ >= 900
        uint32_t is_elected;
        asm volatile(
            "{\n\t.reg .pred %%elected;\n\t"
            "elect.sync _|%%elected, 0xffffffff;\n\t"
            "selp.u32 %0, 1, 0, %%elected;\n\t}"
            : "=r"(is_elected));
        if (is_elected) f();
#else
        if (lane_ == 0) f();
#endif
        __syncwarp();
    }
    template <class T, class F>
    TK_DEVICE PerLane<T> gather(const PerLane<T>& x, F source) {
        return {__shfl_sync(kAllLanes, x.value, source(static_cast<int>(lane_)))};
    }
    TK_DEVICE PerLane<DenseColumn> load_transposed(const void* rows) {
        const auto row = shared_address(rows) + lane_ * 16;
        DenseColumn column;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(column.words[0]), "=r"(column.words[1]), "=r"(column.words[2]), "=r"(column.words[3])
                     : "r"(row)
                     : "memory");
        return {column};
    }
    template <class F>
    TK_DEVICE PerLane<DenseColumn> load_columns(F place) {
        const uint32_t at = shared_address(place(static_cast<int>(lane_)));
        DenseColumn column;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(column.words[0]), "=r"(column.words[1]), "=r"(column.words[2]), "=r"(column.words[3])
                     : "r"(at)
                     : "memory");
        return {column};
    }
    TK_DEVICE PerLane<uint32_t> transpose(const PerLane<uint32_t>& rows) {
        uint32_t columns;
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows.value));
        return {columns};
    }

#define TK_MULTIPLY_SPARSE(instruction)                                                                      \
    const uint32_t(&a)[4] = rows.value.words;                                                                \
    const uint32_t(&b)[4] = column.value.words;                                                              \
    ProductTile product;                                                                                     \
    asm(instruction                                                                                          \
        ".sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 "                                                  \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%12, %12, %12, %12}, %13, %14;"            \
        : "=f"(product.values[0]), "=f"(product.values[1]), "=f"(product.values[2]), "=f"(product.values[3]) \
        : "r"(a[0]),                                                                                         \
          "r"(a[1]),                                                                                         \
          "r"(a[2]),                                                                                         \
          "r"(a[3]),                                                                                         \
          "r"(b[0]),                                                                                         \
          "r"(b[1]),                                                                                         \
          "r"(b[2]),                                                                                         \
          "r"(b[3]),                                                                                         \
          "f"(0.0f),                                                                                         \
          "r"(metadata.value),                                                                               \
          "n"(kSelector));                                                                                   \
    return { product }
    template <uint32_t kSelector>
    TK_DEVICE PerLane<ProductTile> multiply_sparse(const PerLane<SparseRows>& rows,
                                                   const PerLane<DenseColumn>& column,
                                                   const PerLane<uint32_t>& metadata) {
        TK_MULTIPLY_SPARSE("mma.sp::ordered_metadata");
    }
    template <uint32_t kSelector>
    TK_DEVICE PerLane<ProductTile> multiply_unordered(const PerLane<SparseRows>& rows,
                                                      const PerLane<DenseColumn>& column,
                                                      const PerLane<uint32_t>& metadata) {
        TK_MULTIPLY_SPARSE("mma.sp");
    }
#undef TK_MULTIPLY_SPARSE

    template <class T>
    TK_DEVICE T& shared() {
        extern __shared__ __align__(1024) unsigned char shared_bytes[];  // see copy_box() in platform/bulk.h
        return *reinterpret_cast<T*>(shared_bytes);
    }
    TK_DEVICE void sync() { __syncwarp(); }
    TK_DEVICE void block_sync() { __syncthreads(); }
    TK_DEVICE uint32_t block_sync_count() { return static_cast<uint32_t>(__syncthreads_count(1)); }
    TK_DEVICE void relax(uint32_t& spins) { ++spins; }
    // Stops all kernels of this process on the device for good; what this lane wrote before is in memory.
    TK_DEVICE void trap() const { asm volatile("fence.acq_rel.sys;\n\ttrap;" ::: "memory"); }
};

// Barrier 0 of the machine is the whole block's.
struct WarpGroup {
    const uint32_t id, num_warps;

    TK_DEVICE WarpGroup(uint32_t id, uint32_t num_warps) : id(id), num_warps(num_warps) {}
    TK_DEVICE WarpGroup(uint32_t id, uint32_t num_warps, const Warp&, uint32_t*) : WarpGroup(id, num_warps) {}
    TK_DEVICE void block_sync() const {
        asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_warps * kLanes) : "memory");
    }
    TK_DEVICE uint32_t block_sync_count() const {
        uint32_t count;
        asm volatile(
            "{\n\t.reg .pred %%arrived;\n\t"
            "setp.eq.u32 %%arrived, 0, 0;\n\t"
            "bar.red.popc.u32 %0, %1, %2, %%arrived;\n\t}"
            : "=r"(count)
            : "r"(id), "r"(num_warps * kLanes)
            : "memory");
        return count;
    }
};

// The warp that runs this, in a kernel that was given none. Blocks and threads of all three dimensions count, x first.
TK_DEVICE Warp current_warp() {
    return {blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z),
            gridDim.x * gridDim.y * gridDim.z,
            threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z),
            blockDim.x * blockDim.y * blockDim.z};
}

namespace api {
using tracekern::current_warp;  // see tracekern.h
}

}  // namespace tracekern
