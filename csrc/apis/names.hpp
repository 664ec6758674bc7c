// What the bindings of both backends share: names for enums, shapes from arguments, a fault as a dictionary.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "comm/fault.h"
#include "comm/heap.h"
#include "comm/mutation.h"
#include "moe/p2p/layout.h"
#include "trace/record.h"

namespace tracekern {

template <class Enum, size_t kCount>
Enum enum_named(const std::string& what, const std::string& name, const char* const (&names)[kCount]) {
    std::string wanted;
    for (size_t i = 0; i < kCount; ++i) {
        if (name == names[i]) return static_cast<Enum>(i);
        wanted += std::string(i ? ", " : "") + names[i];
    }
    throw std::invalid_argument(what + " is '" + name + "'; wanted one of " + wanted);
}

template <size_t kCount>
pybind11::list names_list(const char* const (&names)[kCount]) {
    pybind11::list result;
    for (const char* name : names) result.append(name);
    return result;
}

inline constexpr const char* kVariantNames[] = {"flag", "token", "fused", "balanced", "dedup", "reduce", "pipelined"};
inline constexpr const char* kNumberNames[] = {"fp32", "fp16", "bf16"};

// A format that the bundled kernels have a body for.
inline RecordFormat record_format_named(const std::string& name) {
    constexpr const char* kBundled[] = {kRecordFormatNames[0], kRecordFormatNames[1]};
    return enum_named<RecordFormat>("record_format", name, kBundled);
}

inline MoeShape make_shape(uint32_t num_ranks,
                           uint32_t max_tokens,
                           uint32_t num_experts,
                           uint32_t topk,
                           uint32_t hidden,
                           const std::string& dtype) {
    constexpr uint32_t kNumberBytes[] = {4, 2, 2};
    const auto number = enum_named<uint32_t>("dtype", dtype, kNumberNames);
    return {num_ranks, max_tokens, num_experts, topk, hidden, kNumberBytes[number]};
}

// The faults of a communicator: bytes for tracekern/record/fault.py, None while nothing went wrong.
template <class Communicator, class Class>
void register_faults(Class& communicator) {
    namespace py = pybind11;
    communicator
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
        .def_property_readonly("kernel_args", [](const Communicator& comm) {
            return py::bytes(reinterpret_cast<const char*>(&comm.args()), sizeof(CommArgs));
        });
}

}  // namespace tracekern
