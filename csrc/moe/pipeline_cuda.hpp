// Pipelines on a GPU.
#pragma once

#include <algorithm>
#include <deque>
#include <stdexcept>
#include <string>

#include "comm/communicator_cuda.hpp"
#include "comm/mutation.h"
#include "moe/pipeline.hpp"

namespace tracekern {

// moe/entry.h defines these, in the family's kernels.cu alone: elsewhere each kernel would be compiled once more.
//
// The entry point of a stage of a call, with the body that a launch of that kind runs.
template <class Family>
const void* kernel_address(const typename Family::Config& config, typename Family::Stage stage, BodyKind kind);

#ifdef TK_PLANTED_FAULTS
template <class Family>
void plant_in_kernels(PlantedFault fault);
#endif

template <class Body, class Config, class Args>
LaunchOptions launch_options(const Config& config, const Args& args, uint64_t stream = 0) {
    LaunchOptions options{config.blocks_of(Body::kStage), config.warps_per_block * kLanes};
    options.shared_bytes = Body::shared_bytes(args, config.warps_per_block);
    options.stream = stream;
    options.is_cooperative = true;
    return options;
}

// Calls visit(stage, room) for each body of each kernel of a call with the blocks of it that the current device holds
// at once. Asking also loads the bodies: loading one later could have to wait for a kernel that spins.
template <class Family, class Visit>
void for_each_room(const typename Family::Config& config, const typename Family::Args& args, Visit visit) {
    Family::with_kernels(config, [&]<class Kernels>(Kernels) {
        Kernels::template for_each([&]<class Body>() {
            const LaunchOptions launch = launch_options<Body>(config, args);
            for_each_body_kind<typename Family::Bodies>([&](BodyKind kind) {
                visit(Body::kStage, resident_blocks(kernel_address<Family>(config, Body::kStage, kind), launch));
            });
        });
    });
}

class PipelineBackendCuda {
public:
    using Communicator = CudaCommunicator;

    // Zeroed device memory that is there for as long as the pipeline.
    void* allocate(uint64_t bytes) { return memory_.emplace_back(std::max<uint64_t>(bytes, 1)).as<void>(); }
    // Zeroed memory that the host reads while kernels write to it.
    void* allocate_for_host(uint64_t bytes) { return mapped_.emplace_back(bytes).as<void>(); }
    void copy_to(void* to, const void* from, uint64_t bytes) { copy_to_device(to, from, bytes); }
    void clear(void* at, uint64_t bytes) { clear_device(at, bytes); }
    void clear_before_launch(void* at, uint64_t bytes) { clear_device_on(stream_, at, bytes); }
    void use_stream(uint64_t stream) { stream_ = stream; }

    // All blocks of kernels that wait for each other must be on the device at once: those of one launch, and those of
    // all ranks that are resident on it. These may be in different kernels, of which none takes more than its share of
    // an SM: what has room beside itself as often has it beside the others.
    template <class Family>
    void prepare(const Communicator& comm, const typename Family::Config& config, const typename Family::Args& args) {
        for_each_room<Family>(config, args, [&](typename Family::Stage stage, uint32_t room) {
            const uint64_t wanted = uint64_t{config.blocks_of(stage)} * comm.num_residents();
            if (room < wanted) refuse<Family>(stage, comm, config, room);
        });
    }

    template <class Family, class Body>
    void launch(Communicator&, const typename Family::Config& config, typename Family::Args& args, TraceChoice trace) {
        LaunchSize size{config.blocks_of(Body::kStage), config.warps_per_block};
        const BodyKind kind = bundled_body<typename Family::Bodies>(trace);
        TraceArgument argument(trace, kind.extent);
        launch_kernel(kernel_address<Family>(config, Body::kStage, kind),
                      launch_options<Body>(config, args, stream_),
                      {argument.data(), &args, &size});
    }

private:
    template <class Family>
    [[noreturn]] static void refuse(typename Family::Stage stage,
                                    const Communicator& comm,
                                    const typename Family::Config& config,
                                    uint32_t room) {
        const uint32_t residents = comm.num_residents();
        throw std::invalid_argument(std::string(Family::kStageNames[static_cast<uint32_t>(stage)]) + ": " +
                                    (residents > 1 ? std::to_string(residents) + " ranks of " : "") +
                                    std::to_string(config.blocks_of(stage)) + " blocks of " +
                                    std::to_string(config.warps_per_block) + " warps; the device holds " +
                                    std::to_string(room) + " at once; take fewer");
    }

    std::deque<DeviceMemory> memory_;
    std::deque<MappedMemory> mapped_;
    uint64_t stream_ = 0;
};

template <class Family>
using PipelineCuda = Pipeline<Family, PipelineBackendCuda>;

}  // namespace tracekern
