// The kernels of int4 experts for GPUs. CUDA and HIP compile it.
#include "moe/entry.h"
#include "moe/gemm/family.h"

TK_FAMILY_KERNELS(Gemm)
