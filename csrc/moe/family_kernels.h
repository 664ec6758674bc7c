// The kernels of a family on a GPU, for the host that launches them. moe/entry.h defines these in the family's
// kernels.cu alone: elsewhere each kernel would be compiled once more.
#pragma once

#include "comm/mutation.h"
#include "trace/trace_choice.h"

namespace tracekern {

// The entry point of a stage of a call, with the body that a launch of that kind runs.
template <class Family>
const void* kernel_address(const typename Family::Config& config,
                           typename Family::Stage stage,
                           bool is_traced,
                           RecordFormat format);

#ifdef TK_PLANTED_FAULTS
template <class Family>
void plant_in_kernels(PlantedFault fault);
#endif

}  // namespace tracekern
