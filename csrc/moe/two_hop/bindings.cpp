// The extension module tracekern._two_hop
#include "moe/bind_cpu.hpp"
#include "moe/two_hop/bind.hpp"

PYBIND11_MODULE(_two_hop, family) {
    using namespace tracekern;  // NOLINT: the module's own file
    require_same_core();
    bind_facts<TwoHop>(family);
    bind_two_hop_facts(family);
    bind_two_hop_buffer<PipelineBackendCpu, take_cpu_backend>(family);
}
