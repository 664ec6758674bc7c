// The kernels of the low latency family. A call is dispatch and combine, each of which is one launch or two.
#pragma once

#include "moe/kernel_list.h"
#include "moe/low_latency/combine.h"
#include "moe/low_latency/dispatch.h"
#include "moe/low_latency/scale.h"

namespace tracekern {

template <bool kFp8, class... More>
using LowLatencyKernels = KernelList<low_latency_dispatch::Kernel<LowLatencyStage::dispatch, kFp8>,
                                     low_latency_dispatch::Kernel<LowLatencyStage::dispatch_send, kFp8>,
                                     low_latency_dispatch::Kernel<LowLatencyStage::dispatch_recv, kFp8>,
                                     LowLatencyExpertRows<LowLatencyStage::scale_experts, kFp8>,
                                     low_latency_combine::Kernel<LowLatencyStage::combine>,
                                     low_latency_combine::Kernel<LowLatencyStage::combine_send>,
                                     low_latency_combine::Kernel<LowLatencyStage::combine_recv>,
                                     More...>;
using LowLatencyBf16Kernels = LowLatencyKernels<false>;
using LowLatencyFp8Kernels = LowLatencyKernels<true, LowLatencyExpertRows<LowLatencyStage::dequantise, true>>;

}  // namespace tracekern
