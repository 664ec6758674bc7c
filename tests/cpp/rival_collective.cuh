// Kernels of another library beside those of the ranks: a collective whose blocks each need an SM of their own and wait
// for those of all ranks. Half of the ranks launch it before what they compute, half after, as two streams of a program
// may: the order in which both libraries wait for ever where the SMs do not suffice for both.
#pragma once

#include <vector>

#include "platform/device.h"
#include "platform/gpu_host.hpp"

namespace tracekern {

struct RivalOptions {
    uint32_t num_blocks = 0;  // of each rank; 0: there are none
    uint64_t timeout_ns = 5'000'000'000u;
};

struct RivalState {
    uint32_t arrived;  // blocks that have started, of all ranks and launches
    uint32_t gave_up;
};

constexpr uint32_t kRivalThreads = 512;

// goal: blocks that will have started once this launch and all before it are there on every rank.
__global__ void __launch_bounds__(kRivalThreads, 1)
    rival_collective(RivalState* state, uint32_t goal, uint64_t timeout_ns) {
    if (threadIdx.x == 0) {
        add_acq_rel_device(&state->arrived, 1u);
        const uint64_t started = read_clock();
        while (load_acquire_system(&state->arrived) < goal && !load_acquire_system(&state->gave_up)) {
            if (read_clock() - started >= timeout_ns) store_release_system(&state->gave_up, 1u);
        }
    }
    __syncthreads();
}

// One of each rank, on a stream of its own.
class Rivals {
public:
    // Allocates and loads everything: nothing may do so while kernels spin.
    Rivals(const RivalOptions& options, uint32_t num_ranks) : options_(options), streams_(num_ranks) {
        int shared_bytes = 0;
        TK_CUDA(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, current_device()));
        shared_bytes_ = static_cast<uint64_t>(shared_bytes);
        // With all the shared memory that a block may have, of which every other block needs some, too.
        const uint32_t room = resident_blocks(kernel(), {1, kRivalThreads, shared_bytes_});
        if (room != num_multiprocessors()) throw std::runtime_error("a rival's block has no SM of its own");
        if (uint64_t{options.num_blocks} * num_ranks > room) {
            throw std::invalid_argument("rival: too many blocks; each needs one of " + std::to_string(room) + " SMs");
        }
    }

    uint32_t num_ranks() const { return static_cast<uint32_t>(streams_.size()); }

    // All ranks launch once before any launches again.
    void launch(uint32_t rank) {
        const uint32_t goal = (num_launched_++ / num_ranks() + 1) * num_ranks() * options_.num_blocks;
        const auto stream = reinterpret_cast<cudaStream_t>(streams_[rank].handle());
        rival_collective<<<options_.num_blocks, kRivalThreads, shared_bytes_, stream>>>(
            state_.as<RivalState>(), goal, options_.timeout_ns);
        TK_CUDA(cudaGetLastError());
    }

    // Waits for all that were launched; whether one of them ran out of time. With nothing else on the device.
    bool gave_up() const {
        for (const SideStream& stream : streams_) stream.synchronize();
        RivalState state;
        copy_to_host(&state, state_.as<void>(), sizeof(state));
        return state.gave_up != 0;
    }

private:
    static const void* kernel() { return reinterpret_cast<const void*>(rival_collective); }

    const RivalOptions options_;
    std::vector<SideStream> streams_;
    uint64_t shared_bytes_ = 0;
    uint32_t num_launched_ = 0;
    const DeviceMemory state_{sizeof(RivalState)};
};

}  // namespace tracekern
