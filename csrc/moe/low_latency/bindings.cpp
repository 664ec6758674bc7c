// The extension module tracekern._low_latency
#include "moe/bind_cpu.hpp"
#include "moe/low_latency/bind.hpp"
#include "moe/low_latency/inbox.hpp"

PYBIND11_MODULE(_low_latency, family) {
    using namespace tracekern;  // NOLINT: the module's own file
    require_same_core();
    bind_facts<LowLatency>(family);
    bind_low_latency_facts(family);
    bind_low_latency_buffer<PipelineBackendCpu, take_cpu_backend>(family);
    bind_low_latency_buffer_on<PipelineBackendCpu, take_cpu_backend, FarArgs>(family, "FarBuffer")
        // For RankProxy.set_inbox(): an Inbox, which does not need the buffer any more.
        .def("inbox", [](LowLatencyBuffer<PipelineBackendCpu, FarArgs>& buffer) {
            auto* inbox = new Inbox(LowLatencyInbox(buffer.args()));
            return pybind11::capsule(inbox, [](void* made) { delete static_cast<Inbox*>(made); });
        });
}
