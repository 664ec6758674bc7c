// The host's side of a traced CUDA graph: the ring that it fills, and what came of it. trace/graph.h has the device's.
#pragma once

#include <memory>
#include <vector>

#include "platform/gpu_host.hpp"
#include "trace/graph.h"
#include "trace/kernel_table.hpp"

namespace tracekern {

class GraphRing {
public:
    // For a graph of at most max_launches traced launches.
    GraphRing(uint32_t num_slots, uint32_t max_launches)
        : control_(sizeof(GraphControl)),
          ring_(uint64_t{num_slots} * max_launches * sizeof(LaunchDescriptor)),
          current_(max_launches * sizeof(LaunchDescriptor)),
          spare_(max_launches * sizeof(LaunchDescriptor)),
          state_(sizeof(GraphTrace)),
          arguments_(max_launches) {
        trace_.control = control_.as<GraphControl>();
        trace_.ring = ring_.as<LaunchDescriptor>();
        trace_.current = current_.as<LaunchDescriptor>();
        trace_.spare = spare_.as<LaunchDescriptor>();
        trace_.num_slots = num_slots;
        for (uint32_t i = 0; i < max_launches; ++i) arguments_[i].of_replay = trace_.current + i;
        load_kernel(graph_advance_kernel());  // not while a stream is captured
        upload();
    }
    GraphRing(const GraphRing&) = delete;

    // Address of the descriptor that the kernel of launch `idx` of the graph gets: the way to that of each replay.
    uint64_t descriptor(uint32_t idx) const { return reinterpret_cast<uint64_t>(&arguments_.at(idx)); }

    // The graph's first node; called while `stream` is captured.
    void add_first_node(uint64_t stream) { launch_advance(stream, true); }

    // The graph is captured: what its launches count with where no set is ready, one descriptor each.
    void finish_capture(const LaunchDescriptor* count_only,
                        const std::vector<uint32_t>& num_tracks,
                        uint64_t mirror_offset) {
        std::vector<LaunchDescriptor> spare(count_only, count_only + num_tracks.size());
        for (size_t i = 0; i < spare.size(); ++i) {
            counters_.push_back(std::make_unique<DeviceMemory>(uint64_t{num_tracks[i]} * sizeof(TrackHeader)));
            spare[i].headers = counters_.back()->as<TrackHeader>();
            spare[i].records = nullptr;
            spare[i].records_per_track = 0;
        }
        copy_to_device(spare_.as<void>(), spare.data(), spare.size() * sizeof(LaunchDescriptor));
        trace_.num_launches = static_cast<uint32_t>(spare.size());
        trace_.mirror_offset = mirror_offset;
        upload();
    }

    // Lays one set ready; false, and nothing is done, when all slots hold sets that no replay has taken yet.
    bool place(const LaunchDescriptor* set) {
        GraphControl* control = trace_.control;
        const uint64_t placed = control->placed;
        if (placed - __atomic_load_n(&control->taken, __ATOMIC_ACQUIRE) >= trace_.num_slots) return false;
        const uint64_t slot = placed % trace_.num_slots * trace_.num_launches;
        memcpy(ring_.as<LaunchDescriptor>() + slot, set, trace_.num_launches * sizeof(LaunchDescriptor));
        __atomic_store_n(&control->placed, placed + 1, __ATOMIC_RELEASE);
        return true;
    }

    // All replays are through: counts the last one, too.
    void settle() {
        launch_advance(0, false);
        synchronize_device();
    }
    const GraphControl& control() const { return *trace_.control; }

private:
    void upload() { copy_to_device(state_.as<void>(), &trace_, sizeof(trace_)); }
    void launch_advance(uint64_t stream, bool begins_replay) {
        auto* graph = state_.as<GraphTrace>();
        LaunchSize size{1, 1};
        launch_kernel(graph_advance_kernel(), 1, 32, 0, stream, {&graph, &size, &begins_replay});
    }

    const MappedMemory control_, ring_;
    const DeviceMemory current_, spare_, state_;
    std::vector<std::unique_ptr<DeviceMemory>> counters_;
    std::vector<LaunchDescriptor> arguments_;  // [max_launches]
    GraphTrace trace_{};
};

}  // namespace tracekern
