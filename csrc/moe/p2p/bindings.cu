// tracekern._cuda.families["p2p"]
#include "moe/bind_cuda.hpp"
#include "moe/p2p/bindings.hpp"

namespace tracekern {

void register_p2p(pybind11::module_& extension) {
    auto family = family_module<P2P>(extension);
    auto pipeline = bind_cuda_pipeline<P2P, take_p2p_config>(family);
    bind_p2p_call(pipeline);
}

}  // namespace tracekern
