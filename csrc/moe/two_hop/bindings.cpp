// tracekern._C.families["two_hop"]
#include "moe/bind_cpu.hpp"
#include "moe/two_hop/bind.hpp"

namespace tracekern {

void register_two_hop(pybind11::module_& extension) {
    auto family = family_module<TwoHop>(extension);
    bind_facts<TwoHop>(family);
    bind_two_hop_facts(family);
    bind_two_hop_buffer<PipelineBackendCpu, take_cpu_backend>(family);
}

}  // namespace tracekern
