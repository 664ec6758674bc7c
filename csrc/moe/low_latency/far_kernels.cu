// The low latency kernels that reach ranks of other hosts by proxies. Beside kernels.cu, so that both are compiled at a
// time.
#include "moe/entry.h"
#include "moe/low_latency/family.h"

namespace tracekern {
using FarLowLatency = LowLatencyOn<FarArgs>;
}
TK_FAMILY_KERNELS(FarLowLatency)
