// One rank's end of low latency dispatch and combine: state and epochs of both slots, and each kernel as a launch.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "moe/low_latency/family.h"
#include "moe/pipeline.hpp"

namespace tracekern {

// Backend: PipelineBackendCpu or PipelineBackendCuda.
template <class Backend>
class LowLatencyBuffer {
public:
    // first_stage: of the kernels of this family among all that use `comm`, for its fault records.
    LowLatencyBuffer(typename Backend::Communicator& comm,
                     const LowLatencyConfig& config,
                     Backend backend,
                     uint32_t first_stage)
        : comm_(comm),
          config_(config),
          backend_(std::move(backend)),
          first_stage_(first_stage),
          args_(LowLatency::make_args(config, backend_)) {
        args_.bad_choice = static_cast<BadChoice*>(backend_.allocate_for_host(sizeof(BadChoice)));
        for (const uint32_t fp8 : {0, 1}) {
            config_.fp8 = fp8;
            backend_.template prepare<LowLatency>(comm_, config_, args_);
        }
        reset();
    }
    LowLatencyBuffer(const LowLatencyBuffer&) = delete;

    // Sets this rank's flags and counters to the state before the first call. Collective, like the communicator's
    // clear_control(): with all devices idle.
    void reset() {
        set_comm_args();
        for (uint64_t& last : last_epoch_) last = kNeverEpoch;
        LowLatency::reset(args_, backend_);
        *args_.bad_choice = {};
    }

    // Launches the kernels of a call, one after the other. traces: one for each of them.
    void run(const std::vector<LowLatencyStage>& stages,
             const LowLatencyCall& call,
             bool fp8,
             const std::vector<TraceChoice>& traces,
             uint64_t stream) {
        set_comm_args();
        backend_.use_stream(stream);
        args_.call = call;
        config_.fp8 = fp8;
        for (size_t i = 0; i < stages.size(); ++i) {
            LowLatency::with_kernels(config_, [&]<class Kernels>(Kernels) {
                Kernels::with(stages[i], [&]<class Body>() {
                    backend_.template launch<LowLatency, Body>(comm_, config_, args_, traces.at(i));
                });
            });
            if (stages[i] == LowLatencyStage::dispatch || stages[i] == LowLatencyStage::dispatch_send) {
                last_epoch_[call.slot] = epoch_behind(last_epoch_[call.slot], call.slot);
            }
        }
    }

    // Of the slot's next dispatch, as records keep it.
    uint32_t epoch(uint32_t slot) const { return epoch_on_record(epoch_behind(last_epoch_[slot], slot)); }

    // The first choice of a token that no kernel followed, once.
    std::optional<BadChoice> take_bad_choice() {
        if (!__atomic_load_n(&args_.bad_choice->is_whole, __ATOMIC_ACQUIRE)) return std::nullopt;
        return std::exchange(*args_.bad_choice, {});
    }

private:
    void set_comm_args() {
        args_.comm = comm_.args();
        args_.comm.first_stage = first_stage_;
    }

    typename Backend::Communicator& comm_;
    LowLatencyConfig config_;
    Backend backend_;
    const uint32_t first_stage_;
    LowLatencyArgs args_;
    uint64_t last_epoch_[kNumSlots];
};

}  // namespace tracekern
