// tracekern._cuda: what a capture keeps on a GPU, traced graphs, and what a span costs.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "apis/names.hpp"
#include "trace/capture_gpu.hpp"
#include "trace/graph_gpu.hpp"
#include "trace/probe_gpu.hpp"

namespace py = pybind11;
using namespace tracekern;  // NOLINT: the module's own file

namespace {

void register_gpu_capture(py::module_& extension) {
    // What can take long: other threads, ranks among them, go on meanwhile.
    constexpr auto beside_others = py::call_guard<py::gil_scoped_release>();
    py::class_<GpuCapture>(extension, "GpuCapture")
        .def(py::init<uint64_t, uint64_t>(), py::arg("arena"), py::arg("arena_bytes"), beside_others)
        .def("mirror", &GpuCapture::mirror)
        .def("export_mirror", &GpuCapture::export_mirror, beside_others)
        .def("drop_mirror", &GpuCapture::drop_mirror, beside_others)
        .def("collect", &GpuCapture::collect, py::arg("offset"), py::arg("num_bytes"))
        .def("finish", &GpuCapture::finish, beside_others)
        .def("release", &GpuCapture::release, beside_others);
    py::class_<KeptMirror>(extension, "KeptMirror")
        .def(
            py::init<const std::string&, int, uint64_t>(), py::arg("uuid"), py::arg("descriptor"), py::arg("num_bytes"))
        .def("copy", &KeptMirror::copy, py::arg("arena"), py::arg("offset"), py::arg("num_bytes"));
    extension.def(
        "device_uuid", [] { return device_uuid(current_device()); }, "Of the current device, in hexadecimal digits.");
    py::class_<StreamMark>(extension, "StreamMark")
        .def(py::init<uint64_t>(), py::arg("stream"))
        .def("is_passed", &StreamMark::is_passed);
}

uint64_t add_launch(GraphRing& ring, uint64_t descriptor, uint32_t num_tracks) {
    return ring.add_launch(*reinterpret_cast<const LaunchDescriptor*>(descriptor), num_tracks);
}

bool place(GraphRing& ring, uint64_t regions) {
    return ring.place(reinterpret_cast<const ReplayRegion*>(regions));
}

void register_graph_ring(py::module_& extension) {
    py::class_<GraphRing>(extension, "GraphRing")
        .def(py::init<uint32_t, uint32_t>(), py::arg("num_slots"), py::arg("max_launches"))
        .def("begin_capture", &GraphRing::begin_capture, py::arg("stream"))
        .def("end_capture", &GraphRing::end_capture, py::arg("stream"))
        .def("add_launch", &add_launch, py::arg("descriptor"), py::arg("num_tracks"))
        .def("finish", &GraphRing::finish, py::arg("mirror_offset"), py::arg("counts"))
        .def("place", &place, py::arg("regions"))
        .def("settle", &GraphRing::settle)
        .def_property_readonly("num_used", &GraphRing::num_used)
        .def_property_readonly("replays", [](const GraphRing& ring) { return ring.control().replays; })
        .def_property_readonly("lost_replays", [](const GraphRing& ring) { return ring.control().lost_replays; })
        .def_property_readonly("lost_records", [](const GraphRing& ring) { return ring.control().lost_records; });
}

py::tuple probe_times(uint32_t warps_per_sm,
                      uint32_t num_regions,
                      uint32_t num_steps,
                      uint32_t num_rounds,
                      const std::string& record_format,
                      bool in_host_memory) {
    const auto format = enum_named<RecordFormat>("record_format", record_format, kRecordFormatNames);
    const ProbePlan plan{warps_per_sm, num_regions, num_steps, num_rounds, format, in_host_memory};
    const ProbeTimes times = time_probe(plan);
    return py::make_tuple(times.off_ms, times.on_ms);
}

}  // namespace

namespace tracekern {

void register_capture(py::module_& extension) {
    register_gpu_capture(extension);
    register_graph_ring(extension);
    extension.def("probe_times",
                  &probe_times,
                  py::kw_only(),
                  py::arg("warps_per_sm"),
                  py::arg("num_regions"),
                  py::arg("num_steps"),
                  py::arg("num_rounds"),
                  py::arg("record_format"),
                  py::arg("in_host_memory"));
}

}  // namespace tracekern
