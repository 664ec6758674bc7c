// What others may know of the toy family.
#pragma once

#include <vector>

#include "moe/toy/kernels.h"
#include "trace/trace_choice.h"

namespace tracekern {

struct ToyEcho {
    using Args = ToyArgs;
    static constexpr ToyStage kStage = ToyStage::echo;
    static constexpr uint32_t kMaxThreads = 512;

    static uint64_t shared_bytes(const ToyArgs&, uint32_t) { return 0; }
    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const ToyArgs& args, typename Rec::Args trace) {
        echo<Rec>(warp, args, trace);
    }
};

struct Toy {
    using Args = ToyArgs;
    using Config = PipelineConfig<ToyVariant>;
    using Stage = ToyStage;
    using Variant = ToyVariant;
    using Event = ToyEvent;
    using Bodies = detail::EveryBody;

    static constexpr const char* kName = "toy";
    static constexpr const char* kVariantNames[] = {"toy"};
    static constexpr const char* kStageNames[] = {"echo"};
    static constexpr const char* kRoleNames[] = {"copy"};
    static constexpr const char* kChannelNames[] = {"here"};

    template <class Visit>
    static void visit_options(Config&, Visit) {}
    static uint64_t heap_bytes(const Config& config) {
        return sizeof(HeapControl) + 2 * config.shape.num_ranks * sizeof(uint64_t);
    }
    template <class F>
    static void with_kernels(const Config&, F f) {
        f(KernelList<ToyEcho>{});
    }
    template <class Memory>
    static ToyArgs make_args(const Config& config, Memory& memory) {
        ToyArgs args{};
        args.shape = config.shape;
        args.state = static_cast<ToyState*>(memory.allocate(sizeof(ToyState)));
        return args;
    }
    template <class Memory>
    static void reset(const ToyArgs& args, Memory& memory) {
        const ToyState state{kFirstEpoch};
        memory.copy_to(args.state, &state, sizeof(state));
        const std::vector<uint64_t> flags(2 * args.comm.num_ranks, make_flag(kNeverEpoch, 0));
        memory.copy_to(args.here_flag(0, args.comm.rank, 0), flags.data(), flags.size() * sizeof(uint64_t));
    }
    template <class Memory>
    static void before(ToyStage, const Config&, const ToyArgs&, Memory&) {}
};

}  // namespace tracekern
