// The low latency kernels for GPUs. CUDA and HIP compile it.
#include "moe/entry.h"
#include "moe/low_latency/family.h"

TK_FAMILY_KERNELS(LowLatency)
