// The P2P kernels of the GPU build by name, such as "p2p_combine_send_balanced_bf16_off".
#pragma once

#include <string>
#include <unordered_map>

#include "comm/mutation.h"

namespace tracekern {

const std::unordered_map<std::string, const void*>& p2p_kernels();
#ifdef TK_PLANTED_FAULTS
void plant_in_p2p(PlantedFault fault);
#endif

}  // namespace tracekern
