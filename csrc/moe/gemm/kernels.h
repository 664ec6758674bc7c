// The kernels of a call of int4 experts. Beside what moe/kernel_list.h says, a body names how it is launched: kNumWarps
// of a block, at most as many as kMaxThreads hold, and kIsOneBlock. One with `Weights` needs all of them.
#pragma once

#include "moe/gemm/contract/direct.h"
#include "moe/gemm/contract/pinned.h"
#include "moe/gemm/contract/sweep.h"
#include "moe/gemm/permute.h"
#include "moe/gemm/reg.h"
#include "moe/gemm/ring.h"
#include "moe/gemm/tiles.h"
#include "moe/gemm/wide.h"
#include "moe/kernel_list.h"

namespace tracekern {

template <class... Products>
using GemmKernelsWith = KernelList<GemmPlaceRows, GemmLayOutTiles, GemmPermute, Products..., GemmUnpermute>;

template <template <GemmStage, GemmDetail> class Ring, GemmDetail kDetail>
using GemmRingKernels = GemmKernelsWith<Ring<GemmStage::k2_many, kDetail>,
                                        Ring<GemmStage::k2, kDetail>,
                                        Ring<GemmStage::k4_many, kDetail>,
                                        Ring<GemmStage::k4, kDetail>>;

template <GemmStaging kStaging, GemmDetail kDetail>
struct GemmKernelsFor {
    using Type =
        GemmKernelsWith<GemmSweep<GemmStage::k2, kStaging, kDetail>, GemmSweep<GemmStage::k4, kStaging, kDetail>>;
};
template <GemmDetail kDetail>
struct GemmKernelsFor<GemmStaging::wide, kDetail> {
    using Type = GemmRingKernels<GemmWide, kDetail>;
};
template <GemmDetail kDetail>
struct GemmKernelsFor<GemmStaging::ring, kDetail> {
    using Type = GemmRingKernels<GemmRing, kDetail>;
};

template <GemmDetail kDetail>
struct GemmKernelsFor<GemmStaging::reg, kDetail> {
    using Type = GemmKernelsWith<GemmReg<GemmStage::k2, kDetail>, GemmReg<GemmStage::k4, kDetail>>;
};

template <GemmStaging kStaging, GemmDetail kDetail>
using GemmKernels = typename GemmKernelsFor<kStaging, kDetail>::Type;

// Whether a launch makes its x_map.
template <class Body>
constexpr bool kCopiesBoxes = requires { requires Body::kCopiesBoxes; };
// Whether a block needs all its warps: each has its own outputs or role.
template <class Body>
constexpr bool kNeedsAllWarps = requires { typename Body::Weights; };

}  // namespace tracekern
