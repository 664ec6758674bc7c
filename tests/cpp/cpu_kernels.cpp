// Bundled kernels of the CPU backend as functions of their own, each with all it calls inlined, for test_zero_cost.py
// to compare. -DTK_ONE_NUMBER leaves out variants whose files and macros others reach, -DTK_UNTRACED the traced
// functions.
#include "moe/p2p/kernels.h"

using namespace tracekern;

#define TK_CPU_KERNEL(name, suffix, Rec, ...)                                                                    \
    extern "C" __attribute__((flatten)) void name##_##suffix(Warp& warp, const P2PArgs& args, Rec::Args trace) { \
        __VA_ARGS__::run<Rec>(warp, args, trace);                                                                \
    }
#ifdef TK_UNTRACED
    #define TK_CPU_KERNELS(name, ...) TK_CPU_KERNEL(name, off, Recorder<false>, __VA_ARGS__)
#else
    #define TK_CPU_KERNELS(name, ...)                          \
        TK_CPU_KERNEL(name, off, Recorder<false>, __VA_ARGS__) \
        TK_CPU_KERNEL(name, span, Recorder<true>, __VA_ARGS__)
#endif

#define TK_CPU_VARIANT(variant)                                                           \
    TK_CPU_KERNELS(dispatch_send_##variant, P2PDispatchSend<P2PVariant::variant>)         \
    TK_CPU_KERNELS(dispatch_recv_##variant, P2PDispatchRecv<P2PVariant::variant>)         \
    TK_CPU_KERNELS(combine_send_##variant, P2PCombineSend<BFloat16, P2PVariant::variant>) \
    TK_CPU_KERNELS(combine_recv_##variant, P2PCombineRecv<BFloat16, P2PVariant::variant>)

TK_CPU_VARIANT(balanced)
#ifndef TK_ONE_NUMBER
TK_CPU_VARIANT(flag)
TK_CPU_VARIANT(token)
TK_CPU_VARIANT(fused)
#endif

#ifndef TK_ONE_NUMBER
TK_CPU_KERNELS(dispatch, P2PDispatch)
TK_CPU_KERNELS(combine_dedup, P2PCombine<BFloat16, ResultOfEachChoice>)
TK_CPU_KERNELS(combine_reduce, P2PCombine<BFloat16, SumOfEachRank>)
#endif
TK_CPU_KERNELS(dispatch_combine, P2PDispatchCombine<BFloat16>)
TK_CPU_KERNELS(scale_experts, P2PScaleExperts<BFloat16>)
