// The P2P pipeline on a GPU: one rank's workspace in device memory, and each stage as a launch on a stream.
#pragma once

#include <string>

#include "comm/communicator_cuda.hpp"
#include "moe/p2p/events.h"
#include "moe/p2p/kernel_table.hpp"
#include "moe/p2p/layout.h"

namespace tracekern {

struct CudaGrid {
    uint32_t num_blocks;
    uint32_t warps_per_block;
};

class P2PPipelineCuda {
public:
    P2PPipelineCuda(CudaCommunicator& comm,
                    const MoeShape& shape,
                    P2PVariant variant,
                    const std::string& variant_name,
                    const std::string& number_name,
                    CudaGrid grid)
        : comm_(comm),
          shape_(shape),
          variant_(variant),
          variant_name_(variant_name),
          number_name_(number_name),
          grid_(grid),
          counters_(sizeof(P2PState) + num_counters(shape) * sizeof(uint32_t)),
          row_origin_(shape.max_rows() * sizeof(RowOrigin)),
          expert_rows_(shape.max_rows() * shape.row_bytes()) {
        args_.shape = shape;
        args_.layout = P2PLayout::make(shape);
        args_.state = counters_.as<P2PState>();
        auto* counter = reinterpret_cast<uint32_t*>(args_.state + 1);
        const auto take = [&](size_t count) { return std::exchange(counter, counter + count); };
        args_.send_count = take(shape.num_ranks);
        args_.recv_count = take(shape.num_ranks);
        args_.expert_offset = take(shape.num_local_experts() + 1);
        args_.expert_cursor = take(shape.num_local_experts());
        args_.row_origin = row_origin_.as<RowOrigin>();
        args_.expert_rows = expert_rows_.as<char>();
        check_residency();
        reset();
    }
    P2PPipelineCuda(const P2PPipelineCuda&) = delete;

    // Collective, with all devices idle.
    void reset() {
        epoch_ = kFirstEpoch;
        clear_device(args_.state, sizeof(P2PState) + num_counters(shape_) * sizeof(uint32_t));
        copy_to_device(&args_.state->epoch, &epoch_, sizeof(epoch_));
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
        if (stage == P2PStage::dispatch_send && !is_fused(variant_)) {
            clear_device_on(stream, args_.send_count, shape_.num_ranks * sizeof(uint32_t));
        }
        LaunchSize size{grid_.num_blocks, grid_.warps_per_block};
        const char* body = descriptor == 0 ? "off" : kRecordFormatNames[static_cast<uint32_t>(format)];
        launch_kernel(kernel_of(stage, body),
                      grid_.num_blocks,
                      grid_.warps_per_block * 32,
                      shared_bytes(stage),
                      stream,
                      {&args_, &size, &descriptor});
        if (stage == P2PStage::combine_recv) ++epoch_;
    }

    // Of the next call.
    uint32_t epoch() const { return epoch_; }

private:
    static size_t num_counters(const MoeShape& shape) {
        const size_t num_local = shape.num_local_experts();
        return size_t{2} * shape.num_ranks + 2 * num_local + 1;
    }
    uint64_t shared_bytes(P2PStage stage) const {
        if (stage == P2PStage::dispatch_send) return CountShared::bytes(shape_);
        return stage == P2PStage::combine_recv ? sizeof(ReduceShared) : 0;
    }
    const void* kernel_of(P2PStage stage, const std::string& body) const {
        std::string name = std::string("p2p_") + kP2PStageNames[static_cast<uint32_t>(stage)];
        if (stage != P2PStage::scale_experts) name += "_" + variant_name_;
        if (stage >= P2PStage::scale_experts) name += "_" + number_name_;
        return p2p_kernels().at(name + "_" + body);
    }
    // All blocks of a kernel that waits must be on the device at once. Asking also loads both bodies: loading one later
    // could have to wait for a kernel that spins.
    void check_residency() const {
        for (uint32_t stage = 0; stage < 5; ++stage) {
            for (const char* body : {"off", "wide", "compact", "ring"}) {
                const auto which = static_cast<P2PStage>(stage);
                const uint32_t room =
                    resident_blocks(kernel_of(which, body), grid_.warps_per_block * 32, shared_bytes(which));
                if (room < grid_.num_blocks) {
                    throw std::invalid_argument(std::string(kP2PStageNames[stage]) + ": " +
                                                std::to_string(grid_.num_blocks) + " blocks of " +
                                                std::to_string(grid_.warps_per_block) + " warps; the device holds " +
                                                std::to_string(room) + " at once; take fewer");
                }
            }
        }
    }

    CudaCommunicator& comm_;
    const MoeShape shape_;
    const P2PVariant variant_;
    const std::string variant_name_, number_name_;
    const CudaGrid grid_;
    DeviceMemory counters_, row_origin_, expert_rows_;
    P2PArgs args_{};
    uint32_t epoch_ = kFirstEpoch;
};

}  // namespace tracekern
