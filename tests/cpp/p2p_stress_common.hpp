// What p2p_stress has in common on both backends: its command line, what each rank feeds into each call, and the bits
// that have to come out.
#pragma once

#include "moe/p2p/family.h"

#define TK_OWN_CHANNEL_NAMES kP2PChannelNames
#include "stress_common.hpp"
#include "stress_numbers.hpp"

namespace tracekern {

struct P2PStress {
    P2PConfig config;
    uint32_t iterations;
    uint32_t seed;
    StressOptions stress;

    // arguments: VARIANT NUMBER RANKS BLOCKS WARPS TOKENS HIDDEN EXPERTS TOPK ITERATIONS SEED and options.
    static P2PStress parse(std::vector<char*> arguments, const OptionSetters& setters = {}) {
        constexpr int kNumFixed = 11;
        if (arguments.size() < kNumFixed) {
            std::fprintf(stderr, "usage: see the head of the program\n");
            std::exit(2);
        }
        const auto number = [&](int i) { return StressOptions::number(arguments[i]); };
        P2PStress given{};
        given.config.variant = static_cast<P2PVariant>(choose(arguments[0], kP2PVariantNames));
        given.config.number = static_cast<NumberType>(choose(arguments[1], kNumberNames));
        const uint32_t element_bytes = kNumberBytes[static_cast<uint32_t>(given.config.number)];
        given.config.shape = MoeShape{number(2), number(5), number(7), number(8), number(6), element_bytes};
        given.config.num_blocks = number(3);
        given.config.warps_per_block = number(4);
        given.iterations = number(9);
        given.seed = number(10);
        const int num_options = static_cast<int>(arguments.size()) - kNumFixed;
        given.stress = StressOptions::parse(num_options, arguments.data() + kNumFixed, setters);
        given.config.partitions = given.stress.partitions;
        return given;
    }

    std::vector<float> expert_scale() const {
        std::vector<float> scale(config.shape.num_experts);
        for (uint32_t expert = 0; expert < scale.size(); ++expert) scale[expert] = 1.0f + expert / 16.0f;
        return scale;
    }
};

// What one rank feeds into one iteration: a function of (seed, rank, iteration).
template <class T>
struct Input {
    uint32_t num_tokens;
    std::vector<int32_t> topk_idx;
    std::vector<float> topk_weights;
    std::vector<T> x;

    Input(const P2PStress& options, uint32_t rank, uint32_t iteration) {
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
        const T scaled = host_number<T>(host_float(input.x[element]) * scale[expert]);
        sum += input.topk_weights[flat] * host_float(scaled);
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
                sum += host_float(host_number<T>(sum_results(shape, input, scale, element, first, stop)));
            }
        } else {
            sum = sum_results(shape, input, scale, element, 0, shape.num_experts);
        }
        const T expected = host_number<T>(sum);
        wrong += memcmp(&expected, &out[element], sizeof(T)) != 0;
    }
    return wrong;
}

// Tells of wrong elements with a line on stderr; returns the exit code.
template <class T>
int check_result(const P2PStress& options,
                 uint32_t rank,
                 uint32_t iteration,
                 const Input<T>& input,
                 const std::vector<float>& scale,
                 const T* out) {
    const uint64_t wrong = count_wrong(options.config, input, scale, out);
    if (wrong == 0) return 0;
    std::fprintf(stderr,
                 "rank %u: %llu wrong elements in iteration %u\n",
                 rank,
                 static_cast<unsigned long long>(wrong),
                 iteration);
    return 1;
}

struct LaunchOfCall {
    P2PStage stage;
    uint32_t partition;
};

// The kernels of a call, in their order. Of partitions with kernels of their own one comes in before the results of the
// one ahead go back.
template <class Family>
std::vector<LaunchOfCall> launches_of_call(const P2PConfig& config) {
    std::vector<LaunchOfCall> launches;
    if (traits_of(config.variant).overlapped) {
        const uint32_t count = P2PLayout::make(config.shape, config.variant, config.partitions).num_partitions;
        for (uint32_t partition = 0; partition <= count; ++partition) {
            if (partition < count) launches.push_back({P2PStage::dispatch, partition});
            if (partition > 0) launches.push_back({P2PStage::combine, partition - 1});
        }
        return launches;
    }
    Family::with_kernels(config, [&]<class Kernels>(Kernels) {
        Kernels::for_each([&]<class Body>() { launches.push_back({Body::kStage, 0}); });
    });
    return launches;
}

}  // namespace tracekern
