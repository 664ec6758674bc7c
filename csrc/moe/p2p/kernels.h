// The kernels of the P2P family as bodies, and which of them make up a call of each variant.
#pragma once

#include <iterator>
#include <utility>

#include "moe/kernel_list.h"
#include "moe/p2p/combine.h"
#include "moe/p2p/dispatch.h"
#include "moe/p2p/pipelined.h"

namespace tracekern {

template <P2PStage kOwnStage>
struct P2PKernel {
    using Args = P2PArgs;
    static constexpr P2PStage kStage = kOwnStage;
    static constexpr uint32_t kMaxThreads = 512;

    static uint64_t shared_bytes(const P2PArgs&, uint32_t) { return 0; }
};

// The kernels in which each warp has a list of what it adds up or copies to.
template <P2PStage kOwnStage>
struct P2PKernelWithLists : P2PKernel<kOwnStage> {
    static uint64_t shared_bytes(const P2PArgs& args, uint32_t warps_per_block) {
        return args.layout.shared.contributions + uint64_t{warps_per_block} * args.shape.topk * sizeof(Contribution);
    }
};

template <P2PVariant kVariant>
struct P2PDispatchSend : P2PKernel<P2PStage::dispatch_send> {
    // Counts and sums.
    static uint64_t shared_bytes(const P2PArgs& args, uint32_t) { return args.layout.shared.contributions; }
    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        dispatch_send<kVariant, Rec>(warp, args, trace);
    }
};

template <P2PVariant kVariant>
struct P2PDispatchRecv : P2PKernel<P2PStage::dispatch_recv> {
    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        dispatch_recv<kVariant, Rec>(warp, args, trace);
    }
};

template <class T>
struct P2PScaleExperts : P2PKernel<P2PStage::scale_experts> {
    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        scale_experts<T, Rec>(warp, args, trace);
    }
};

template <class T, P2PVariant kVariant>
struct P2PCombineSend : P2PKernel<P2PStage::combine_send> {
    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        combine_send<T, kVariant, Rec>(warp, args, trace);
    }
};

template <class T, P2PVariant kVariant>
struct P2PCombineRecv : P2PKernel<P2PStage::combine_recv> {
    static uint64_t shared_bytes(const P2PArgs&, uint32_t) { return sizeof(ReduceShared); }
    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        combine_recv<T, kVariant, Rec>(warp, args, trace);
    }
};

template <P2PVariant kVariant>
struct P2PDispatch : P2PKernelWithLists<P2PStage::dispatch> {
    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        dispatch<kVariant, Rec>(warp, args, trace);
    }
};

template <class T, P2PVariant kVariant>
struct P2PCombine : P2PKernelWithLists<P2PStage::combine> {
    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        combine<T, kVariant, Rec>(warp, args, trace);
    }
};

template <class T>
struct P2PDispatchCombine : P2PKernelWithLists<P2PStage::dispatch_combine> {
    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        dispatch_combine<T, Rec>(warp, args, trace);
    }
};

// The kernels of a call, in their order. Those that move rows know no number type.
template <P2PVariant kVariant, class T>
auto p2p_kernels_of_call() {
    if constexpr (kTraitsOf<kVariant>.pipelined) {
        return KernelList<P2PDispatchCombine<T>>{};
    } else if constexpr (kTraitsOf<kVariant>.deduplicated) {
        return KernelList<P2PDispatch<kVariant>, P2PCombine<T, kVariant>>{};
    } else if constexpr (kTraitsOf<kVariant>.fused) {
        return KernelList<P2PDispatchSend<kVariant>,
                          P2PDispatchRecv<kVariant>,
                          P2PCombineSend<T, kVariant>,
                          P2PCombineRecv<T, kVariant>>{};
    } else {
        return KernelList<P2PDispatchSend<kVariant>,
                          P2PDispatchRecv<kVariant>,
                          P2PScaleExperts<T>,
                          P2PCombineSend<T, kVariant>,
                          P2PCombineRecv<T, kVariant>>{};
    }
}

// Calls f.operator()<kVariant>() for a variant that is known at run time.
template <class F>
void with_p2p_variant(P2PVariant variant, F f) {
    const auto run_if_wanted = [&]<P2PVariant kVariant>() {
        if (variant == kVariant) f.template operator()<kVariant>();
    };
    [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
        (run_if_wanted.template operator()<static_cast<P2PVariant>(kIndices)>(), ...);
    }(std::make_index_sequence<std::size(kP2PVariantNames)>());
}

}  // namespace tracekern
