// What each rank of low_latency_stress feeds into a call, where the call's tensors are, and the bits that have to come
// out.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "low_latency_stress_plan.hpp"
#include "stress_numbers.hpp"

namespace tracekern {

// What one rank feeds into one call, and what dispatch makes of it: a function of (seed, rank, call).
struct Input {
    uint32_t num_tokens;
    std::vector<int64_t> topk_idx;
    std::vector<float> topk_weights;
    std::vector<BFloat16> x;
    std::vector<Fp8> values;     // [token][hidden], of fp8 calls
    std::vector<float> scales;   // [token][hidden / 128]
    std::vector<BFloat16> seen;  // [token][hidden] what experts get

    Input(const LowLatencyStress& options, const CallPlan& plan, uint32_t rank)
        : num_tokens(draw_num_tokens(options, plan, rank)), hidden_(options.config.shape.hidden) {
        const MoeShape& shape = options.config.shape;
        std::mt19937 random = options.random(plan.content, 1 + rank);
        draw_choices(shape, options.random(plan.content, 3 * kMaxRanks)(), random);
        std::uniform_real_distribution<float> weight(0.0f, 1.0f);
        topk_weights.resize(topk_idx.size());
        for (float& w : topk_weights) w = weight(random);
        draw_tokens(random);
        if (plan.use_fp8) {
            cast(plan.round_scale);
        } else {
            seen = x;
        }
    }

    static uint32_t draw_num_tokens(const LowLatencyStress& options, const CallPlan& plan, uint32_t rank) {
        std::mt19937 random = options.random(plan.number, 1 + kMaxRanks + rank);
        return random() % 3 == 0 ? 0 : random() % (options.config.shape.max_tokens + 1);
    }

    bool chooses(uint32_t token, uint32_t topk, uint32_t expert) const {
        const auto first = topk_idx.begin() + size_t{token} * topk;
        return std::find(first, first + topk, int64_t{expert}) != first + topk;
    }

private:
    // common: a number that all ranks drew. In a quarter of the calls all tokens go to one expert, in another quarter
    // to one rank.
    void draw_choices(const MoeShape& shape, uint32_t common, std::mt19937& random) {
        const bool one_expert = common % 4 == 0, one_rank = common % 4 == 1;
        const uint32_t first = common / 4 % shape.num_ranks * shape.num_local_experts();
        const uint32_t num_open = one_expert ? 1 : one_rank ? shape.num_local_experts() : shape.num_experts;
        for (uint32_t token = 0; token < num_tokens; ++token) {
            for (uint32_t choice = 0; choice < shape.topk; ++choice) {
                const uint32_t expert = (first + random() % num_open) % shape.num_experts;
                const bool is_left_out = random() % 16 == 0;
                const auto begin = topk_idx.end() - choice;
                const bool is_named = std::find(begin, topk_idx.end(), int64_t{expert}) != topk_idx.end();
                topk_idx.push_back(is_left_out || is_named ? -1 : int64_t{expert});
            }
        }
    }

    // Rows of unlike magnitude, a few of zeros: the scales of fp8 are to differ.
    void draw_tokens(std::mt19937& random) {
        x = draw_rows<BFloat16>(random, size_t{num_tokens} * hidden_);
        for (uint32_t token = 0; token < num_tokens; ++token) {
            const float magnitude = random() % 16 == 0 ? 0.0f : std::ldexp(1.0f, static_cast<int>(random() % 24) - 16);
            for (uint32_t i = 0; i < hidden_; ++i) {
                BFloat16& element = x[size_t{token} * hidden_ + i];
                element = float_to_bfloat16(bfloat16_to_float(element) * magnitude);
            }
        }
    }

    void cast(bool round_scale) {
        values.resize(x.size());
        scales.resize(x.size() / kScaleGroup);
        seen.resize(x.size());
        for (size_t group = 0; group < scales.size(); ++group) {
            const size_t first = group * kScaleGroup;
            float amax = 1e-4f;
            for (size_t i = first; i < first + kScaleGroup; ++i) amax = std::max(amax, std::fabs(host_float(x[i])));
            float factor = 448.0f / amax;
            scales[group] = amax * (1.0f / 448.0f);
            if (round_scale) {
                const int exponent = static_cast<int>(std::ceil(std::log2(scales[group])));
                factor = std::ldexp(1.0f, -exponent);
                scales[group] = std::ldexp(1.0f, exponent);
            }
            for (size_t i = first; i < first + kScaleGroup; ++i) {
                values[i] = float_to_fp8(host_float(x[i]) * factor);
                seen[i] = float_to_bfloat16(fp8_to_float(values[i]) * scales[group]);
            }
        }
    }

