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
    bind_low_latency_buffer_on<PipelineBackendCpu, take_cpu_backend, FarArgs>(family, "FarBuffer");
    // For RankProxy.reset(): an Inbox of a rank, whatever its kernels run on.
    family.def("inbox", [](pybind11::kwargs options) {
        auto config = take_config<LowLatency>(options);
        take_member(options, config.first_byte, "first_byte");
        take_member(options, config.far_heap, "far_heap");
        CountingMemory nothing;
        auto args = LowLatencyOn<FarArgs>::make_args(config, nothing);
        args.comm.rank = take_option<uint32_t>(options, "rank");
        refuse_options_left(options);
        return pybind11::capsule(new Inbox(LowLatencyInbox(args)),
                                 [](void* made) { delete static_cast<Inbox*>(made); });
    });
}
