// What two_hop_stress runs: its command line, shapes that it draws, and what each rank feeds into a call.
#pragma once

#include <optional>
#include <random>
#include <string>

#include "moe/two_hop/family.h"
#include "platform/cpu_executor.hpp"

#define TK_OWN_CHANNEL_NAMES kTwoHopChannelNames
#include "stress_proxies.hpp"

namespace tracekern {

// How many tokens there are and where they go:
//   drawn   in each call anew: nobody has any, or some have; all go to one rank, to one node, to all nodes but one
//   hub     every rank has as many as fit, and all of them go to rank 0
enum class Traffic : uint32_t { drawn, hub };
inline constexpr const char* kTrafficNames[] = {"drawn", "hub"};

enum class Combine : uint32_t { drawn, never, always };
inline constexpr const char* kCombineNames[] = {"drawn", "never", "always"};

struct TwoHopStress {
    TwoHopConfig config;
    std::string name;  // its arguments
    CpuExecutor executor;
    NetworkOptions network;  // nodes are hosts where it has a library
    Traffic traffic = Traffic::drawn;
    Combine combine = Combine::drawn;
    uint32_t leaves = ~0u;
    uint32_t leaves_combine = ~0u;
    bool always_graph = false;
    uint32_t num_calls;
    uint32_t seed;
    StressOptions stress;

    // Of what `a` and `b` tell apart.
    std::mt19937 random(uint32_t a, uint32_t b = 0) const { return std::mt19937(seed * 7919u + a * 104729u + b); }
    // Whether the tokens of a call are sent once more, the same on all ranks.
    bool repeats(uint32_t call) const { return combine != Combine::never && random(call, 3 * kMaxRanks)() % 3 == 0; }
    // Whether the dispatch of a call is followed by a combine, the same on all ranks.
    bool combines(uint32_t call) const {
        if (combine == Combine::never) return false;
        return combine == Combine::always || random(call, 2 * kMaxRanks)() % 2;
    }
};

// The numbers of a shape on the command line, in their order.
struct TwoHopNumbers {
    uint32_t nodes, peers, channels, tokens, hidden, local_experts, topk;
    uint32_t rdma_send, rdma_recv, nvl_send, nvl_recv;
    uint32_t fp8;
    uint32_t peer_warps;

    static constexpr int kCount = 13;
    static TwoHopNumbers parse(char** given) {
        uint32_t numbers[kCount];
        for (int i = 0; i < kCount; ++i) numbers[i] = StressOptions::number(given[i]);
        return bits_as<TwoHopNumbers>(numbers);
    }
    std::string text() const {
        uint32_t numbers[kCount];
        memcpy(numbers, this, sizeof(numbers));
        std::string text;
        for (const uint32_t number : numbers) text += std::to_string(number) + " ";
        return text;
    }

    // Throws for what no kernel runs with. Rings may be shorter than the proved least.
    TwoHopConfig config() const {
        TwoHopConfig config{};
        config.number = NumberType::bf16;
        config.shape = {nodes * peers, tokens, nodes * peers * local_experts, topk, hidden, sizeof(BFloat16)};
        config.num_nodes = nodes;
        config.channels = channels;
        config.nvl_send = nvl_send;
        config.nvl_recv = nvl_recv;
        config.rdma_send = rdma_send;
        config.rdma_recv = rdma_recv;
        config.fp8 = fp8;
        config.peer_warps = peer_warps;
        config.check(/*least_slots=*/1);
        config.set_grid();
        return config;
    }

    static TwoHopNumbers draw(std::mt19937& random) {
        constexpr uint32_t kShapes[][2] = {
            {1, 1}, {1, 2}, {2, 1}, {2, 2}, {3, 1}, {3, 2}, {4, 1}, {4, 2}, {1, 4}, {2, 4}, {1, 8}, {2, 8}};
        const auto up_to = [&](uint32_t most) { return static_cast<uint32_t>(random() % most) + 1; };
        const auto& ranks = kShapes[random() % std::size(kShapes)];
        TwoHopNumbers drawn{};
        drawn.nodes = ranks[0];
        drawn.peers = ranks[1];
        drawn.channels = random() % 2 ? up_to(3) : up_to(12);
        drawn.tokens = random() % 4 ? up_to(24) : up_to(160);
        drawn.fp8 = random() % 2;
        drawn.hidden = drawn.fp8 ? 128 * up_to(2) : 8 * up_to(24);
        drawn.local_experts = up_to(3);
        drawn.topk = up_to(8);
        // From the least that the proof allows up to rings that hold all tokens.
        drawn.rdma_send = up_to(6);
        const uint32_t least = RingSizes::least_rdma_slots(drawn.rdma_send);
        const uint32_t wanted = random() % 4 == 0 ? drawn.tokens : least + (random() % 2 ? random() % 12 : 0);
        drawn.rdma_recv = drawn.rdma_send * ((std::max(least, wanted) + drawn.rdma_send - 1) / drawn.rdma_send);
        drawn.nvl_send = up_to(5);
        const uint32_t room = random() % 4 == 0 ? drawn.tokens * drawn.nodes : random() % 2 ? random() % 6 : 0;
        drawn.nvl_recv = drawn.nvl_send + room;
        drawn.peer_warps = random() % 2 ? 1 : up_to(8 / drawn.peers);
        return drawn;
    }
};

// What one rank feeds into one call: a function of (seed, rank, call).
struct TwoHopInput {
    uint32_t num_tokens;
    std::vector<Vector16> x;  // [token][hidden]
    std::vector<float> x_scales;
    std::vector<int64_t> topk_idx;
    std::vector<float> topk_weights;
    std::vector<uint8_t> is_token_in_rank;
    std::vector<int32_t> num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert;

