// The recorder's kernels of the GPU build, as the host launches them.
#pragma once

#include "trace/record.h"

namespace tracekern {

const void* graph_advance_kernel();
const void* probe_kernel(bool traced, RecordFormat format);

}  // namespace tracekern
