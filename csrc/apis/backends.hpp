// What communicators have in common on all backends, bound once for each of them.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "apis/names.hpp"
#include "comm/command.h"
#include "comm/fault.h"
#include "comm/heap.h"

namespace tracekern {

// Making one and barrier() are the backend's own.
template <class Communicator>
pybind11::class_<Communicator> register_communicator(pybind11::module_& module, const char* name) {
    namespace py = pybind11;
    return py::class_<Communicator>(module, name)
        // Bytes for tracekern/dump/fault.py, None while nothing went wrong.
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
        // For kernels of a user's own: the CommArgs that they take, as bytes. first_stage: of
        // Communicator.add_kernels().
        .def_property_readonly("kernel_args",
                               [](const Communicator& comm) {
                                   return py::bytes(reinterpret_cast<const char*>(&comm.args()), sizeof(CommArgs));
                               })
        // For its proxy: the CommArgs of this rank, which stay there (csrc/fabric/bindings.cpp).
        .def_property_readonly("args_address",
                               [](const Communicator& comm) { return reinterpret_cast<uint64_t>(&comm.args()); })
        .def(
            "reach_by",
            [](Communicator& comm, uint64_t ring, uint64_t far_heap) {
                comm.reach_by(reinterpret_cast<CommandRing*>(ring), reinterpret_cast<char*>(far_heap));
            },
            py::arg("ring"),
            py::arg("far_heap"))
        // Where each rank's part of the heap begins, for this rank.
        .def_property_readonly("heap_addresses",
                               [](const Communicator& comm) {
                                   std::vector<uint64_t> addresses;
                                   for (uint32_t rank = 0; rank < comm.args().num_ranks; ++rank) {
                                       addresses.push_back(reinterpret_cast<uint64_t>(comm.args().heap[rank]));
                                   }
                                   return addresses;
                               })
        .def("clear_control", &Communicator::clear_control)
        .def_property_readonly("barrier_epoch", &Communicator::barrier_epoch);
}

}  // namespace tracekern