    TwoHopInput(const TwoHopStress& options, uint32_t call, uint32_t rank) {
        const MoeShape& shape = options.config.shape;
        std::mt19937 random = options.random(call, 1 + rank);
        draw_choices(options, options.random(call)(), random);
        x.resize(size_t{num_tokens} * options.config.row().hidden_bytes / sizeof(Vector16));
        for (Vector16& vector : x) {
            for (uint32_t& word : vector.words) word = static_cast<uint32_t>(random());
        }
        std::uniform_real_distribution<float> number(0.0f, 1.0f);
        x_scales.resize(size_t{num_tokens} * options.config.row().num_scales);
        for (float& scale : x_scales) scale = number(random);
        topk_weights.resize(size_t{num_tokens} * shape.topk);
        for (float& weight : topk_weights) weight = number(random);
        count(shape, options.config.nodes());
    }

    bool is_in_rank(const MoeShape& shape, uint32_t token, uint32_t rank) const {
        return is_token_in_rank[size_t{token} * shape.num_ranks + rank] != 0;
    }

private:
    // common: a number that all ranks drew.
    void draw_choices(const TwoHopStress& options, uint32_t common, std::mt19937& random) {
        const MoeShape& shape = options.config.shape;
        const bool is_hub = options.traffic == Traffic::hub;
        const uint32_t of_node = shape.num_experts / options.config.num_nodes;
        const uint32_t kind = is_hub ? 0 : common % 8, place = is_hub ? 0 : common / 8;
        uint32_t first = 0, num_open = shape.num_experts;
        if (kind == 0) {  // one rank
            num_open = shape.num_local_experts();
            first = place % shape.num_ranks * num_open;
        } else if (kind == 1) {  // one node
            num_open = of_node;
            first = place % options.config.num_nodes * num_open;
        } else if (kind == 2 && options.config.num_nodes > 1) {  // all nodes but one
            num_open -= of_node;
            first = place % options.config.num_nodes * of_node;
        }
        const bool is_full = is_hub || kind == 3 || random() % 4 == 0, has_none = kind != 3 && random() % 4 == 0;
        num_tokens = is_full    ? shape.max_tokens
                     : has_none ? 0
                                : static_cast<uint32_t>(random()) % (shape.max_tokens + 1);
        for (uint32_t token = 0; token < num_tokens; ++token) {
            const bool is_nowhere = !is_hub && random() % 16 == 0;
            for (uint32_t choice = 0; choice < shape.topk; ++choice) {
                const bool is_left_out = is_nowhere || (!is_hub && random() % 8 == 0);
                const uint32_t expert = (first + static_cast<uint32_t>(random()) % num_open) % shape.num_experts;
                topk_idx.push_back(is_left_out ? -1 : int64_t{expert});
            }
        }
    }

    // As tracekern/moe/two_hop/layout.py does.
    void count(const MoeShape& shape, const NodeShape& nodes) {
        is_token_in_rank.resize(size_t{num_tokens} * shape.num_ranks);
        num_tokens_per_rank.resize(shape.num_ranks);
        num_tokens_per_rdma_rank.resize(nodes.num_nodes);
        num_tokens_per_expert.resize(shape.num_experts);
        for (size_t flat = 0; flat < topk_idx.size(); ++flat) {
            if (topk_idx[flat] < 0) continue;
            const auto expert = static_cast<uint32_t>(topk_idx[flat]);
            ++num_tokens_per_expert[expert];
            is_token_in_rank[flat / shape.topk * shape.num_ranks + expert / shape.num_local_experts()] = 1;
        }
        for (uint32_t token = 0; token < num_tokens; ++token) {
            for (uint32_t node = 0; node < nodes.num_nodes; ++node) {
                bool goes = false;
                for (uint32_t peer = 0; peer < nodes.peers; ++peer) {
                    const bool is_wanted = is_in_rank(shape, token, nodes.rank_at(node, peer));
                    num_tokens_per_rank[nodes.rank_at(node, peer)] += is_wanted;
                    goes = goes || is_wanted;
                }
                num_tokens_per_rdma_rank[node] += goes;
            }
        }
    }
};

// Of all ranks. Drawn before any rank starts: what threads share while they run could order what the kernels must.
using TwoHopInputs = std::vector<TwoHopInput>;
inline std::vector<TwoHopInputs> draw_inputs(const TwoHopStress& options) {
    std::vector<TwoHopInputs> calls(options.num_calls);
    for (uint32_t call = 0; call < options.num_calls; ++call) {
        for (uint32_t rank = 0; rank < options.config.shape.num_ranks; ++rank) {
            calls[call].emplace_back(options, call, rank);
        }
    }
    return calls;
}

}  // namespace tracekern
