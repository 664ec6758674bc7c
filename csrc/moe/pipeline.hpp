// One rank's pipeline of a family: its workspace, its epoch, and each stage of a call as a launch.
//
// A family is a struct in csrc/moe/<family>/family.h:
//
//   Args, Config, Stage, Variant, Event   what its kernels get, a MoeCall with more; what a pipeline is made of, a
//                                         PipelineConfig with more; its enums
//   Bodies                                the recorders that its kernels are compiled with, see trace/trace_choice.h
//   kName, kVariantNames, kStageNames, kRoleNames, kChannelNames
//   visit_options(config, visit)          calls visit(name, value) for each option of its Config
//   heap_bytes(config)                    of the symmetric heap, on each rank
//   with_kernels(config, f)               calls f(KernelList<...>{}) with the kernels of a call
//   make_args(config, memory)             the arguments that stay, in memory of this rank's own
//   reset(args, memory)                   the state before the first call
//   before(stage, config, args, memory)   what is cleared before a kernel is launched
//
// A backend is where kernels run: PipelineCpu and PipelineCuda name them.
#pragma once

#include <utility>

#include "comm/signal.h"
#include "trace/trace_choice.h"

namespace tracekern {

// What a rank has of a family: its arguments, in memory of its own, and launches.
template <class Family, class OwnBackend>
class RankKernels {
public:
    using Backend = OwnBackend;
    using Config = typename Family::Config;
    using Stage = typename Family::Stage;
    using Args = typename Family::Args;

    RankKernels(const RankKernels&) = delete;

    // For the tensors of the next call, and what a network adds to the communicator's arguments.
    Args& args() { return args_; }

protected:
    // backend: for memory and launches, on the device of `comm`. first_stage: of the kernels of this family among all
    // that use `comm`, for its fault records.
    RankKernels(typename Backend::Communicator& comm, const Config& config, Backend backend, uint32_t first_stage)
        : comm_(comm),
          config_(config),
          backend_(std::move(backend)),
          args_(Family::make_args(config, backend_)),
          first_stage_(first_stage) {}

    // Checks that the kernels of `config_` fit on the device.
    void prepare() { backend_.template prepare<Family>(comm_, config_, args_); }

    // Sets this rank's flags and counters to the state before the first call. Collective, like the communicator's
    // clear_control(): with all devices idle.
    void reset_state() {
        set_comm_args();
        Family::reset(args_, backend_);
    }

    // stream: of the next launches, where the backend has some.
    void begin_launches(uint64_t stream) {
        set_comm_args();
        backend_.use_stream(stream);
    }

    void launch(Stage stage, TraceChoice trace) {
        Family::with_kernels(config_, [&]<class Kernels>(Kernels) {
            Kernels::with(stage,
                          [&]<class Body>() { backend_.template launch<Family, Body>(comm_, config_, args_, trace); });
        });
    }

    typename Backend::Communicator& comm_;
    Config config_;
    Backend backend_;
    Args args_;

private:
    // Each time: the communicator's time limit and the place of its fault record may change.
    void set_comm_args() {
        static_cast<CommArgs&>(args_.comm) = comm_.args();
        args_.comm.first_stage = first_stage_;
    }

    const uint32_t first_stage_;
};

template <class Family, class OwnBackend>
class Pipeline : public RankKernels<Family, OwnBackend> {
    using Base = RankKernels<Family, OwnBackend>;
    using Base::args_, Base::backend_, Base::config_;

public:
    using typename Base::Stage;

    Pipeline(typename OwnBackend::Communicator& comm,
             const typename Base::Config& config,
             OwnBackend backend,
             uint32_t first_stage = 0)
        : Base(comm, config, std::move(backend), first_stage) {
        this->prepare();
        Family::with_kernels(config, [&]<class Kernels>(Kernels) {
            Kernels::for_each([&]<class Body>() { last_stage_ = Body::kStage; });
        });
        reset();
    }

    void reset() {
        epoch_ = kFirstEpoch;
        this->reset_state();
    }

    // Sets the blocks of the next launches of a stage: at most those that the pipeline was made with.
    void set_blocks(Stage stage, uint32_t num_blocks) {
        config_.stage_blocks[static_cast<uint32_t>(stage)] = num_blocks;
    }

    void run(Stage stage, TraceChoice trace, uint64_t stream = 0) {
        this->begin_launches(stream);
        Family::before(stage, config_, args_, backend_);
        this->launch(stage, trace);
        if (stage == last_stage_ && is_last_partition()) epoch_ = next_epoch(epoch_);
    }

    // Of the next call, as records keep it.
    uint32_t epoch() const { return epoch_on_record(epoch_); }

private:
    // Where a call has its kernels once for each partition, these end with the last.
    bool is_last_partition() const {
        if constexpr (requires { args_.is_last_partition(); }) {
            return args_.is_last_partition();
        } else {
            return true;
        }
    }

    Stage last_stage_{};
    uint64_t epoch_ = kFirstEpoch;
};

}  // namespace tracekern
