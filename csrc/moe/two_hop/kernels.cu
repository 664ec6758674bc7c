// The two-hop kernels for GPUs. CUDA and HIP compile it.
#include "moe/entry.h"
#include "moe/two_hop/family.h"

TK_FAMILY_KERNELS(TwoHop)
