// Function qualifiers of the three backends. TK_DEVICE is compiled into its callers, TK_DEVICE_CALL is a function of
// its own; TK_KERNEL is an entry point with a C name, TK_ENTRY one that may be a template, for blocks of at most so
// many threads, of which an SM is to hold so many at once; TK_ARGUMENT goes before the type of an entry point's
// argument that it hands on by reference; TK_VARIABLE is a variable of the device code, on GPUs one a source file.
#pragma once

#if defined(__HIP__)
    // Builtins only: no ROCm header or device library is needed to compile.
    #define TK_DEVICE      __attribute__((device)) inline __attribute__((always_inline))
    #define TK_DEVICE_CALL TK_DEVICE  // what a call costs there was not measured
    #define TK_HOST_DEVICE __attribute__((host)) __attribute__((device)) inline
    #define TK_KERNEL      extern "C" __attribute__((global)) void
    #define TK_ENTRY(max_threads, min_blocks) \
        __attribute__((global)) void __attribute__((amdgpu_flat_work_group_size(1, max_threads)))
    #define TK_ARGUMENT const
    #define TK_VARIABLE static __attribute__((device))
    #define TK_GPU      1
#elif defined(__CUDACC__)
    #define TK_DEVICE                         __device__ __forceinline__
    #define TK_DEVICE_CALL                    inline __device__ __noinline__
    #define TK_HOST_DEVICE                    __host__ __device__ inline
    #define TK_KERNEL                         extern "C" __global__ void
    // One block an SM: with 512 threads up to 128 registers each. Without the 1, ptxas 13.0 takes fewer, for more
    // blocks, and spills.
    #define TK_ENTRY(max_threads, min_blocks) __global__ void __launch_bounds__(max_threads, min_blocks)
    // Without it a function of its own that takes the reference makes each thread copy the argument to its stack.
    #define TK_ARGUMENT                       const __grid_constant__
    #define TK_VARIABLE                       static __device__
    #define TK_GPU                            1
#else
    #define TK_DEVICE      inline
    #define TK_DEVICE_CALL inline
    #define TK_HOST_DEVICE inline
    #define TK_VARIABLE    inline
    #define TK_GPU         0
#endif

#if TK_GPU
    // Arrays that live in registers need indices known at compile time.
    #define TK_UNROLL    _Pragma("unroll")
    #define TK_NO_UNROLL _Pragma("unroll 1")
#else
    #define TK_UNROLL
    #define TK_NO_UNROLL
#endif

#include <cstdint>

namespace tracekern {

// The size of a launch, in the argument list of every GPU kernel: not every backend lets a kernel ask for it.
struct LaunchSize {
    uint32_t num_blocks;
    uint32_t warps_per_block;
};

}  // namespace tracekern
