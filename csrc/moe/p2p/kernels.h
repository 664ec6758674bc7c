// Which kernels make up a call of each variant of the P2P family.
#pragma once

#include <iterator>
#include <utility>

#include "moe/kernel_list.h"
#include "moe/p2p/overlapped.h"
#include "moe/p2p/pipelined.h"
#include "moe/p2p/worklog/combine.h"
#include "moe/p2p/worklog/dispatch.h"

namespace tracekern {

// The kernels of a call, in their order. Those that move rows know no number type.
template <P2PVariant kVariant, class T>
auto p2p_kernels_of_call() {
    if constexpr (kVariant == P2PVariant::pipelined) {
        return KernelList<P2PDispatchCombine<T>>{};
    } else if constexpr (kVariant == P2PVariant::overlapped) {
        return KernelList<P2POverlappedDispatch, P2POverlappedCombine<T>>{};
    } else if constexpr (kVariant == P2PVariant::reduce) {
        return KernelList<P2PDispatch, P2PCombine<T, SumOfEachRank>>{};
    } else if constexpr (kVariant == P2PVariant::dedup) {
        return KernelList<P2PDispatch, P2PCombine<T, ResultOfEachChoice>>{};
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
