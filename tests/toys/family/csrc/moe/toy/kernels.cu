// The toy kernel for GPUs. CUDA and HIP compile it.
#include "moe/entry.h"
#include "moe/toy/family.h"

TK_FAMILY_KERNELS(Toy)
