// tracekern._C: the P2P pipeline on the CPU backend. Python checks tensors; here arrive addresses and sizes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "apis/cpu_backend.hpp"
#include "apis/names.hpp"
#include "apis/register.hpp"
#include "moe/p2p/pipeline_cpu.hpp"

namespace py = pybind11;

namespace tracekern {
namespace {

std::unique_ptr<P2PPipelineCpu> make_pipeline(CpuCommunicator& comm,
                                              const std::string& variant,
                                              const std::string& dtype,
                                              uint32_t max_tokens,
                                              uint32_t num_experts,
                                              uint32_t topk,
                                              uint32_t hidden,
                                              uint32_t num_blocks,
                                              uint32_t warps_per_block,
                                              uint32_t partitions,
                                              const std::string& executor) {
    P2PConfig config;
    config.shape = make_shape(comm.args().num_ranks, max_tokens, num_experts, topk, hidden, dtype);
    config.variant = enum_named<P2PVariant>("variant", variant, kVariantNames);
    config.number = enum_named<NumberType>("dtype", dtype, kNumberNames);
    config.partitions = partitions;
    config.num_blocks = num_blocks;
    config.warps_per_block = warps_per_block;
    config.executor = cpu_executor(executor);
    return std::make_unique<P2PPipelineCpu>(comm, config);
}

void set_call(P2PPipelineCpu& pipeline,
              uint64_t x,
              uint64_t topk_idx,
              uint64_t topk_weights,
              uint64_t expert_scale,
              uint64_t out,
              uint32_t num_tokens) {
    pipeline.set_call(reinterpret_cast<const void*>(x),
                      reinterpret_cast<const int32_t*>(topk_idx),
                      reinterpret_cast<const float*>(topk_weights),
                      reinterpret_cast<const float*>(expert_scale),
                      reinterpret_cast<void*>(out),
                      num_tokens);
}

void run_stage(P2PPipelineCpu& pipeline, const std::string& stage, uint64_t descriptor, const std::string& format) {
    const auto chosen = enum_named<P2PStage>("stage", stage, kP2PStageNames);
    const TraceChoice trace = trace_choice(descriptor, format);
    py::gil_scoped_release release;
    pipeline.run(chosen, trace);
}

void register_pipeline(py::module_& module) {
    py::class_<P2PPipelineCpu>(module, "P2PPipelineCpu")
        .def(py::init(&make_pipeline),
             py::keep_alive<1, 2>(),
             py::arg("comm"),
             py::kw_only(),
             py::arg("variant"),
             py::arg("dtype"),
             py::arg("max_tokens"),
             py::arg("num_experts"),
             py::arg("topk"),
             py::arg("hidden"),
             py::arg("num_blocks"),
             py::arg("warps_per_block"),
             py::arg("partitions") = 2,
             py::arg("executor") = "fibers")
        .def("reset", &P2PPipelineCpu::reset)
        .def_property_readonly("epoch", &P2PPipelineCpu::epoch)
        .def("set_call",
             &set_call,
             py::kw_only(),
             py::arg("x"),
             py::arg("topk_idx"),
             py::arg("topk_weights"),
             py::arg("expert_scale"),
             py::arg("out"),
             py::arg("num_tokens"))
        .def("run", &run_stage, py::arg("stage"), py::arg("descriptor") = 0, py::arg("record_format") = "wide");
}

}  // namespace

void register_moe(py::module_& module) {
    module.attr("p2p_variants") = names_list(kVariantNames);
    module.attr("p2p_stages") = names_list(kP2PStageNames);
    module.attr("p2p_roles") = names_list(kP2PRoleNames);
    module.attr("max_experts") = kMaxExperts;
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
    register_pipeline(module);
}

}  // namespace tracekern
