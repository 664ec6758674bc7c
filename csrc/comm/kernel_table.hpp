// The communicator's kernels of the GPU build, as the host launches them.
#pragma once

#include "trace/record.h"

namespace tracekern {

const void* rank_barrier_kernel(bool traced, RecordFormat format);
const void* ping_pong_kernel(bool initiates);
const void* host_clock_kernel();

}  // namespace tracekern
