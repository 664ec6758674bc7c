// Pipelines on the CPU backend.
#pragma once

#include <cstring>
#include <deque>
#include <vector>

#include "comm/communicator_cpu.hpp"
#include "moe/pipeline.hpp"

namespace tracekern {

class PipelineBackendCpu {
public:
    using Communicator = CpuCommunicator;

    explicit PipelineBackendCpu(CpuExecutor executor) : executor_(executor) {}

    // Zeroed, aligned for every number, and there for as long as the pipeline.
    void* allocate(uint64_t bytes) {
        return memory_.emplace_back((bytes + sizeof(Vector16) - 1) / sizeof(Vector16)).data();
    }
    void* allocate_for_host(uint64_t bytes) { return allocate(bytes); }
    void copy_to(void* to, const void* from, uint64_t bytes) { memcpy(to, from, bytes); }
    void clear(void* at, uint64_t bytes) { memset(at, 0, bytes); }
    void clear_before_launch(void* at, uint64_t bytes) { clear(at, bytes); }
    void use_stream(uint64_t) {}

    template <class Family>
    void prepare(const Communicator&, const typename Family::Config&, const typename Family::Args&) {}

    template <class Family, class Body>
    void launch(Communicator& comm,
                const typename Family::Config& config,
                const typename Family::Args& args,
                TraceChoice trace) {
        CpuLaunch launch{config.blocks_of(Body::kStage), config.warps_per_block, 0, executor_};
        launch.shared_bytes = Body::shared_bytes(args, config.warps_per_block);
        with_recorder(trace, [&]<class Rec>(typename Rec::Args trace_args) {
            comm.launch(launch, [&](Warp& warp) { Body::template run<Rec>(warp, args, trace_args); });
        });
    }

private:
    const CpuExecutor executor_;
    std::deque<std::vector<Vector16>> memory_;
};

template <class Family>
using PipelineCpu = Pipeline<Family, PipelineBackendCpu>;

}  // namespace tracekern
