// The bundled kernels of the CPU backend as functions of their own, each with all it calls inlined, for
// test_zero_cost.py to compare.
#include "moe/p2p/combine.h"
#include "moe/p2p/dispatch.h"
#include "moe/p2p/pipelined.h"

using namespace tracekern;

using RecorderOff = Recorder<false>;
using RecorderWide = Recorder<true>;

#define TK_CPU_KERNELS(name, call)                                                                                    \
    extern "C" __attribute__((flatten)) void name##_off(Warp& warp, const P2PArgs& args, RecorderOff::Args trace) {   \
        call, RecorderOff > (warp, args, trace);                                                                      \
    }                                                                                                                 \
    extern "C" __attribute__((flatten)) void name##_wide(Warp& warp, const P2PArgs& args, RecorderWide::Args trace) { \
        call, RecorderWide > (warp, args, trace);                                                                     \
    }

// A comma inside a macro argument would end it.
#define TK_COMMA ,
#define TK_CPU_VARIANT(variant)                                                                  \
    TK_CPU_KERNELS(dispatch_send_##variant, dispatch_send < P2PVariant::variant)                 \
    TK_CPU_KERNELS(dispatch_recv_##variant, dispatch_recv < P2PVariant::variant)                 \
    TK_CPU_KERNELS(combine_send_##variant, combine_send < BFloat16 TK_COMMA P2PVariant::variant) \
    TK_CPU_KERNELS(combine_recv_##variant, combine_recv < BFloat16 TK_COMMA P2PVariant::variant)

TK_CPU_VARIANT(flag)
TK_CPU_VARIANT(token)
TK_CPU_VARIANT(fused)
TK_CPU_VARIANT(balanced)

#define TK_CPU_DEDUP(variant)                                          \
    TK_CPU_KERNELS(dispatch_##variant, dispatch < P2PVariant::variant) \
    TK_CPU_KERNELS(combine_##variant, combine < BFloat16 TK_COMMA P2PVariant::variant)

TK_CPU_DEDUP(dedup)
TK_CPU_DEDUP(reduce)
TK_CPU_KERNELS(dispatch_combine, dispatch_combine < BFloat16)
TK_CPU_KERNELS(scale_experts, scale_experts < BFloat16)
