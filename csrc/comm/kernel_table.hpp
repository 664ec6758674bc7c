// The communicator's kernels of the GPU build, as the host launches them.
#pragma once

#include "comm/mutation.h"
#include "trace/record.h"

namespace tracekern {

// is_far: a proxy reaches some of the ranks.
const void* rank_barrier_kernel(bool is_far, bool traced, RecordFormat format);
const void* ping_pong_kernel(bool initiates);
const void* host_clock_kernel();
const void* delay_kernel();
#ifdef TK_PLANTED_FAULTS
void plant_in_comm(PlantedFault fault);
#endif

}  // namespace tracekern
