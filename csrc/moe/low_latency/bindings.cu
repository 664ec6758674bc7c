// tracekern._cuda.families["low_latency"]
#include "moe/bind_cuda.hpp"
#include "moe/low_latency/bind.hpp"

namespace tracekern {

void register_low_latency(pybind11::module_& extension) {
    auto family = family_module<LowLatency>(extension);
    bind_low_latency_buffer<PipelineBackendCuda, take_cuda_backend>(family);
    bind_low_latency_buffer_on<PipelineBackendCuda, take_cuda_backend, FarArgs>(family, "FarBuffer");
}

}  // namespace tracekern