    const uint32_t hidden_;
};

// Those of all ranks for a call.
inline std::vector<Input> draw_inputs(const LowLatencyStress& options, const CallPlan& plan) {
    std::vector<Input> inputs;
    for (uint32_t rank = 0; rank < options.config.shape.num_ranks; ++rank) inputs.emplace_back(options, plan, rank);
    return inputs;
}

inline std::vector<float> expert_scale(const MoeShape& shape) {
    std::vector<float> scale(shape.num_experts);
    for (uint32_t expert = 0; expert < scale.size(); ++expert) scale[expert] = 1.0f + expert / 16.0f;
    return scale;
}

// Offsets of a call's tensors in one piece of memory: what a rank feeds in, then what comes out.
struct CallLayout {
    uint64_t x, topk_idx, topk_weights;
    uint64_t outputs;  // from here on
    uint64_t recv_x, recv_scales, src_info, layout_range, count, handle, expert_rows, out;
    uint64_t bytes;

    explicit CallLayout(const MoeShape& shape) {
        const uint64_t num_rows = uint64_t{shape.num_local_experts()} * shape.num_ranks * shape.max_tokens;
        uint64_t cursor = 0;
        const auto take = [&](uint64_t taken) { return std::exchange(cursor, cursor + (taken + 127) / 128 * 128); };
        x = take(uint64_t{shape.max_tokens} * shape.row_bytes());
        topk_idx = take(uint64_t{shape.max_flat()} * sizeof(int64_t));
        topk_weights = take(uint64_t{shape.max_flat()} * sizeof(float));
        outputs = cursor;
        recv_x = take(num_rows * shape.row_bytes());
        recv_scales = take(num_rows * (shape.hidden / kScaleGroup) * sizeof(float));
        src_info = take(num_rows * sizeof(uint32_t));
        layout_range = take(uint64_t{shape.num_experts} * sizeof(int64_t));
        count = take(shape.num_local_experts() * sizeof(uint32_t));
        handle = take(sizeof(HandleWords));
        expert_rows = take(num_rows * shape.row_bytes());
        out = take(uint64_t{shape.max_tokens} * shape.row_bytes());
        bytes = cursor;
    }

    // Lays the input of a call ready, and outputs of which no bit is right.
    void put(char* memory, const CallPlan& plan, const Input& input) const {
        memset(memory + outputs, 0xff, bytes - outputs);
        std::copy(input.x.begin(), input.x.end(), reinterpret_cast<BFloat16*>(memory + x));
        std::copy(
            input.topk_weights.begin(), input.topk_weights.end(), reinterpret_cast<float*>(memory + topk_weights));
        if (plan.has_long_ids) {
            std::copy(input.topk_idx.begin(), input.topk_idx.end(), reinterpret_cast<int64_t*>(memory + topk_idx));
        } else {
            std::transform(input.topk_idx.begin(),
                           input.topk_idx.end(),
                           reinterpret_cast<int32_t*>(memory + topk_idx),
                           [](int64_t expert) { return static_cast<int32_t>(expert); });
        }
    }

    LowLatencyCall call(
        char* memory, const CallPlan& plan, uint32_t num_tokens, uint32_t topk, const float* scale) const {
        LowLatencyCall call{};
        call.slot = plan.slot;
        call.num_tokens = num_tokens;
        call.topk = topk;
        call.has_long_ids = plan.has_long_ids;
        call.topk_idx = memory + topk_idx;
        call.x = memory + x;
        call.packed_recv_x = memory + recv_x;
        call.round_scale = plan.round_scale;
        call.use_ue8m0 = plan.use_ue8m0;
        call.packed_recv_scales = memory + recv_scales;
        call.packed_recv_src_info = reinterpret_cast<uint32_t*>(memory + src_info);
        call.packed_recv_layout_range = reinterpret_cast<int64_t*>(memory + layout_range);
        call.packed_recv_count = reinterpret_cast<uint32_t*>(memory + count);
        call.handle = reinterpret_cast<HandleWords*>(memory + handle);
        call.expert_rows = memory + expert_rows;
        call.expert_scale = scale;
        call.topk_weights = reinterpret_cast<const float*>(memory + topk_weights);
        call.out = memory + out;
        return call;
    }
};

// Looks at what came out of one rank's call. The first thing wrong is told on stderr.
class CallCheck {
public:
    // memory: laid out as `layout` says. inputs: of all ranks.
    CallCheck(const LowLatencyStress& options,
              const CallLayout& layout,
              const char* memory,
              uint32_t rank,
              const CallPlan& plan,
              const std::vector<Input>& inputs)
        : shape_(options.config.shape),
          layout_(layout),
          memory_(memory),
          rank_(rank),
          plan_(plan),
          inputs_(inputs),
          num_rows_(shape_.num_ranks * shape_.max_tokens),
          message_(MessageLayout::of(shape_.hidden, plan.use_fp8)) {}

