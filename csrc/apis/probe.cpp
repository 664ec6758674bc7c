// What a span costs on the CPU backend; csrc/apis/capture.cu has the GPU's.
#include "trace/probe.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <vector>

#include "apis/names.hpp"
#include "apis/register.hpp"
#include "platform/cpu_executor.hpp"

namespace py = pybind11;
using namespace tracekern;  // NOLINT: the module's own file

namespace {

template <class Rec>
double time_ms(const ProbeArgs& args, typename Rec::Args trace) {
    const auto start = std::chrono::steady_clock::now();
    launch_cpu(CpuLaunch{}, [&](Warp& warp) { probe_spans<Rec>(warp, args, trace); });
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

template <class Rec>
py::tuple time_probe(RecordFormat format, uint32_t num_regions, uint32_t num_steps, uint32_t num_rounds) {
    const uint32_t records_per_track = records_per_span(format) * num_regions;
    std::vector<WideRecord> records(records_per_track);
    TrackHeader header{};
    float sink = 0;
    LaunchDescriptor launch{};
    launch.region.headers = &header;
    launch.region.records = records.data();
    launch.event_mask = ~uint64_t{0};
    launch.records_per_track = records_per_track;
    launch.block_stop = launch.block_step = launch.warps_per_block = 1;
    launch.role_mask = ~0u;
    const ProbeArgs args{&sink, num_regions, num_steps, 0.5f};
    std::vector<double> off_ms, on_ms;
    for (uint32_t round = 0; round < num_rounds; ++round) {
        off_ms.push_back(time_ms<Recorder<false>>(args, {}));
        on_ms.push_back(time_ms<Rec>(args, {launch}));
    }
    return py::make_tuple(off_ms, on_ms);
}

// One warp; (ms without spans, ms with), a pair a round.
py::tuple probe_times(uint32_t num_regions, uint32_t num_steps, uint32_t num_rounds, const std::string& record_format) {
    const auto format = enum_named<RecordFormat>("record_format", record_format, kRecordFormatNames);
    switch (format) {
        case RecordFormat::ring:
            return time_probe<Recorder<true, RecordFormat::ring>>(format, num_regions, num_steps, num_rounds);
        case RecordFormat::cycles:
            return time_probe<Recorder<true, RecordFormat::cycles>>(format, num_regions, num_steps, num_rounds);
        default:
            return time_probe<Recorder<true>>(format, num_regions, num_steps, num_rounds);
    }
}

}  // namespace

namespace tracekern {

void register_probe(py::module_& module) {
    module.def("probe_times",
               &probe_times,
               py::kw_only(),
               py::arg("num_regions"),
               py::arg("num_steps"),
               py::arg("num_rounds"),
               py::arg("record_format"));
}

}  // namespace tracekern
