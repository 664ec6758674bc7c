// One rank's end of low latency dispatch and combine: state and epochs of both slots, and each kernel as a launch.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "moe/low_latency/family.h"
#include "moe/pipeline.hpp"

namespace tracekern {

template <class OwnBackend, class Comm = CommArgs>
class LowLatencyBuffer : public RankKernels<LowLatencyOn<Comm>, OwnBackend> {
    using Base = RankKernels<LowLatencyOn<Comm>, OwnBackend>;
    using Base::args_, Base::backend_, Base::config_;

public:
    LowLatencyBuffer(typename OwnBackend::Communicator& comm,
                     const LowLatencyConfig& config,
                     OwnBackend backend,
                     uint32_t first_stage)
        : Base(comm, config, std::move(backend), first_stage) {
        args_.bad_choice = static_cast<BadChoice*>(backend_.allocate_for_host(sizeof(BadChoice)));
        for (const uint32_t fp8 : {0, 1}) {
            config_.fp8 = fp8;
            this->prepare();
        }
        reset();
    }

    void reset() {
        this->reset_state();
        for (uint64_t& last : last_epoch_) last = kNeverEpoch;
        *args_.bad_choice = {};
    }

    // Launches the kernels of a call, one after the other. traces: one for each of them.
    void run(const std::vector<LowLatencyStage>& stages,
             const LowLatencyCall& call,
             bool fp8,
             const std::vector<TraceChoice>& traces,
             uint64_t stream) {
        this->begin_launches(stream);
        args_.call = call;
        config_.fp8 = fp8;
        for (size_t i = 0; i < stages.size(); ++i) {
            this->launch(stages[i], traces.at(i));
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
    uint64_t last_epoch_[kNumSlots];
};

}  // namespace tracekern
