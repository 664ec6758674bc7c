// The P2P kernels for GPUs: one entry point for each stage, variant, number type and kind of recorder. CUDA and HIP
// compile it.
#include "moe/p2p/combine.h"
#include "moe/p2p/dispatch.h"

using namespace tracekern;  // NOLINT: entry points have C names

using RecorderOff = Recorder<false>;
using RecorderWide = Recorder<true, RecordFormat::wide>;
using RecorderCompact = Recorder<true, RecordFormat::compact>;

#define TK_P2P_KERNEL(name, call)                                                                      \
    TK_KERNEL name##_off(const P2PArgs args, const LaunchSize size, RecorderOff::Args trace) {         \
        Warp warp(size);                                                                               \
        call, RecorderOff > (warp, args, trace);                                                       \
    }                                                                                                  \
    TK_KERNEL name##_wide(const P2PArgs args, const LaunchSize size, RecorderWide::Args trace) {       \
        Warp warp(size);                                                                               \
        call, RecorderWide > (warp, args, trace);                                                      \
    }                                                                                                  \
    TK_KERNEL name##_compact(const P2PArgs args, const LaunchSize size, RecorderCompact::Args trace) { \
        Warp warp(size);                                                                               \
        call, RecorderCompact > (warp, args, trace);                                                   \
    }

// A comma inside a macro argument would end it.
#define TK_COMMA ,

#define TK_P2P_NUMBER(variant, suffix, T)                                                               \
    TK_P2P_KERNEL(p2p_combine_send_##variant##_##suffix, combine_send < T TK_COMMA P2PVariant::variant) \
    TK_P2P_KERNEL(p2p_combine_recv_##variant##_##suffix, combine_recv < T TK_COMMA P2PVariant::variant)

#define TK_P2P_VARIANT(variant)                                                     \
    TK_P2P_KERNEL(p2p_dispatch_send_##variant, dispatch_send < P2PVariant::variant) \
    TK_P2P_KERNEL(p2p_dispatch_recv_##variant, dispatch_recv < P2PVariant::variant) \
    TK_P2P_NUMBER(variant, fp32, float)                                             \
    TK_P2P_NUMBER(variant, fp16, Half)                                              \
    TK_P2P_NUMBER(variant, bf16, BFloat16)

TK_P2P_VARIANT(flag)
TK_P2P_VARIANT(token)
TK_P2P_VARIANT(fused)
TK_P2P_VARIANT(balanced)
TK_P2P_KERNEL(p2p_scale_experts_fp32, scale_experts < float)
TK_P2P_KERNEL(p2p_scale_experts_fp16, scale_experts < Half)
TK_P2P_KERNEL(p2p_scale_experts_bf16, scale_experts < BFloat16)
