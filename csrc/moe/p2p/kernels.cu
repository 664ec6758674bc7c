// The P2P kernels for GPUs: one entry point for each stage, variant, number type and kind of recorder. CUDA and HIP
// compile it.
#include "moe/p2p/combine.h"
#include "moe/p2p/dispatch.h"
#include "moe/p2p/pipelined.h"

using namespace tracekern;  // NOLINT: entry points have C names

using RecorderOff = Recorder<false>;
using RecorderWide = Recorder<true, RecordFormat::wide>;
using RecorderRing = Recorder<true, RecordFormat::ring>;

// With TK_SAMPLE one number type stands for all, and nothing for the ring: for tests that compile often.
#ifdef TK_SAMPLE
    #define TK_UNLESS_SAMPLE(...)
#else
    #define TK_UNLESS_SAMPLE(...) __VA_ARGS__
#endif

// The trace comes first: behind 800 bytes of arguments, in a line of constants that nothing else needs, it made tracing
// cost a sixth more of a small call (H200, 2026-11-22).
#define TK_P2P_BODY(name, Rec, ...)                                                  \
    TK_KERNEL_512 name(Rec::Args trace, const P2PArgs args, const LaunchSize size) { \
        Warp warp(size);                                                             \
        __VA_ARGS__, Rec > (warp, args, trace);                                      \
    }
#define TK_P2P_KERNEL(name, call)                \
    TK_P2P_BODY(name##_off, RecorderOff, call)   \
    TK_P2P_BODY(name##_wide, RecorderWide, call) \
    TK_UNLESS_SAMPLE(TK_P2P_BODY(name##_ring, RecorderRing, call))

// A comma inside a macro argument would end it.
#define TK_COMMA ,

#define TK_P2P_NUMBER(X, variant, suffix, T)                                                \
    X(p2p_combine_send_##variant##_##suffix, combine_send < T TK_COMMA P2PVariant::variant) \
    X(p2p_combine_recv_##variant##_##suffix, combine_recv < T TK_COMMA P2PVariant::variant)

#define TK_P2P_VARIANT(X, variant)                                      \
    X(p2p_dispatch_send_##variant, dispatch_send < P2PVariant::variant) \
    X(p2p_dispatch_recv_##variant, dispatch_recv < P2PVariant::variant) \
    TK_UNLESS_SAMPLE(TK_P2P_NUMBER(X, variant, fp32, float))            \
    TK_UNLESS_SAMPLE(TK_P2P_NUMBER(X, variant, fp16, Half))             \
    TK_P2P_NUMBER(X, variant, bf16, BFloat16)

#define TK_P2P_DEDUP(X, variant)                                                                    \
    X(p2p_dispatch_##variant, dispatch < P2PVariant::variant)                                       \
    TK_UNLESS_SAMPLE(X(p2p_combine_##variant##_fp32, combine < float TK_COMMA P2PVariant::variant)) \
    TK_UNLESS_SAMPLE(X(p2p_combine_##variant##_fp16, combine < Half TK_COMMA P2PVariant::variant))  \
    X(p2p_combine_##variant##_bf16, combine < BFloat16 TK_COMMA P2PVariant::variant)

#define TK_P2P_KERNELS(X)                                                              \
    TK_P2P_VARIANT(X, flag)                                                            \
    TK_P2P_VARIANT(X, token)                                                           \
    TK_P2P_VARIANT(X, fused)                                                           \
    TK_P2P_VARIANT(X, balanced)                                                        \
    TK_P2P_DEDUP(X, dedup)                                                             \
    TK_P2P_DEDUP(X, reduce)                                                            \
    TK_UNLESS_SAMPLE(X(p2p_dispatch_combine_pipelined_fp32, dispatch_combine < float)) \
    TK_UNLESS_SAMPLE(X(p2p_dispatch_combine_pipelined_fp16, dispatch_combine < Half))  \
    X(p2p_dispatch_combine_pipelined_bf16, dispatch_combine < BFloat16)                \
    TK_UNLESS_SAMPLE(X(p2p_scale_experts_fp32, scale_experts < float))                 \
    TK_UNLESS_SAMPLE(X(p2p_scale_experts_fp16, scale_experts < Half))                  \
    X(p2p_scale_experts_bf16, scale_experts < BFloat16)

TK_P2P_KERNELS(TK_P2P_KERNEL)

#ifdef TK_KERNEL_TABLE
    // For the host: entry points by name.
    #include "moe/p2p/kernel_table.hpp"

    #define TK_TABLE_ROW(name, call)                                     \
        {#name "_off", reinterpret_cast<const void*>(name##_off)},       \
            {#name "_wide", reinterpret_cast<const void*>(name##_wide)}, \
            TK_UNLESS_SAMPLE({#name "_ring", reinterpret_cast<const void*>(name##_ring)}, )

const std::unordered_map<std::string, const void*>& tracekern::p2p_kernels() {
    static const std::unordered_map<std::string, const void*> kernels = {TK_P2P_KERNELS(TK_TABLE_ROW)};
    return kernels;
}

    #ifdef TK_PLANTED_FAULTS
        #include "platform/gpu_host.hpp"

void tracekern::plant_in_p2p(PlantedFault fault) {
    set_variable(planted_fault, fault);
}
    #endif
#endif
