// The host's side of a traced CUDA graph: the ring that it fills, and what came of it. trace/graph.h has the device's.
#pragma once

#include <algorithm>
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
          ring_(uint64_t{num_slots} * max_launches * sizeof(ReplayRegion)),
          next_(max_launches * sizeof(ReplayRegion)),
          current_(max_launches * sizeof(ReplayRegion)),
          spare_(max_launches * sizeof(ReplayRegion)),
          state_(sizeof(GraphTrace)),
          arguments_(max_launches) {
        trace_.control = control_.as<GraphControl>();
        trace_.ring = ring_.as<ReplayRegion>();
        trace_.next = next_.as<ReplayRegion>();
        trace_.current = current_.as<ReplayRegion>();
        trace_.spare = spare_.as<ReplayRegion>();
        trace_.num_slots = num_slots;
        // Not later, while a stream is captured.
        for (const void* kernel : {begin_replay_kernel(), prepare_replay_kernel()}) load_kernel(kernel);
        upload();
    }
    GraphRing(const GraphRing&) = delete;

    // Capturing `stream` begins: the first node, and beside all that follows the one that prepares the next replay.
    void begin_capture(uint64_t stream) {
        auto* state = state_.as<GraphTrace>();
        LaunchSize size{1, 1};
        launch_kernel(begin_replay_kernel(), {1, kLanes, 0, stream}, {&state, &size});
        begun_.record(stream);
        begun_.hold(beside_.handle());
        launch_prepare(beside_.handle(), false);
        prepared_.record(beside_.handle());
    }
    // All of it is captured.
    void end_capture(uint64_t stream) { prepared_.hold(stream); }

    // The graph's next launch, of which all is given but the region: address of the descriptor that its kernel gets.
    uint64_t add_launch(const LaunchDescriptor& launch, uint32_t num_tracks) {
        LaunchDescriptor& argument = arguments_.at(trace_.num_launches);
        argument = launch;
        argument.block_step |= kInGraph;
        argument.of_replay = trace_.current + trace_.num_launches++;
        first_counters_.push_back(trace_.num_counters);
        trace_.num_counters += num_tracks;
        return reinterpret_cast<uint64_t>(&argument);
    }

    // No launch will be added. mirror_offset: see GraphTrace. counts: what a replay without regions would have recorded
    // is added up; kernels with rings count nothing there, and to look costs a replay tens of us.
    void finish(uint64_t mirror_offset, bool counts) {
        counters_ = std::make_unique<DeviceMemory>(std::max(trace_.num_counters, 1u) * sizeof(TrackHeader));
        trace_.counters = counters_->as<TrackHeader>();
        std::vector<ReplayRegion> spare;
        for (const uint32_t first : first_counters_) {
            spare.push_back({reinterpret_cast<uint64_t>(trace_.counters + first), nullptr});
        }
        copy_to_device(spare_.as<void>(), spare.data(), spare.size() * sizeof(ReplayRegion));
        trace_.mirror_offset = mirror_offset;
        if (!counts) trace_.num_counters = 0;
        upload();
    }

    // Lays one set ready; false, and nothing is done, when all slots hold sets that the device has not fetched yet.
    bool place(const ReplayRegion* set) {
        GraphControl* control = trace_.control;
        const uint64_t placed = control->placed;
        if (placed - __atomic_load_n(&control->fetched, __ATOMIC_ACQUIRE) >= trace_.num_slots) return false;
        const uint64_t slot = placed % trace_.num_slots * trace_.num_launches;
        memcpy(ring_.as<ReplayRegion>() + slot, set, trace_.num_launches * sizeof(ReplayRegion));
        __atomic_store_n(&control->placed, placed + 1, __ATOMIC_RELEASE);
        return true;
    }

    // Sets that replays got so far. All but the last of them hold what no kernel will write to any more.
    uint64_t num_used() const { return __atomic_load_n(&trace_.control->used, __ATOMIC_ACQUIRE); }

    // All replays are through: counts the last one, too.
    void settle() {
        launch_prepare(0, true);
        synchronize_device();
    }
    const GraphControl& control() const { return *trace_.control; }

private:
    void upload() { copy_to_device(state_.as<void>(), &trace_, sizeof(trace_)); }
    void launch_prepare(uint64_t stream, bool is_last) {
        auto* state = state_.as<GraphTrace>();
        LaunchSize size{1, 1};
        launch_kernel(prepare_replay_kernel(), {1, kLanes, 0, stream}, {&state, &size, &is_last});
    }

    const MappedMemory control_, ring_;
    const DeviceMemory next_, current_, spare_, state_;
    const SideStream beside_;
    const StreamEvent begun_, prepared_;
    std::unique_ptr<DeviceMemory> counters_;
    std::vector<LaunchDescriptor> arguments_;  // [max_launches] of the graph's kernels
    std::vector<uint32_t> first_counters_;     // [num_launches]
    GraphTrace trace_{};
};

}  // namespace tracekern
