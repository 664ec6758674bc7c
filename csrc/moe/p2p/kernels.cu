// The P2P kernels for GPUs. CUDA and HIP compile it.
#include "moe/entry.h"
#include "moe/p2p/family.h"

TK_FAMILY_KERNELS(P2P)
