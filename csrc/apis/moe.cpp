// tracekern._C: the P2P pipeline on the CPU backend. Python checks tensors; here arrive addresses and sizes.
#include <pybind11/pybind11.h>

#include <iterator>

#include "apis/backends.hpp"
#include "apis/cpu_backend.hpp"
#include "apis/names.hpp"
#include "apis/register.hpp"
#include "moe/p2p/pipeline_cpu.hpp"

namespace py = pybind11;

namespace tracekern {
namespace {

void run_stage(P2PPipelineCpu& pipeline, const std::string& stage, uint64_t descriptor, const std::string& format) {
    const auto chosen = enum_named<P2PStage>("stage", stage, kP2PStageNames);
    const TraceChoice trace = trace_choice(descriptor, format);
    py::gil_scoped_release release;
    pipeline.run(chosen, trace);
}

}  // namespace

void register_moe(py::module_& module) {
    py::dict kernels_of;
    for (size_t i = 0; i < std::size(kVariantNames); ++i) {
        py::list kernels;
        for (const P2PStage stage : stages_of(static_cast<P2PVariant>(i)))
            kernels.append(kP2PStageNames[static_cast<uint32_t>(stage)]);
        kernels_of[kVariantNames[i]] = py::tuple(kernels);
    }
    module.attr("p2p_variants") = kernels_of;
    module.attr("p2p_stages") = names_list(kP2PStageNames);
    module.attr("p2p_roles") = names_list(kP2PRoleNames);
    module.def("p2p_event_table", &describe_events<P2PEvent>);
    module.def(
        "p2p_heap_bytes",
        [](uint32_t num_ranks,
           uint32_t max_tokens,
           uint32_t num_experts,
           uint32_t topk,
           uint32_t hidden,
           const std::string& dtype,
           const std::string& variant,
           uint32_t partitions) {
            const MoeShape shape = make_shape(num_ranks, max_tokens, num_experts, topk, hidden, dtype);
            const auto which = enum_named<P2PVariant>("variant", variant, kVariantNames);
            return P2PLayout::make(shape, which, partitions).total_bytes;
        },
        py::arg("num_ranks"),
        py::arg("max_tokens"),
        py::arg("num_experts"),
        py::arg("topk"),
        py::arg("hidden"),
        py::arg("dtype"),
        py::arg("variant"),
        py::arg("partitions") = 2);
    register_pipeline<P2PPipelineCpu, CpuCommunicator, cpu_executor>(
        module, "P2PPipelineCpu", py::arg("executor") = "fibers")
        .def("run", &run_stage, py::arg("stage"), py::arg("descriptor") = 0, py::arg("record_format") = "wide");
}

}  // namespace tracekern
