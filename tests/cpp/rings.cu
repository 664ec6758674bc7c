// The kernel of ring_protocol.h for GPUs, where all ranks are mapped. CUDA and HIP compile it; test_two_hops.py
// looks at the code.
#include "ring_protocol.h"

using namespace tracekern;  // NOLINT: entry points have C names

TK_KERNEL rings(TK_ARGUMENT RingArgs<CommArgs> args, const LaunchSize size) {
    Warp warp(size);
    run_rings(warp, args);
}
