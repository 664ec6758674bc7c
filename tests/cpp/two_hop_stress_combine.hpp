// What each rank of two_hop_stress gives back for a row, and the bits that have to come of it.
#pragma once

#include <vector>

#include "two_hop_stress_plan.hpp"

namespace tracekern {

// Numbers that are a function of who made them, of what: nobody has to know where a row lies.
struct CombineNumbers {
    uint32_t seed, call;

    // maker: rank whose expert it is. index: of the hidden values, behind them of the choices.
    float number(uint32_t maker, uint32_t source, uint32_t token, uint32_t index) const {
        uint64_t bits = seed * 0x9e3779b97f4a7c15u + call;
        for (const uint32_t part : {maker, source, token, index}) {
            bits = (bits ^ part) * 0xbf58476d1ce4e5b9u;
            bits ^= bits >> 29;
        }
        return static_cast<float>(static_cast<int32_t>(bits >> 20 & 0xffff) - 0x8000) / 4096.0f;
    }
    BFloat16 value(uint32_t maker, uint32_t source, uint32_t token, uint32_t i) const {
        return float_to_bfloat16(number(maker, source, token, i));
    }
};

class Combined {
public:
    // Room for what comes back to a rank, no bit of it right, and bits behind it that stay.
    explicit Combined(const TwoHopConfig& config) : config_(config), shape_(config.shape) {
        x_.resize(bytes_of(shape_.max_tokens) / sizeof(Vector16) + 2);
        weights_.resize(size_t{shape_.max_tokens} * shape_.topk + 8);
        rows_.resize(bytes_of(shape_.num_ranks * shape_.max_tokens) / sizeof(Vector16) + 1);
        row_weights_.resize(size_t{shape_.num_ranks} * shape_.max_tokens * shape_.topk + 1);
    }

    // Lays ready what `rank` gives back, in the order of its rows, and adds it to the call.
    void put(TwoHopCall& call, const CombineNumbers& numbers, const TwoHopInputs& inputs, uint32_t rank, bool weighs) {
        memset(x_.data(), 0xff, x_.size() * sizeof(Vector16));
        std::fill(weights_.begin(), weights_.end(), -1.0f);
        auto* values = reinterpret_cast<BFloat16*>(rows_.data());
        size_t row = 0;
        for (uint32_t source = 0; source < shape_.num_ranks; ++source) {
            for (uint32_t token = 0; token < inputs[source].num_tokens; ++token) {
                if (!inputs[source].is_in_rank(shape_, token, rank)) continue;
                for (uint32_t i = 0; i < shape_.hidden; ++i) {
                    values[row * shape_.hidden + i] = numbers.value(rank, source, token, i);
                }
                for (uint32_t k = 0; k < shape_.topk; ++k) {
                    row_weights_[row * shape_.topk + k] = numbers.number(rank, source, token, shape_.hidden + k);
                }
                ++row;
            }
        }
        call.combine_x = reinterpret_cast<const char*>(rows_.data());
        call.combined_x = reinterpret_cast<char*>(x_.data());
        call.has_weights = weighs;
        call.combine_topk_weights = row_weights_.data();
        call.combined_topk_weights = weights_.data();
    }

    // Sums within each node in the order of its peers, rounded to bf16, then of the nodes in their order.
    bool is_right(const CombineNumbers& numbers, const TwoHopInput& own, uint32_t rank, bool weighs) const {
        const auto* values = reinterpret_cast<const BFloat16*>(x_.data());
        for (uint32_t token = 0; token < own.num_tokens; ++token) {
            for (uint32_t i = 0; i < shape_.hidden + (weighs ? shape_.topk : 0); ++i) {
                const bool is_weight = i >= shape_.hidden;
                const float due = sum(numbers, own, rank, token, i);
                const bool ok = is_weight
                                    ? weights_[size_t{token} * shape_.topk + i - shape_.hidden] == due
                                    : values[size_t{token} * shape_.hidden + i].bits == float_to_bfloat16(due).bits;
                if (!ok) {
                    std::fprintf(stderr, "rank %u: wrong combined token (%u, %u)\n", rank, token, i);
                    return false;
                }
            }
        }
        const size_t used = bytes_of(own.num_tokens);
        const auto* bytes = reinterpret_cast<const uint8_t*>(x_.data());
        for (size_t i = used; i < x_.size() * sizeof(Vector16); ++i) {
            if (bytes[i] == 0xff) continue;
            std::fprintf(stderr, "rank %u: written beyond its tokens\n", rank);
            return false;
        }
        return true;
    }

private:
    size_t bytes_of(uint32_t rows) const { return size_t{rows} * shape_.hidden * sizeof(BFloat16); }

    float sum(const CombineNumbers& numbers, const TwoHopInput& own, uint32_t rank, uint32_t token, uint32_t i) const {
        const NodeShape nodes = config_.nodes();
        const bool is_weight = i >= shape_.hidden;
        float total = 0.0f;
        for (uint32_t node = 0; node < nodes.num_nodes; ++node) {
            float of_node = 0.0f;
            bool any = false;
            for (uint32_t peer = 0; peer < nodes.peers; ++peer) {
                const uint32_t maker = nodes.rank_at(node, peer);
                if (!own.is_in_rank(shape_, token, maker)) continue;
                any = true;
                of_node += is_weight ? numbers.number(maker, rank, token, i)
                                     : bfloat16_to_float(numbers.value(maker, rank, token, i));
            }
            if (any) total += is_weight ? of_node : bfloat16_to_float(float_to_bfloat16(of_node));
        }
        return total;
    }

    const TwoHopConfig& config_;
    const MoeShape& shape_;
    std::vector<Vector16> x_, rows_;
    std::vector<float> weights_, row_weights_;
};

}  // namespace tracekern
