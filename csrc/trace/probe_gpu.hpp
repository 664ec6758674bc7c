// Times the probe kernel on a GPU, with spans and without, in turns.
#pragma once

#include <optional>
#include <vector>

#include "platform/gpu_host.hpp"
#include "trace/kernel_table.hpp"
#include "trace/probe.h"

namespace tracekern {

struct ProbePlan {
    uint32_t warps_per_sm;
    uint32_t num_regions;
    uint32_t num_steps;
    uint32_t num_rounds;
    RecordFormat format;
    bool in_host_memory;
};

struct ProbeTimes {
    std::vector<double> off_ms, on_ms;  // of one launch, a pair a round
};

// One block an SM, on all of them.
inline ProbeTimes time_probe(const ProbePlan& plan) {
    const uint32_t num_blocks = num_multiprocessors();
    const uint32_t num_tracks = num_blocks * plan.warps_per_sm;
    const uint32_t records_per_track = records_per_span(plan.format) * plan.num_regions;
    const uint64_t num_bytes = uint64_t{num_tracks} * records_per_track * sizeof(WideRecord);
    std::optional<MappedMemory> on_host;
    std::optional<DeviceMemory> on_device;
    DeviceMemory headers(uint64_t{num_tracks} * sizeof(TrackHeader)), sink(num_tracks * sizeof(float));

    LaunchDescriptor launch{};
    launch.region.headers = headers.as<TrackHeader>();
    launch.region.records = plan.in_host_memory ? on_host.emplace(num_bytes).as<WideRecord>()
                                                : on_device.emplace(num_bytes).as<WideRecord>();
    launch.event_mask = ~uint64_t{0};
    launch.records_per_track = records_per_track;
    launch.warps_per_block = static_cast<uint16_t>(plan.warps_per_sm);
    launch.block_stop = num_blocks;
    launch.block_step = 1;
    launch.role_mask = ~0u;

    ProbeArgs args{sink.as<float>(), plan.num_regions, plan.num_steps, 0.5f};
    LaunchSize size{num_blocks, plan.warps_per_sm};
    const SideStream stream;
    const auto time_ms = [&](bool traced) {
        const DeviceTimer timer(stream);
        launch_kernel(probe_kernel(traced, plan.format),
                      {num_blocks, plan.warps_per_sm * kLanes, 0, stream.handle()},
                      {&args, &size, &launch});
        return timer.stop_ms();
    };
    ProbeTimes times;
    for (uint32_t launch = 0; launch < 20; ++launch) time_ms(launch % 2);  // loads the kernels, wakes the device up
    for (uint32_t round = 0; round < plan.num_rounds; ++round) {
        const bool traced_first = round % 2;
        const double first_ms = time_ms(traced_first), second_ms = time_ms(!traced_first);
        times.off_ms.push_back(traced_first ? second_ms : first_ms);
        times.on_ms.push_back(traced_first ? first_ms : second_ms);
    }
    return times;
}

}  // namespace tracekern
