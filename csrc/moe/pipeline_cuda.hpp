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
const void* kernel_address(const typename Family::Config& config,
                           typename Family::Stage stage,
                           bool is_traced,
                           RecordFormat format);

#ifdef TK_PLANTED_FAULTS
template <class Family>
void plant_in_kernels(PlantedFault fault);
#endif

class PipelineBackendCuda {
public:
    using Communicator = CudaCommunicator;

    // Zeroed device memory that is there for as long as the pipeline.
    void* allocate(uint64_t bytes) { return memory_.emplace_back(std::max<uint64_t>(bytes, 1)).as<void>(); }
    void copy_to(void* to, const void* from, uint64_t bytes) { copy_to_device(to, from, bytes); }
    void clear(void* at, uint64_t bytes) { clear_device(at, bytes); }
    void clear_before_launch(void* at, uint64_t bytes) { clear_device_on(stream_, at, bytes); }
    void use_stream(uint64_t stream) { stream_ = stream; }

    // All blocks of a kernel that waits must be on the device at once. Asking also loads all bodies: loading one later
    // could have to wait for a kernel that spins.
    template <class Family, class Body>
    void prepare(const typename Family::Config& config, const typename Family::Args& args) {
        check_residency<Family, Body>(config, args, false, RecordFormat::span);
        for (const RecordFormat format : kCaptureFormats) check_residency<Family, Body>(config, args, true, format);
    }

    template <class Family, class Body>
    void launch(Communicator&, const typename Family::Config& config, typename Family::Args& args, TraceChoice trace) {
        LaunchSize size{config.num_blocks, config.warps_per_block};
        const void* kernel = kernel_address<Family>(config, Body::kStage, trace.is_traced(), trace.format());
        launch_kernel(kernel, launch_options<Body>(config, args), {trace_argument(trace), &args, &size});
    }

private:
    template <class Body, class Config, class Args>
    LaunchOptions launch_options(const Config& config, const Args& args) const {
        LaunchOptions options{config.num_blocks, config.warps_per_block * 32};
        options.shared_bytes = Body::shared_bytes(args, config.warps_per_block);
        options.stream = stream_;
        options.is_cooperative = true;
        return options;
    }

    template <class Family, class Body>
    void check_residency(const typename Family::Config& config,
                         const typename Family::Args& args,
                         bool is_traced,
                         RecordFormat format) const {
        const void* kernel = kernel_address<Family>(config, Body::kStage, is_traced, format);
        const uint32_t room = resident_blocks(kernel, launch_options<Body>(config, args));
        if (room >= config.num_blocks) return;
        throw std::invalid_argument(std::string(Family::kStageNames[static_cast<uint32_t>(Body::kStage)]) + ": " +
                                    std::to_string(config.num_blocks) + " blocks of " +
                                    std::to_string(config.warps_per_block) + " warps; the device holds " +
                                    std::to_string(room) + " at once; take fewer");
    }

    std::deque<DeviceMemory> memory_;
    uint64_t stream_ = 0;
};

template <class Family>
using PipelineCuda = Pipeline<Family, PipelineBackendCuda>;

}  // namespace tracekern
