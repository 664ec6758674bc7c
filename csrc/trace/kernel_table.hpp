// The recorder's kernels of the GPU build, as the host launches them.
#pragma once

#include "trace/record.h"

namespace tracekern {

const void* begin_replay_kernel();
const void* prepare_replay_kernel();
const void* probe_kernel(bool traced, RecordFormat format);

}  // namespace tracekern
