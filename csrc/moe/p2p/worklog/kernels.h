// Which kernels make up a call of each variant of the worklog.
#pragma once

#include "moe/kernel_list.h"
#include "moe/p2p/worklog/combine.h"
#include "moe/p2p/worklog/dispatch.h"

namespace tracekern {

template <P2PVariant kVariant, class T>
auto worklog_kernels_of_call() {
    if constexpr (kTraitsOf<kVariant>.fused) {
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

}  // namespace tracekern
