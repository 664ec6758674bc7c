// All ranks of the P2P pipeline in one process, back to back with no barrier in between, every result checked bit by
// bit.
//
//   p2p_stress VARIANT NUMBER EXECUTOR RANKS BLOCKS WARPS TOKENS HIDDEN EXPERTS TOPK ITERATIONS SEED [OPTION=VALUE...]
//     trace=on|ring          runs the traced kernels and looks after the words behind their records
//     timeout_ms=N           how long a wait lasts; default 20000
//     partitions=N           of the pipelined variant; default 2
//     absent=RANK            that rank never starts
//     plant=CHANNEL:MUTATION leaves something out of the protocol, see comm/mutation.h (-DTK_PLANTED_FAULTS)
//
// Input, routing and token counts change in every iteration; about a third of the ranks have no token at all. Built by
// the tests with -fsanitize=thread, -DTK_RANDOM_DELAYS and -DTK_POISON_CONSUMED.
// Exit: 0 right, 1 wrong result, 2 usage, 3 a wait ran out of time, 4 a record where none belongs.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "moe/p2p/family.h"
#include "moe/pipeline_cpu.hpp"

#define TK_OWN_CHANNEL_NAMES kP2PChannelNames
#include "stress_common.hpp"

using namespace tracekern;

namespace {

struct Options {
    P2PConfig config;
    CpuExecutor executor;
    uint32_t iterations;
    uint32_t seed;
    StressOptions stress;
};

template <class T>
std::vector<T> draw_rows(std::mt19937& random, size_t count) {
    std::uniform_real_distribution<float> value(-2.0f, 2.0f);
    std::vector<T> rows(count);
    for (T& element : rows) element = from_float<T>(value(random));
    return rows;
}

// What one rank feeds into one iteration: a function of (seed, rank, iteration).
template <class T>
struct Input {
    uint32_t num_tokens;
    std::vector<int32_t> topk_idx;
    std::vector<float> topk_weights;
    std::vector<T> x;

    Input(const Options& options, uint32_t rank, uint32_t iteration) {
        const MoeShape& shape = options.config.shape;
        std::mt19937 random(options.seed * 7919u + rank * 104729u + iteration);
        num_tokens = random() % 3 == 0 ? 0 : random() % (shape.max_tokens + 1);
        topk_idx.resize(size_t{num_tokens} * shape.topk);
        topk_weights.resize(topk_idx.size());
        const bool one_rank = random() % 4 == 0;
        for (int32_t& expert : topk_idx) {
            expert = static_cast<int32_t>(random() % (one_rank ? shape.num_local_experts() : shape.num_experts));
            if (random() % 16 == 0) expert = -1;
        }
        std::uniform_real_distribution<float> weight(0.0f, 1.0f);
        for (float& w : topk_weights) w = weight(random);
        x = draw_rows<T>(random, size_t{num_tokens} * shape.hidden);
    }
};

// The weighted results of one element, added in the order of the choices: those of the experts [first, stop) alone.
template <class T>
float sum_results(const MoeShape& shape,
                  const Input<T>& input,
                  const std::vector<float>& scale,
                  size_t element,
                  uint32_t first,
                  uint32_t stop) {
    const size_t token = element / shape.hidden;
    float sum = 0.0f;
    for (size_t flat = token * shape.topk; flat < (token + 1) * shape.topk; ++flat) {
        const int32_t expert = input.topk_idx[flat];
        if (expert < static_cast<int32_t>(first) || expert >= static_cast<int32_t>(stop)) continue;
        const T scaled = from_float<T>(to_float(input.x[element]) * scale[expert]);
        sum += input.topk_weights[flat] * to_float(scaled);
    }
    return sum;
}

template <class T>
uint64_t count_wrong(const P2PConfig& config, const Input<T>& input, const std::vector<float>& scale, const T* out) {
    const MoeShape& shape = config.shape;
    uint64_t wrong = 0;
    for (size_t element = 0; element < size_t{input.num_tokens} * shape.hidden; ++element) {
        float sum = 0.0f;
        if (traits_of(config.variant).reduces_at_experts) {
            for (uint32_t first = 0; first < shape.num_experts; first += shape.num_local_experts()) {
                const uint32_t stop = first + shape.num_local_experts();
                sum += to_float(from_float<T>(sum_results(shape, input, scale, element, first, stop)));
            }
        } else {
            sum = sum_results(shape, input, scale, element, 0, shape.num_experts);
        }
        const T expected = from_float<T>(sum);
        wrong += memcmp(&expected, &out[element], sizeof(T)) != 0;
    }
    return wrong;
}

template <class T>
int run_rank(const Options& options, CpuCommunicator& comm, PipelineCpu<P2P>& pipeline) {
    const MoeShape& shape = options.config.shape;
    std::vector<float> scale(shape.num_experts);
    for (uint32_t expert = 0; expert < shape.num_experts; ++expert) scale[expert] = 1.0f + expert / 16.0f;
    std::vector<T> out(size_t{shape.max_tokens} * shape.hidden);
    std::vector<P2PStage> stages;
    P2P::with_kernels(options.config, [&]<class Kernels>(Kernels) {
        Kernels::for_each([&]<class Body>() { stages.push_back(Body::kStage); });
    });
    const uint32_t room = options.stress.format == RecordFormat::ring ? 8 : 64;  // so few that rings go round
    TraceRegion region(options.stress, options.config.num_blocks, options.config.warps_per_block, room);
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
        for (P2PStage stage : stages) {
            pipeline.run(stage, region.begin_launch());
            if (!region.is_whole()) return 4;
        }
        if (comm.failed()) return report_fault(comm.fault(), kP2PStageNames[comm.fault().stage]);
        if (const uint64_t wrong = count_wrong(options.config, input, scale, out.data())) {
            std::fprintf(stderr,
                         "rank %u: %llu wrong elements in iteration %u\n",
                         comm.args().rank,
                         static_cast<unsigned long long>(wrong),
                         iteration);
            return 1;
        }
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
    if (argc < 13) {
        std::fprintf(stderr, "usage: see the head of p2p_stress.cpp\n");
        return 2;
    }
    const auto number = [&](int i) { return static_cast<uint32_t>(std::strtoul(argv[i], nullptr, 10)); };
    Options options{};
    options.config.variant = static_cast<P2PVariant>(choose(argv[1], kP2PVariantNames));
    options.config.number = static_cast<NumberType>(choose(argv[2], kNumberNames));
    options.executor =
        static_cast<CpuExecutor>(choose(argv[3], std::initializer_list<const char*>{"fibers", "threads"}));
    const uint32_t element_bytes = options.config.number == NumberType::fp32 ? 4 : 2;
    options.config.shape = MoeShape{number(4), number(7), number(9), number(10), number(8), element_bytes};
    options.config.num_blocks = number(5);
    options.config.warps_per_block = number(6);
    options.iterations = number(11);
    options.seed = number(12);
    options.stress = StressOptions::parse(argc - 13, argv + 13);
    options.config.partitions = options.stress.partitions;
    const int code = run(options);
    if (code == 0) std::puts("ok");
    return code;
}
