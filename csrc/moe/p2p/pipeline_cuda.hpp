// The P2P pipeline on a GPU: one rank's workspace in device memory, and each stage as a launch on a stream.
#pragma once

#include <algorithm>
#include <string>

#include "comm/communicator_cuda.hpp"
#include "moe/p2p/config.h"
#include "moe/p2p/kernel_table.hpp"
#include "moe/p2p/stages.h"

namespace tracekern {

class P2PPipelineCuda {
public:
    P2PPipelineCuda(CudaCommunicator& comm, const P2PConfig& config)
        : comm_(comm),
          config_(config),
          layout_(P2PLayout::make(config.shape, config.variant, config.partitions)),
          counters_(counter_bytes()),
          row_origin_((is_deduplicated(config.variant) ? 1 : config.shape.max_rows()) * sizeof(RowOrigin)),
          expert_rows_(std::max<uint64_t>(expert_row_bytes(config.shape, config.variant), 1)) {
        args_.shape = config.shape;
        args_.layout = layout_;
        args_.state = counters_.as<P2PState>();
        args_.set_counters(reinterpret_cast<uint32_t*>(args_.state + 1));
        args_.row_origin = row_origin_.as<RowOrigin>();
        args_.expert_rows = expert_rows_.as<char>();
        check_residency();
        reset();
    }
    P2PPipelineCuda(const P2PPipelineCuda&) = delete;

    // Collective, with all devices idle.
    void reset() {
        epoch_ = kFirstEpoch;
        clear_device(args_.state, counter_bytes());
        const P2PState state{epoch_, 0, 0, make_flag(kNeverEpoch, 0)};
        copy_to_device(args_.state, &state, sizeof(state));
        const size_t count = (args_.layout.flags_end - args_.layout.count_flags) / sizeof(uint64_t);
        const std::vector<uint64_t> flags(count, make_flag(kNeverEpoch, 0));
        char* heap = comm_.args().heap[comm_.args().rank];
        copy_to_device(heap + args_.layout.count_flags, flags.data(), count * sizeof(uint64_t));
    }

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
    }

    void run(P2PStage stage, uint64_t descriptor, RecordFormat format, uint64_t stream) {
        args_.comm = comm_.args();
        if (stage == P2PStage::dispatch_send && !is_fused(config_.variant)) {
            clear_device_on(stream, args_.send_count, config_.shape.num_ranks * sizeof(uint32_t));
        }
        LaunchSize size{config_.num_blocks, config_.warps_per_block};
        const char* body = descriptor == 0 ? "off" : kRecordFormatNames[static_cast<uint32_t>(format)];
        launch_kernel(kernel_of(stage, body),
                      config_.num_blocks,
                      config_.warps_per_block * 32,
                      shared_bytes(stage),
                      stream,
                      {trace_argument(descriptor), &args_, &size});
        if (stage == stages_of(config_.variant).back()) epoch_ = next_epoch(epoch_);
    }

    // Of the next call.
    uint32_t epoch() const { return epoch_; }

private:
    // Of the state and the counters behind it.
    uint64_t counter_bytes() const {
        return sizeof(P2PState) + P2PArgs::num_counters(config_.shape, layout_) * sizeof(uint32_t);
    }
    uint64_t shared_bytes(P2PStage stage) const {
        return stage_shared_bytes(stage, config_.shape, layout_, config_.warps_per_block);
    }
    const void* kernel_of(P2PStage stage, const std::string& body) const {
        std::string name = std::string("p2p_") + kP2PStageNames[static_cast<uint32_t>(stage)];
        const bool moves_only = stage <= P2PStage::dispatch_recv || stage == P2PStage::dispatch;
        const auto add = [&](const char* part) { name += std::string("_") + part; };
        if (stage != P2PStage::scale_experts) add(kVariantNames[static_cast<uint32_t>(config_.variant)]);
        if (!moves_only) add(kNumberNames[static_cast<uint32_t>(config_.number)]);
        return p2p_kernels().at(name + "_" + body);
    }
    // All blocks of a kernel that waits must be on the device at once. Asking also loads all bodies: loading one later
    // could have to wait for a kernel that spins.
    void check_residency() const {
        for (const P2PStage stage : stages_of(config_.variant)) {
            for (const char* body : {"off", "wide", "ring"}) {
                const uint32_t room =
                    resident_blocks(kernel_of(stage, body), config_.warps_per_block * 32, shared_bytes(stage));
                if (room < config_.num_blocks) {
                    throw std::invalid_argument(std::string(kP2PStageNames[static_cast<uint32_t>(stage)]) + ": " +
                                                std::to_string(config_.num_blocks) + " blocks of " +
                                                std::to_string(config_.warps_per_block) + " warps; the device holds " +
                                                std::to_string(room) + " at once; take fewer");
                }
            }
        }
    }

    CudaCommunicator& comm_;
    const P2PConfig config_;
    const P2PLayout layout_;
    DeviceMemory counters_, row_origin_, expert_rows_;
    P2PArgs args_{};
    uint32_t epoch_ = kFirstEpoch;
};

}  // namespace tracekern
