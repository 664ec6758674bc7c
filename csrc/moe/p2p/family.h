// What others may know of the P2P family: moe/pipeline.hpp says what each member is for.
#pragma once

#include <stdexcept>
#include <vector>

#include "moe/config.h"
#include "moe/p2p/kernels.h"
#include "trace/trace_choice.h"

namespace tracekern {

struct P2PConfig : PipelineConfig<P2PVariant> {
    uint32_t partitions = 2;  // of the variants that have them, at most
};

struct P2P {
    using Args = P2PArgs;
    using Config = P2PConfig;
    using Stage = P2PStage;
    using Variant = P2PVariant;
    using Event = P2PEvent;
    using Bodies = detail::EveryBodyAndPeers;

    static constexpr const char* kName = "p2p";
    static constexpr auto& kVariantNames = kP2PVariantNames;
    static constexpr auto& kStageNames = kP2PStageNames;
    static constexpr auto& kRoleNames = kP2PRoleNames;
    static constexpr auto& kChannelNames = kP2PChannelNames;

    template <class Visit>
    static void visit_options(P2PConfig& config, Visit visit) {
        visit("partitions", config.partitions);
    }

    static uint64_t heap_bytes(const P2PConfig& config) {
        return P2PLayout::make(config.shape, config.variant, config.partitions).total_bytes;
    }

    template <class F>
    static void with_kernels(const P2PConfig& config, F f) {
        with_p2p_variant(config.variant, [&]<P2PVariant kVariant>() {
            with_number_type(config.number, [&]<class T>() { f(p2p_kernels_of_call<kVariant, T>()); });
        });
    }

    template <class Memory>
    static P2PArgs make_args(const P2PConfig& config, Memory& memory) {
        // A flag holds how many rows come; the waits for results look at as many side by side as a warp has lanes.
        if (uint64_t{config.shape.max_tokens} * config.shape.topk > kMaxFlagValue) {
            throw std::invalid_argument("more than 2^24 - 1 rows for one rank");
        }
        if (config.shape.topk > kMaxResults) throw std::invalid_argument("more than 32 choices of a token");
        P2PArgs args{};
        args.shape = config.shape;
        args.layout = P2PLayout::make(config.shape, config.variant, config.partitions);
        const uint64_t num_rows = traits_of(config.variant).deduplicated ? 0 : config.shape.max_rows();
        args.state = static_cast<P2PState*>(memory.allocate(sizeof(P2PState) + counter_bytes(args)));
        args.set_counters(reinterpret_cast<uint32_t*>(args.state + 1));
        args.row_origin = static_cast<RowOrigin*>(memory.allocate(num_rows * sizeof(RowOrigin)));
        args.expert_rows = static_cast<char*>(memory.allocate(expert_row_bytes(config.shape, config.variant)));
        return args;
    }

    template <class Memory>
    static void reset(const P2PArgs& args, Memory& memory) {
        const P2PState state{{kFirstEpoch, {}}, {}, {}, {}, {make_flag(kNeverEpoch, 0), {}}};
        memory.clear(args.state, sizeof(P2PState) + counter_bytes(args));
        memory.copy_to(args.state, &state, sizeof(state));
        const size_t count = (args.layout.flags_end - args.layout.count_flags) / sizeof(uint64_t);
        const std::vector<uint64_t> flags(count, make_flag(kNeverEpoch, 0));
        memory.copy_to(
            args.comm.heap[args.comm.rank] + args.layout.count_flags, flags.data(), count * sizeof(uint64_t));
    }

    // Variants of the worklog that are not fused find no slot taken.
    template <class Memory>
    static void before(P2PStage stage, const P2PConfig& config, const P2PArgs& args, Memory& memory) {
        if (stage != P2PStage::dispatch_send || traits_of(config.variant).deduplicated) return;
        if (worklog_traits_of(config.variant).fused) return;
        memory.clear_before_launch(args.send_count, config.shape.num_ranks * sizeof(uint32_t));
    }

private:
    static uint64_t counter_bytes(const P2PArgs& args) {
        return P2PArgs::num_counters(args.shape, args.layout) * sizeof(uint32_t);
    }
};

}  // namespace tracekern
