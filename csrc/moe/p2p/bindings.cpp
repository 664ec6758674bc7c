// tracekern._C.families["p2p"]
#include "moe/bind_cpu.hpp"
#include "moe/p2p/family.h"

namespace tracekern {

void register_p2p(pybind11::module_& extension) {
    bind_cpu_family<P2P>(extension);
}

}  // namespace tracekern
