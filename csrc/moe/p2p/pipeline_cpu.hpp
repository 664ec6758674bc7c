// The P2P pipeline on the CPU backend: one rank's workspace, and each stage as a launch.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "comm/communicator_cpu.hpp"
#include "moe/p2p/combine.h"
#include "moe/p2p/config.h"
#include "moe/p2p/dispatch.h"
#include "moe/p2p/pipelined.h"
#include "moe/p2p/stages.h"

namespace tracekern {

class P2PPipelineCpu {
public:
    P2PPipelineCpu(CpuCommunicator& comm, const P2PConfig& config, CpuExecutor executor)
        : comm_(comm), config_(config), executor_(executor) {
        const MoeShape& shape = config.shape;
        args_.shape = shape;
        args_.layout = P2PLayout::make(shape, config.variant, config.partitions);
        counters_.resize(P2PArgs::num_counters(shape, args_.layout));
        row_origin_.resize(is_deduplicated(config.variant) ? 0 : shape.max_rows());
        const uint64_t expert_bytes = expert_row_bytes(shape, config.variant);
        expert_rows_.resize((expert_bytes + sizeof(Vector16) - 1) / sizeof(Vector16));
        args_.state = &state_;
        args_.set_counters(counters_.data());
        args_.row_origin = row_origin_.data();
        args_.expert_rows = reinterpret_cast<char*>(expert_rows_.data());
        reset();
    }
    P2PPipelineCpu(const P2PPipelineCpu&) = delete;

    // Sets this rank's flags and counters to the state before the first call. Collective, like
    // CpuCommunicator::clear_control.
    void reset() {
        state_ = P2PState{kFirstEpoch, 0, 0, make_flag(kNeverEpoch, 0)};
        std::fill(counters_.begin(), counters_.end(), 0);
        char* heap = comm_.args().heap[comm_.args().rank];
        auto* flags = reinterpret_cast<uint64_t*>(heap + args_.layout.count_flags);
        const size_t count = (args_.layout.flags_end - args_.layout.count_flags) / sizeof(uint64_t);
        std::fill(flags, flags + count, make_flag(kNeverEpoch, 0));
    }

    // The tensors of the next call; P2PArgs gives shapes.
    void set_call(const void* x,
                  const int32_t* topk_idx,
                  const float* topk_weights,
                  const float* expert_scale,
                  void* out,
                  uint32_t num_tokens) {
        args_.x = static_cast<const char*>(x);
        args_.topk_idx = topk_idx;
        args_.topk_weights = topk_weights;
        args_.expert_scale = expert_scale;
        args_.out = static_cast<char*>(out);
        args_.num_tokens = num_tokens;
        if (!is_fused(config_.variant)) std::fill_n(args_.send_count, config_.shape.num_ranks, 0u);
    }

    void run(P2PStage stage, const TraceChoice& trace) {
        args_.comm = comm_.args();
        switch (config_.variant) {
            case P2PVariant::flag:
                return run_variant<P2PVariant::flag>(stage, trace);
            case P2PVariant::token:
                return run_variant<P2PVariant::token>(stage, trace);
            case P2PVariant::fused:
                return run_variant<P2PVariant::fused>(stage, trace);
            case P2PVariant::balanced:
                return run_variant<P2PVariant::balanced>(stage, trace);
            case P2PVariant::dedup:
                return run_variant<P2PVariant::dedup>(stage, trace);
            case P2PVariant::reduce:
                return run_variant<P2PVariant::reduce>(stage, trace);
            case P2PVariant::pipelined:
                return run_variant<P2PVariant::pipelined>(stage, trace);
        }
    }

    uint32_t epoch() const { return state_.epoch; }

private:
    // Stages that move rows know no number type: compiled once a variant.
    template <P2PVariant kVariant>
    void run_variant(P2PStage stage, const TraceChoice& trace) {
        if constexpr (kVariant == P2PVariant::dedup || kVariant == P2PVariant::reduce) {
            if (stage == P2PStage::dispatch) {
                return launch(stage, trace, [&]<class Rec>(Warp& warp, typename Rec::Args trace_args) {
                    dispatch<kVariant, Rec>(warp, args_, trace_args);
                });
            }
        } else if constexpr (!is_deduplicated(kVariant)) {
            if (stage == P2PStage::dispatch_send) {
                return launch(stage, trace, [&]<class Rec>(Warp& warp, typename Rec::Args trace_args) {
                    dispatch_send<kVariant, Rec>(warp, args_, trace_args);
                });
            }
            if (stage == P2PStage::dispatch_recv) {
                return launch(stage, trace, [&]<class Rec>(Warp& warp, typename Rec::Args trace_args) {
                    dispatch_recv<kVariant, Rec>(warp, args_, trace_args);
                });
            }
        }
        switch (config_.number) {
            case NumberType::bf16:
                return run_number<kVariant, BFloat16>(stage, trace);
#ifdef TK_SAMPLE  // for tests that compile often, see moe/p2p/kernels.cu
            default:
                throw std::invalid_argument("built for bf16 alone");
#else
            case NumberType::fp32:
                return run_number<kVariant, float>(stage, trace);
            case NumberType::fp16:
                return run_number<kVariant, Half>(stage, trace);
#endif
        }
    }

    template <P2PVariant kVariant, class T>
    void run_number(P2PStage stage, const TraceChoice& trace) {
        launch(stage, trace, [&]<class Rec>(Warp& warp, typename Rec::Args trace_args) {
            if constexpr (is_pipelined(kVariant)) {
                if (stage == P2PStage::dispatch_combine) return dispatch_combine<T, Rec>(warp, args_, trace_args);
            } else if constexpr (is_deduplicated(kVariant)) {
                if (stage == P2PStage::combine) return combine<T, kVariant, Rec>(warp, args_, trace_args);
            } else {
                if (stage == P2PStage::scale_experts) return scale_experts<T, Rec>(warp, args_, trace_args);
                if (stage == P2PStage::combine_send) return combine_send<T, kVariant, Rec>(warp, args_, trace_args);
                if (stage == P2PStage::combine_recv) return combine_recv<T, kVariant, Rec>(warp, args_, trace_args);
            }
        });
    }

    // Calls body.operator()<Rec>(warp, args) in every warp, with the recorder that `trace` asks for.
    template <class Body>
    void launch(P2PStage stage, const TraceChoice& trace, const Body& body) {
        CpuLaunch launch{config_.num_blocks, config_.warps_per_block, 0, executor_};
        launch.shared_bytes = stage_shared_bytes(stage, args_.shape, args_.layout, config_.warps_per_block);
        with_recorder(trace, [&]<class Rec>(typename Rec::Args trace_args) {
            comm_.launch(launch, [&](Warp& warp) { body.template operator()<Rec>(warp, trace_args); });
        });
    }

    CpuCommunicator& comm_;
    const P2PConfig config_;
    const CpuExecutor executor_;
    P2PArgs args_{};
    P2PState state_{};
    std::vector<uint32_t> counters_;
    std::vector<RowOrigin> row_origin_;
    std::vector<Vector16> expert_rows_;
};

}  // namespace tracekern
