// What communicator and pipeline have in common on all backends, bound once for each of them.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "apis/names.hpp"
#include "comm/fault.h"
#include "comm/heap.h"

namespace tracekern {

// Making one and barrier() are the backend's own.
template <class Communicator>
pybind11::class_<Communicator> register_communicator(pybind11::module_& module, const char* name) {
    namespace py = pybind11;
    return py::class_<Communicator>(module, name)
        // Bytes for tracekern/record/fault.py, None while nothing went wrong.
        .def("fault",
             [](const Communicator& comm) -> py::object {
                 if (!comm.failed()) return py::none();
                 return py::bytes(reinterpret_cast<const char*>(&comm.fault()), sizeof(FaultRecord));
             })
        .def(
            "keep_fault_at",
            [](Communicator& comm, uint64_t address) { comm.keep_fault_at(reinterpret_cast<FaultRecord*>(address)); },
            py::arg("address"))
        .def(
            "set_timeout",
            [](Communicator& comm, uint64_t timeout_ns, const std::string& on_timeout) {
                comm.set_timeout(timeout_ns, enum_named<OnTimeout>("on_timeout", on_timeout, kOnTimeoutNames));
            },
            py::arg("timeout_ns"),
            py::arg("on_timeout"))
        // For kernels of a user's own: the CommArgs that they take, as bytes.
        .def_property_readonly("kernel_args",
                               [](const Communicator& comm) {
                                   return py::bytes(reinterpret_cast<const char*>(&comm.args()), sizeof(CommArgs));
                               })
        .def("clear_control", &Communicator::clear_control)
        .def_property_readonly("barrier_epoch", &Communicator::barrier_epoch);
}

template <class Pipeline>
void set_call(Pipeline& pipeline,
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

template <auto>
using Name = std::string;

// kChoices: functions that turn the names given for `arguments` into what the pipeline takes beside its configuration.
template <class Pipeline, class Communicator, auto... kChoices>
std::unique_ptr<Pipeline> make_pipeline(Communicator& comm,
                                        const std::string& variant,
                                        const std::string& dtype,
                                        uint32_t max_tokens,
                                        uint32_t num_experts,
                                        uint32_t topk,
                                        uint32_t hidden,
                                        uint32_t num_blocks,
                                        uint32_t warps_per_block,
                                        uint32_t partitions,
                                        const Name<kChoices>&... names) {
    P2PConfig config;
    config.shape = make_shape(comm.args().num_ranks, max_tokens, num_experts, topk, hidden, dtype);
    config.variant = enum_named<P2PVariant>("variant", variant, kVariantNames);
    config.number = enum_named<NumberType>("dtype", dtype, kNumberNames);
    config.partitions = partitions;
    config.num_blocks = num_blocks;
    config.warps_per_block = warps_per_block;
    return std::make_unique<Pipeline>(comm, config, kChoices(names)...);
}

// Running it is the backend's own. kChoices and `arguments`: see make_pipeline().
template <class Pipeline, class Communicator, auto... kChoices, class... Arguments>
pybind11::class_<Pipeline> register_pipeline(pybind11::module_& module,
                                             const char* name,
                                             const Arguments&... arguments) {
    namespace py = pybind11;
    return py::class_<Pipeline>(module, name)
        .def(py::init(&make_pipeline<Pipeline, Communicator, kChoices...>),
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
             arguments...)
        .def("reset", &Pipeline::reset)
        .def_property_readonly("epoch", &Pipeline::epoch)
        .def("set_call",
             &set_call<Pipeline>,
             py::kw_only(),
             py::arg("x"),
             py::arg("topk_idx"),
             py::arg("topk_weights"),
             py::arg("expert_scale"),
             py::arg("out"),
             py::arg("num_tokens"));
}

}  // namespace tracekern
