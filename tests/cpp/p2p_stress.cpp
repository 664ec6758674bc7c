// All ranks of the P2P pipeline in one process, back to back with no barrier in between, every result checked bit by
// bit.
//
//   p2p_stress VARIANT NUMBER EXECUTOR RANKS BLOCKS WARPS TOKENS HIDDEN EXPERTS TOPK ITERATIONS SEED [OPTION=VALUE...]
//     trace=on|ring          runs the traced kernels and looks after the words behind their records
//     timeout_ms=N           how long a wait lasts; default 120000
//     partitions=N           of `pipelined` and `overlapped`; default 2
//     absent=RANK            that rank never starts
//     plant=CHANNEL:MUTATION leaves something out of the protocol, see comm/mutation.h (-DTK_PLANTED_FAULTS)
//
// Input, routing and token counts change in every iteration; about a third of the ranks have no token at all. Built by
// the tests with -fsanitize=thread, -DTK_RANDOM_DELAYS and -DTK_POISON_CONSUMED.
// Exit: 0 right, 1 wrong result, 2 usage, 3 a wait ran out of time, 4 a record where none belongs.
#include <thread>

#include "moe/pipeline_cpu.hpp"
#include "p2p_stress_common.hpp"
#include "stress_cpu.hpp"

using namespace tracekern;

namespace {

struct Options : P2PStress {
    CpuExecutor executor;
};

template <class T>
int run_rank(const Options& options, CpuCommunicator& comm, PipelineCpu<P2P>& pipeline) {
    const MoeShape& shape = options.config.shape;
    const std::vector<float> scale = options.expert_scale();
    std::vector<T> out(size_t{shape.max_tokens} * shape.hidden);
    const std::vector<LaunchOfCall> launches = launches_of_call<P2P>(options.config);
    const uint32_t num_blocks = options.config.num_blocks, num_warps = options.config.warps_per_block;
    std::vector<TrackHeader> headers(TraceRegion::num_headers(options.stress, size_t{num_blocks} * num_warps));
    std::vector<WideRecord> records(TraceRegion::num_records(options.stress, size_t{num_blocks} * num_warps));
    TraceRegion region(options.stress, num_blocks, num_warps, headers.data(), records.data());
    for (uint32_t iteration = 0; iteration < options.iterations; ++iteration) {
        const Input<T> input(options, comm.args().rank, iteration);
        memset(out.data(), 0xff, out.size() * sizeof(T));
        P2PArgs& args = pipeline.args();
        args.x = reinterpret_cast<const char*>(input.x.data());
        args.topk_idx = input.topk_idx.data();
        args.topk_weights = input.topk_weights.data();
        args.experts = {scale.data()};
        args.out = reinterpret_cast<char*>(out.data());
        args.num_tokens = input.num_tokens;
        for (const LaunchOfCall& launch : launches) {
            args.partition = launch.partition;
            pipeline.run(launch.stage, region.begin_launch());
            if (!region.is_whole()) return 4;
        }
        if (comm.failed()) return report_fault(comm.fault(), kP2PStageNames[comm.fault().stage]);
        const int code = check_result(options, comm.args().rank, iteration, input, scale, out.data());
        if (code) return code;
    }
    return 0;
}

int run_rank_of_number(const Options& options, CpuCommunicator& comm, PipelineCpu<P2P>& pipeline) {
    switch (options.config.number) {
        case NumberType::fp32:
            return run_rank<float>(options, comm, pipeline);
        case NumberType::fp16:
            return run_rank<Half>(options, comm, pipeline);
        case NumberType::bf16:
            return run_rank<BFloat16>(options, comm, pipeline);
    }
    return 2;
}

int run(const Options& options) {
    const uint32_t num_ranks = options.config.shape.num_ranks;
    const P2PConfig& config = options.config;
    const uint64_t heap_bytes = P2P::heap_bytes(config);
    const StressHeaps heaps(num_ranks, heap_bytes);
    const uint64_t timeout_ns = options.stress.timeout_ns;
    std::vector<std::unique_ptr<CpuCommunicator>> comms;
    std::vector<std::unique_ptr<PipelineCpu<P2P>>> pipelines;
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
        comms.push_back(std::make_unique<CpuCommunicator>(rank, heaps.addresses, timeout_ns, heaps.clock));
        pipelines.push_back(
            std::make_unique<PipelineCpu<P2P>>(*comms[rank], options.config, PipelineBackendCpu(options.executor)));
    }
    std::vector<int> exits(num_ranks);
    {
        std::vector<std::jthread> ranks;
        for (uint32_t rank = 0; rank < num_ranks; ++rank) {
            if (rank == options.stress.absent) continue;
            ranks.emplace_back(
                [&, rank] { exits[rank] = run_rank_of_number(options, *comms[rank], *pipelines[rank]); });
        }
    }
    int worst = 0;
    for (int code : exits) worst = code == 1 || worst == 1 ? 1 : std::max(worst, code);
    return worst;
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<char*> arguments(argv + 1, argv + argc);
    constexpr size_t kExecutor = 2;  // its place on the command line; the GPU's program has none
    if (arguments.size() <= kExecutor) {
        std::fprintf(stderr, "usage: see the head of p2p_stress.cpp\n");
        return 2;
    }
    Options options{};
    options.executor =
        static_cast<CpuExecutor>(choose(arguments[kExecutor], std::initializer_list<const char*>{"fibers", "threads"}));
    arguments.erase(arguments.begin() + kExecutor);
    static_cast<P2PStress&>(options) = P2PStress::parse(arguments, cpu_setters());
    const int code = run(options);
    if (code == 0) std::puts("ok");
    return code;
}
