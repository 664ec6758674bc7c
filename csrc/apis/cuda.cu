// tracekern._cuda: the GPU twin of the communicator in _core.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "apis/backends.hpp"
#include "comm/clocks_cuda.hpp"
#include "comm/kernel_table.hpp"
#include "comm/proxy_memory_cuda.hpp"
#include "platform/gpu_facts.hpp"

namespace py = pybind11;
using namespace tracekern;  // NOLINT: the module's own file

namespace {

py::dict facts_to_dict() {
    const DeviceFacts facts = device_facts();
    py::dict result;
    result["name"] = facts.name;
    result["bus_id"] = facts.bus_id;
    result["free_bytes"] = facts.free_bytes;
    result["total_bytes"] = facts.total_bytes;
    result["has_mps"] = facts.has_mps;
    result["exports_memory"] = facts.exports_memory;
    result["reachable"] = facts.reachable;
    return result;
}

py::array_t<int64_t> rows_of_three(const void* rows, size_t count) {
    py::array_t<int64_t> result({static_cast<py::ssize_t>(count), py::ssize_t{3}});
    memcpy(result.mutable_data(), rows, count * 3 * sizeof(int64_t));
    return result;
}

// Left to its first launch, a kernel's loading may have to wait for another kernel that spins: on the very launch that
// would come next.
std::unique_ptr<CudaCommunicator> open_communicator(
    uint32_t rank, uint32_t num_ranks, uint64_t heap_bytes, uint64_t timeout_ns, bool by_descriptor) {
    for (const bool is_far : {false, true}) {
        for_each_body_kind(
            [&](BodyKind kind) { load_kernel(rank_barrier_kernel(is_far, kind.is_traced, kind.format)); });
    }
    for (const bool initiates : {false, true}) load_kernel(ping_pong_kernel(initiates));
    load_kernel(host_clock_kernel());
    load_kernel(delay_kernel());
    return std::make_unique<CudaCommunicator>(rank, num_ranks, heap_bytes, timeout_ns, by_descriptor);
}

void register_cuda_communicator(py::module_& extension) {
    register_communicator<CudaCommunicator>(extension, "CudaCommunicator")
        .def(py::init(&open_communicator),
             py::arg("rank"),
             py::arg("num_ranks"),
             py::arg("heap_bytes"),
             py::arg("timeout_ns"),
             py::arg("by_descriptor"))
        .def("export_heap", &CudaCommunicator::export_heap)
        .def("import_peer", &CudaCommunicator::import_peer, py::arg("peer"), py::arg("descriptor"))
        .def("heap_handle", [](const CudaCommunicator& comm) { return py::bytes(comm.heap_handle()); })
        .def(
            "open_peer",
            [](CudaCommunicator& comm, uint32_t peer, const py::bytes& handle) { comm.open_peer(peer, handle); },
            py::arg("peer"),
            py::arg("handle"))
        .def("attach_peer", &CudaCommunicator::attach_peer, py::arg("peer"), py::arg("is_mapped"))
        .def(
            "barrier",
            [](CudaCommunicator& comm, uint64_t descriptor, uint64_t stream) {
                py::gil_scoped_release release;
                comm.barrier(descriptor, stream);
            },
            py::arg("descriptor") = 0,
            py::arg("stream") = 0);
}

void register_proxy_memory(py::module_& extension) {
    // owner: of the memory.
    const auto make = [](uint64_t ring, uint64_t begin, uint64_t bytes, const py::object&) {
        const py::gil_scoped_release release;
        return std::make_unique<CudaProxyMemory>(*reinterpret_cast<const CommandRing*>(ring), begin, bytes);
    };
    py::class_<CudaProxyMemory>(extension, "ProxyMemory")
        .def(py::init(make),
             py::keep_alive<1, 5>(),
             py::arg("ring"),
             py::arg("begin"),
             py::arg("bytes"),
             py::arg("owner"))
        // Address of the ring for kernels.
        .def_property_readonly("ring",
                               [](const CudaProxyMemory& memory) { return reinterpret_cast<uint64_t>(memory.ring()); })
        .def("reset", &CudaProxyMemory::reset);
}

void register_clock(py::module_& extension) {
    py::class_<GpuClock>(extension, "GpuClock")
        .def(py::init<>())
        .def("read_brackets",
             [](GpuClock& clock, uint32_t count) {
                 std::vector<Bracket> brackets;
                 {
                     py::gil_scoped_release release;
                     brackets = clock.read_brackets(count, 2'000'000'000);
                 }
                 return rows_of_three(brackets.data(), brackets.size());
             })
        .def("ping_pong",
             [](GpuClock& clock,
                const CudaCommunicator& comm,
                uint32_t peer,
                bool initiates,
                uint32_t epoch,
                uint32_t max_round_trips,
                uint64_t duration_ns) {
                 std::vector<RoundTrip> trips;
                 {
                     py::gil_scoped_release release;
                     trips = clock.ping_pong(comm, peer, initiates, epoch, max_round_trips, duration_ns);
                 }
                 return rows_of_three(trips.data(), trips.size());
             });
}

void register_streams(py::module_& extension) {
    py::class_<StreamGate>(extension, "StreamGate")
        .def(py::init<>())
        .def("hold", &StreamGate::hold, py::arg("stream"))
        .def("open", &StreamGate::open);
    extension.def(
        "delay",
        [](uint64_t delay_ns, uint64_t stream) { launch_kernel(delay_kernel(), {1, 1, 0, stream}, {&delay_ns}); },
        "Keeps a stream of the current device busy for so long.",
        py::arg("delay_ns"),
        py::arg("stream"));
}

#ifdef TK_PLANTED_FAULTS
// Leaves one thing out of the protocol from now on, on the current device; see comm/mutation.h.
void plant(const std::string& channel, const std::string& mutation) {
    const PlantedFault fault{enum_named<uint32_t>("channel", channel, kCommChannelNames),
                             enum_named<Mutation>("mutation", mutation, kMutationNames)};
    plant_in_comm(fault);
}
#endif

}  // namespace

namespace tracekern {

void register_cuda(py::module_& extension) {
    register_cuda_communicator(extension);
    register_proxy_memory(extension);
    register_clock(extension);
    register_streams(extension);
    extension.attr("clock_shift") = kClockShift;
#ifdef TK_PLANTED_FAULTS
    extension.def("plant", &plant, py::arg("channel"), py::arg("mutation"));
#endif
    extension.def("device_error", &device_error, "What is wrong with the current device for good; empty: nothing.");
    extension.def("count_devices", &count_devices, "GPUs in sight. Makes no context.");
    extension.def("device_facts", &facts_to_dict, "The current device, for tracekern.comm.devices.preflight.");
    extension.def("driver_versions", [] {
        const DriverVersions versions = driver_versions();
        return std::pair{versions.driver, versions.runtime};
    });
}

}  // namespace tracekern
