// What others may know of the low latency family: moe/pipeline.hpp says what each member is for.
#pragma once

#include <cstring>
#include <stdexcept>
#include <vector>

#include "moe/config.h"
#include "moe/kernel_list.h"
#include "moe/low_latency/combine.h"
#include "moe/low_latency/dispatch.h"
#include "moe/low_latency/scale.h"
#include "trace/trace_choice.h"

namespace tracekern {

enum class LowLatencyVariant : uint32_t { low_latency };

// A call is dispatch and combine, each of which is one launch or two.
template <class Comm, bool kFp8, class... More>
using LowLatencyKernels = KernelList<low_latency_dispatch::Kernel<LowLatencyStage::dispatch, kFp8, Comm>,
                                     low_latency_dispatch::Kernel<LowLatencyStage::dispatch_send, kFp8, Comm>,
                                     low_latency_dispatch::Kernel<LowLatencyStage::dispatch_recv, kFp8, Comm>,
                                     LowLatencyExpertRows<LowLatencyStage::scale_experts, kFp8, Comm>,
                                     low_latency_combine::Kernel<LowLatencyStage::combine, Comm>,
                                     low_latency_combine::Kernel<LowLatencyStage::combine_send, Comm>,
                                     low_latency_combine::Kernel<LowLatencyStage::combine_recv, Comm>,
                                     More...>;
template <class Comm>
using LowLatencyBf16Kernels = LowLatencyKernels<Comm, false>;
template <class Comm>
using LowLatencyFp8Kernels =
    LowLatencyKernels<Comm, true, LowLatencyExpertRows<LowLatencyStage::dequantise, true, Comm>>;

struct LowLatencyConfig : PipelineConfig<LowLatencyVariant> {
    uint32_t fp8 = 0;                           // what messages carry: 0 bf16, 1 fp8
    uint32_t num_warp_groups = 1;               // of a block
    uint64_t first_byte = sizeof(HeapControl);  // of its part of the heap
    CommandRing* commands = nullptr;            // of FarArgs, like the next one
    char* far_heap = nullptr;
};

// Comm: CommArgs, or FarArgs where proxies reach the ranks of other hosts.
template <class Comm>
struct LowLatencyOn {
    using Args = LowLatencyArgsOn<Comm>;
    using Config = LowLatencyConfig;
    using Stage = LowLatencyStage;
    using Variant = LowLatencyVariant;
    using Event = LowLatencyEvent;
    using Bodies = detail::EveryBodyAndPeers;

    static constexpr const char* kName = "low_latency";
    static constexpr const char* kVariantNames[1] = {"low_latency"};  // nvcc wants the size in a template
    static constexpr auto& kStageNames = kLowLatencyStageNames;
    static constexpr auto& kRoleNames = kLowLatencyRoleNames;
    static constexpr auto& kChannelNames = kLowLatencyChannelNames;

    template <class Visit>
    static void visit_options(LowLatencyConfig& config, Visit visit) {
        visit("fp8", config.fp8);
    }

    static uint64_t heap_bytes(const LowLatencyConfig& config) {
        return LowLatencyLayout::make(config.shape, config.first_byte).total_bytes;
    }

    template <class F>
    static void with_kernels(const LowLatencyConfig& config, F f) {
        if (config.fp8) {
            f(LowLatencyFp8Kernels<Comm>{});
        } else {
            f(LowLatencyBf16Kernels<Comm>{});
        }
    }

    template <class Memory>
    static Args make_args(const LowLatencyConfig& config, Memory& memory) {
        if (config.number != NumberType::bf16) throw std::invalid_argument("dtype: wanted bf16");
        if (config.shape.hidden % 8 != 0) throw std::invalid_argument("hidden: wanted a multiple of 8");
        if (config.shape.max_tokens > kMaxLowLatencyTokens) {
            throw std::invalid_argument("more than 2^16 - 1 tokens for one rank");
        }
        Args args{};
        if constexpr (kIsFar<Comm>) {
            args.comm.ring = config.commands;
            args.comm.far_heap = config.far_heap;
        }
        args.shape = config.shape;
        args.layout = LowLatencyLayout::make(config.shape, config.first_byte);
        args.launch.num_warp_groups = config.num_warp_groups;
        args.launch.num_warps_per_group = config.warps_per_block / config.num_warp_groups;
        args.launch.num_sms = config.num_blocks;
        args.state = static_cast<LowLatencyState*>(memory.allocate(sizeof(LowLatencyState)));
        args.atomic_counter_per_expert = static_cast<uint32_t*>(memory.allocate(counter_bytes(args)));
        args.claims_per_expert = static_cast<uint64_t*>(memory.allocate(claims_bytes(args)));
        return args;
    }

    template <class Memory>
    static void reset(const Args& args, Memory& memory) {
        LowLatencyState state{};
        for (LowLatencySlot& slot : state.slots) slot.dispatched.word = slot.combined.word = kNeverEpoch;
        memory.copy_to(args.state, &state, sizeof(state));
        memory.clear(args.atomic_counter_per_expert, counter_bytes(args));
        memory.clear(args.claims_per_expert, claims_bytes(args));
        const size_t count = (args.layout.flags_end - args.layout.count_flags) / sizeof(uint64_t);
        const std::vector<uint64_t> flags(count, make_flag(kNeverEpoch, 0));
        const uint64_t num_bytes = count * sizeof(uint64_t);
        memory.copy_to(args.comm.heap[args.comm.rank] + args.layout.count_flags, flags.data(), num_bytes);
        if constexpr (kIsFar<Comm>) memcpy(args.comm.far_heap + args.layout.count_flags, flags.data(), num_bytes);
    }

private:
    static uint64_t counter_bytes(const LowLatencyArgs& args) {
        return kNumSlots * uint64_t{args.shape.num_experts} * sizeof(uint32_t);
    }
    static uint64_t claims_bytes(const LowLatencyArgs& args) {
        return kNumSlots * uint64_t{args.shape.num_local_experts()} * sizeof(uint64_t);
    }
};

using LowLatency = LowLatencyOn<CommArgs>;

}  // namespace tracekern
