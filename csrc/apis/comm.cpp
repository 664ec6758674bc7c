// tracekern._core: one rank's end of a symmetric heap on the CPU backend.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "apis/backends.hpp"
#include "apis/cpu_backend.hpp"
#include "apis/register.hpp"
#include "comm/communicator_cpu.hpp"

namespace py = pybind11;

namespace tracekern {
namespace {

// What a signal's handler has raised since this was last asked, such as KeyboardInterrupt; nullptr for nothing.
std::exception_ptr find_signal() {
    const py::gil_scoped_acquire hold;
    return PyErr_CheckSignals() ? std::make_exception_ptr(py::error_already_set()) : nullptr;
}

}  // namespace

void register_comm(py::module_& module) {
    module.attr("heap_control_bytes") = sizeof(HeapControl);
    module.attr("simulated_ticks_per_second") = SimulatedClock::kTicksPerSecond;
    module.attr("clock_shift") = kClockShift;
    module.attr("simulated_resolution_ticks") = SimulatedClock::kResolutionTicks;
    module.attr("channels") = names_list(kCommChannelNames);
    module.attr("rank_barrier_stage") = kRankBarrierStage;
    module.attr("first_epoch") = epoch_on_record(kFirstEpoch);
    module.attr("flag_value_bits") = kFlagValueBits;
    module.attr("fault_interrupted") = kInterrupted;
    register_communicator<CpuCommunicator>(module, "CpuCommunicator")
        .def(py::init([](uint32_t rank,
                         const std::vector<uint64_t>& heaps,
                         uint64_t timeout_ns,
                         uint64_t clock_seed,
                         int64_t clock_t0_ns) {
                 const auto clock = SimulatedClock::draw(clock_seed, static_cast<int>(rank), clock_t0_ns);
                 auto comm = std::make_unique<CpuCommunicator>(rank, heaps, timeout_ns, clock);
                 comm->on_wait(&find_signal);
                 return comm;
             }),
             py::arg("rank"),
             py::arg("heaps"),
             py::arg("timeout_ns"),
             py::arg("clock_seed") = 0,
             py::arg("clock_t0_ns") = 0)
        .def_property_readonly("trapped", &CpuCommunicator::trapped)
        .def("set_slow_link",
             &CpuCommunicator::set_slow_link,
             py::arg("gb_per_s"),
             py::arg("ranks_per_node"),
             py::arg("heap_bytes"))
        // Of a user's own kernels: the SimulatedClock of their launches, as bytes.
        .def_property_readonly("clock",
                               [](const CpuCommunicator& comm) {
                                   return py::bytes(reinterpret_cast<const char*>(&comm.clock()),
                                                    sizeof(SimulatedClock));
                               })
        .def(
            "barrier",
            [](CpuCommunicator& comm, uint64_t descriptor, uint64_t) {
                py::gil_scoped_release release;
                comm.barrier(descriptor);
            },
            py::arg("descriptor") = 0,
            py::arg("stream") = 0);
    module.def("barrier_event_table", &describe_events<BarrierEvent>);
}

}  // namespace tracekern
