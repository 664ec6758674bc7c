// The low latency kernels that reach other hosts by proxies, for GPUs: for test_low_latency_hosts.py, which compiles
// them.
#include "moe/entry.h"
#include "moe/low_latency/family.h"

namespace tracekern {
using FarLowLatency = LowLatencyOn<FarArgs>;
}
TK_FAMILY_KERNELS(FarLowLatency)
