// tracekern._cuda.families["two_hop"]
#include "moe/bind_cuda.hpp"
#include "moe/two_hop/bind.hpp"

namespace tracekern {

void register_two_hop(pybind11::module_& extension) {
    auto family = family_module<TwoHop>(extension);
    bind_two_hop_buffer<PipelineBackendCuda, take_cuda_backend>(family);
}

}  // namespace tracekern
