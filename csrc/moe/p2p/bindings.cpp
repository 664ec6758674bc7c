// tracekern._C.families["p2p"]
#include "moe/p2p/bindings.hpp"

#include "moe/bind_cpu.hpp"

namespace tracekern {

void register_p2p(pybind11::module_& extension) {
    auto family = family_module<P2P>(extension);
    bind_facts<P2P, take_p2p_config>(family);
    auto pipeline = bind_cpu_pipeline<P2P, take_p2p_config>(family);
    bind_p2p_call(pipeline);
}

}  // namespace tracekern
