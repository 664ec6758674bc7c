// The kernels of the low latency family. A call is dispatch and combine, each of which is one launch or two.
#pragma once

#include "moe/kernel_list.h"
#include "moe/low_latency/combine.h"
#include "moe/low_latency/dispatch.h"
#include "moe/low_latency/scale.h"

namespace tracekern {

template <bool kFp8, class... More>
using LowLatencyKernels = KernelList<LowLatencyDispatch<LowLatencyStage::dispatch, kFp8>,
                                     LowLatencyDispatch<LowLatencyStage::dispatch_send, kFp8>,
                                     LowLatencyDispatch<LowLatencyStage::dispatch_recv, kFp8>,
                                     LowLatencyExpertRows<LowLatencyStage::scale_experts, kFp8>,
                                     LowLatencyCombine<LowLatencyStage::combine>,
                                     LowLatencyCombine<LowLatencyStage::combine_send>,
                                     LowLatencyCombine<LowLatencyStage::combine_recv>,
                                     More...>;
using LowLatencyBf16Kernels = LowLatencyKernels<false>;
using LowLatencyFp8Kernels = LowLatencyKernels<true, LowLatencyExpertRows<LowLatencyStage::dequantise, true>>;

}  // namespace tracekern