    // Each local expert got the tokens that chose it, in the rows that it was told, and nothing else.
    bool received() const {
        for (uint32_t local_expert = 0; local_expert < shape_.num_local_experts(); ++local_expert) {
            const auto* rows = array<uint32_t>(layout_.src_info) + size_t{local_expert} * num_rows_;
            std::vector<bool> is_taken(num_rows_);
            uint32_t total = 0;
            for (uint32_t source = 0; source < shape_.num_ranks; ++source) {
                const size_t pair = size_t{local_expert} * shape_.num_ranks + source;
                const int64_t range = array<int64_t>(layout_.layout_range)[pair];
                if (!received_from(source, local_expert, packed_begin(range), packed_count(range), is_taken)) {
                    return false;
                }
                total += packed_count(range);
            }
            if (array<uint32_t>(layout_.count)[local_expert] != total) return wrong("count", local_expert, total);
            for (uint32_t row = total; row < num_rows_; ++row) {
                if (rows[row] != ~0u) return wrong("row beyond the count", local_expert, row);
            }
        }
        return true;
    }

    // out = round(sum over the choices, in their order, of weight * result), each product and sum rounded in fp32.
    bool combined(const std::vector<float>& scale) const {
        const Input& input = inputs_[rank_];
        const auto* out = array<BFloat16>(layout_.out);
        for (uint32_t token = 0; token < input.num_tokens; ++token) {
            for (uint32_t i = 0; i < shape_.hidden; ++i) {
                const size_t element = size_t{token} * shape_.hidden + i;
                float sum = 0.0f;
                for (size_t flat = size_t{token} * shape_.topk; flat < size_t{token + 1} * shape_.topk; ++flat) {
                    const int64_t expert = input.topk_idx[flat];
                    if (expert < 0) continue;
                    const float result = host_float(input.seen[element]) * scale[static_cast<size_t>(expert)];
                    const float product = input.topk_weights[flat] * host_float(float_to_bfloat16(result));
                    sum += product;
                }
                if (out[element].bits != float_to_bfloat16(sum).bits) return wrong("combined token", token, i);
            }
        }
        return true;
    }

private:
    template <class T>
    const T* array(uint64_t offset) const {
        return reinterpret_cast<const T*>(memory_ + offset);
    }

    bool received_from(
        uint32_t source, uint32_t local_expert, uint32_t begin, uint32_t count, std::vector<bool>& is_taken) const {
        const Input& input = inputs_[source];
        const uint32_t expert = rank_ * shape_.num_local_experts() + local_expert;
        std::vector<bool> is_due(input.num_tokens);
        for (uint32_t token = 0; token < input.num_tokens; ++token) {
            is_due[token] = input.chooses(token, shape_.topk, expert);
        }
        if (count != std::count(is_due.begin(), is_due.end(), true)) return wrong("number of tokens", source, count);
        for (uint32_t row = begin; row < uint64_t{begin} + count; ++row) {
            if (row >= num_rows_ || is_taken[row]) return wrong("row", source, row);
            is_taken[row] = true;
            const uint32_t token = array<uint32_t>(layout_.src_info)[size_t{local_expert} * num_rows_ + row];
            if (token >= input.num_tokens || !is_due[token]) return wrong("token in a row", source, token);
            is_due[token] = false;
            if (!holds(local_expert, row, input, token)) return wrong("values of a token", source, token);
        }
        return true;
    }

    bool holds(uint32_t local_expert, uint32_t row, const Input& input, uint32_t token) const {
        const size_t packed = size_t{local_expert} * num_rows_ + row;
        const char* values = memory_ + layout_.recv_x + packed * message_.values_bytes;
        const size_t first = size_t{token} * shape_.hidden;
        const void* sent = plan_.use_fp8 ? static_cast<const void*>(&input.values[first]) : &input.x[first];
        if (memcmp(values, sent, message_.values_bytes) != 0) return false;
        for (uint32_t i = 0; i < message_.num_scales; ++i) {
            if (scale(local_expert, row, i) != input.scales[size_t{token} * message_.num_scales + i]) return false;
        }
        return true;
    }

    // Column-major: all rows of an expert have their scale of a group side by side, or four exponents of one.
    float scale(uint32_t local_expert, uint32_t row, uint32_t group) const {
        const size_t first = size_t{local_expert} * message_.num_scales * num_rows_;
        if (!plan_.use_ue8m0) return array<float>(layout_.recv_scales)[first + size_t{group} * num_rows_ + row];
        const size_t word = first / 4 + size_t{group / 4} * num_rows_ + row;
        const uint32_t exponent = array<uint32_t>(layout_.recv_scales)[word] >> group % 4 * 8 & 0xff;
        return std::ldexp(1.0f, static_cast<int>(exponent) - 127);
    }

    bool wrong(const char* what, uint32_t a, uint32_t b) const {
        std::fprintf(stderr, "rank %u: wrong %s (%u, %u) in call %u\n", rank_, what, a, b, plan_.content);
        return false;
    }

    const MoeShape& shape_;
    const CallLayout& layout_;
    const char* const memory_;
    const uint32_t rank_;
    const CallPlan& plan_;
    const std::vector<Input>& inputs_;
    const uint32_t num_rows_;  // of a local expert
    const MessageLayout message_;
};

}  // namespace tracekern
