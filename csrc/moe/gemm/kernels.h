// The kernels of a call of int4 experts. Beside what moe/kernel_list.h says, a body names how it is launched: kNumWarps
// of a block, at most as many as kMaxThreads hold, and kIsOneBlock.
#pragma once

#include "moe/gemm/contract/pinned.h"
#include "moe/gemm/direct.h"
#include "moe/gemm/permute.h"
#include "moe/gemm/sweep.h"
#include "moe/gemm/tiles.h"
#include "moe/kernel_list.h"

namespace tracekern {

template <GemmStaging kStaging, GemmDetail kDetail>
using GemmKernels = KernelList<GemmPlaceRows,
                               GemmLayOutTiles,
                               GemmPermute,
                               GemmSweep<GemmStage::k2, kStaging, kDetail>,
                               GemmSweep<GemmStage::k4, kStaging, kDetail>,
                               GemmUnpermute>;

}  // namespace tracekern
