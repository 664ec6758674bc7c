// tracekern._cuda.families["p2p"]
#include "moe/bind_cuda.hpp"
#include "moe/p2p/family.h"

namespace tracekern {

void register_p2p(pybind11::module_& extension) {
    bind_cuda_family<P2P>(extension);
}

}  // namespace tracekern
