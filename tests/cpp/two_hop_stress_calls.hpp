// Where the results of a two_hop_stress call are, and the bits that have to be there.
#pragma once

#include <algorithm>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "moe/two_hop/buffer.hpp"
#include "two_hop_stress_plan.hpp"

namespace tracekern {

// The tensors that a call of one rank writes, as large as they may have to be, and bits behind each that stay.
class TwoHopOutputs {
public:
    TwoHopCall call{};  // points here

    explicit TwoHopOutputs(const TwoHopConfig& config) {
        const uint64_t nodes = config.num_nodes, ranks = config.shape.num_ranks, channels = config.channels;
        const uint64_t tokens = config.shape.max_tokens, topk = config.shape.topk;
        const uint64_t rows = ranks * tokens, forwarded = nodes * tokens;
        add("rdma_channel_prefix_matrix", call.rdma_channel_prefix_matrix, nodes * channels);
        add("gbl_channel_prefix_matrix", call.gbl_channel_prefix_matrix, ranks * channels);
        add("recv_rdma_rank_prefix_sum", call.recv_rdma_rank_prefix_sum, nodes);
        add("recv_gbl_rank_prefix_sum", call.recv_gbl_rank_prefix_sum, ranks);
        add("recv_rdma_channel_prefix_matrix", call.recv_rdma_channel_prefix_matrix, nodes * channels);
        add("recv_gbl_channel_prefix_matrix", call.recv_gbl_channel_prefix_matrix, ranks * channels);
        add("send_rdma_head", call.send_rdma_head, tokens * nodes);
        add("send_nvl_head", call.send_nvl_head, forwarded * config.nodes().peers);
        add("recv_src_meta", call.recv_src_meta, rows);
        add("recv_topk_idx", call.recv_topk_idx, rows * topk);
        add("recv_topk_weights", call.recv_topk_weights, rows * topk);
        add("recv_x_scales", call.recv_x_scales, rows * config.row().num_scales);
        add("recv_x", call.recv_x, rows * config.row().hidden_bytes);
    }
    TwoHopOutputs(const TwoHopOutputs&) = delete;

    // No bit is right.
    void clear() {
        for (Tensor& tensor : tensors_) memset(tensor.memory.data(), 0xff, tensor.num_bytes());
    }

    // The tensors that differ, and the first word of each that does; "" where none does.
    std::string difference(const TwoHopOutputs& due) const {
        std::string found;
        for (size_t i = 0; i < tensors_.size(); ++i) {
            const Tensor& other = due.tensors_[i];
            if (memcmp(tensors_[i].memory.data(), other.memory.data(), other.num_bytes()) == 0) continue;
            const std::vector<uint32_t> own = tensors_[i].words(), wanted = other.words();
            const auto at = std::mismatch(own.begin(), own.end(), wanted.begin());
            const auto word = std::to_string(at.first - own.begin());
            found += tensors_[i].name + " word " + word + ": " + std::to_string(*at.first) + " for " +
                     std::to_string(*at.second) + "; ";
        }
        return found;
    }

private:
    struct Tensor {
        std::string name;
        std::vector<Vector16> memory;

        size_t num_bytes() const { return memory.size() * sizeof(Vector16); }
        std::vector<uint32_t> words() const {
            std::vector<uint32_t> words(num_bytes() / sizeof(uint32_t));
            memcpy(words.data(), memory.data(), num_bytes());
            return words;
        }
    };

    template <class T>
    void add(const char* name, T*& at, uint64_t count) {
        Tensor& tensor = tensors_.emplace_back();
        tensor.name = name;
        tensor.memory.resize(count * sizeof(T) / sizeof(Vector16) + 2);
        at = reinterpret_cast<T*>(tensor.memory.data());
    }

    std::deque<Tensor> tensors_;
};

// What is to come out of a call at one rank, by going through tokens one after the other.
class TwoHopOracle {
public:
    TwoHopOracle(const TwoHopConfig& config, const TwoHopInputs& inputs, uint32_t rank)
        : config_(config),
          shape_(config.shape),
          nodes_(config.nodes()),
          inputs_(inputs),
          rank_(rank),
          node_(nodes_.node_of(rank)),
          peer_(nodes_.peer_of(rank)) {}

    RecvCounts counts(uint32_t expert_alignment) const {
        RecvCounts counts{};
        for (const TwoHopInput& input : inputs_) {
            counts.num_recv_tokens += static_cast<uint32_t>(input.num_tokens_per_rank[rank_]);
        }
        for (uint32_t node = 0; node < nodes_.num_nodes; ++node) {
            counts.num_rdma_recv_tokens += static_cast<uint32_t>(source(node).num_tokens_per_rdma_rank[node_]);
        }
        for (uint32_t expert = 0; expert < shape_.num_local_experts(); ++expert) {
            uint32_t choices = 0;
            for (const TwoHopInput& input : inputs_) {
                choices +=
                    static_cast<uint32_t>(input.num_tokens_per_expert[rank_ * shape_.num_local_experts() + expert]);
            }
            counts.num_recv_tokens_per_expert.push_back((choices + expert_alignment - 1) / expert_alignment *
                                                        expert_alignment);
        }
        return counts;
    }

    void fill(const TwoHopCall& out) const {
        fill_sent(out);
        fill_forwarded(out);
        fill_received(out);
    }

private:
    // Whose tokens this rank forwards.
    const TwoHopInput& source(uint32_t node) const { return inputs_[nodes_.rank_at(node, peer_)]; }

    uint32_t peers_of(const TwoHopInput& input, uint32_t token, uint32_t node) const {
        uint32_t peers = 0;
        for (uint32_t peer = 0; peer < nodes_.peers; ++peer) {
            peers |= uint32_t{input.is_in_rank(shape_, token, nodes_.rank_at(node, peer))} << peer;
        }
        return peers;
    }

    // Calls visit(channel, token) for all tokens in their order, and end_channel(channel) behind each channel's.
    template <class Visit, class End>
    void for_tokens(const TwoHopInput& input, Visit visit, End end_channel) const {
        const uint32_t share = (input.num_tokens + config_.channels - 1) / config_.channels;
        uint32_t token = 0;
        for (uint32_t channel = 0; channel < config_.channels; ++channel) {
            for (uint32_t i = 0; i < share && token < input.num_tokens; ++i) visit(channel, token++);
            end_channel(channel);
        }
    }

    void fill_sent(const TwoHopCall& out) const {
        const TwoHopInput& own = inputs_[rank_];
        for (uint32_t node = 0; node < nodes_.num_nodes; ++node) {
            int32_t before = 0, place = 0;  // tokens of earlier channels, and of this one
            for_tokens(
                own,
                [&](uint32_t, uint32_t token) {
                    const bool goes = peers_of(own, token, node) != 0;
                    out.send_rdma_head[size_t{token} * nodes_.num_nodes + node] = goes ? place++ : -1;
                },
                [&](uint32_t channel) {
                    before += std::exchange(place, 0);
                    out.rdma_channel_prefix_matrix[node * config_.channels + channel] = before;
                });
        }
        for (uint32_t rank = 0; rank < shape_.num_ranks; ++rank) {
            int32_t so_far = 0;
            for_tokens(
                own,
                [&](uint32_t, uint32_t token) { so_far += own.is_in_rank(shape_, token, rank); },
                [&](uint32_t channel) { out.gbl_channel_prefix_matrix[rank * config_.channels + channel] = so_far; });
        }
    }

    void fill_forwarded(const TwoHopCall& out) const {
        uint32_t row = 0;
        for (uint32_t node = 0; node < nodes_.num_nodes; ++node) {
            const TwoHopInput& input = source(node);
            const uint32_t first = row;
            std::vector<int32_t> places(nodes_.peers);
            for_tokens(
                input,
                [&](uint32_t, uint32_t token) {
                    const uint32_t peers = peers_of(input, token, node_);
                    if (!peers) return;
                    for (uint32_t peer = 0; peer < nodes_.peers; ++peer) {
                        out.send_nvl_head[size_t{row} * nodes_.peers + peer] = peers >> peer & 1 ? places[peer]++ : -1;
                    }
                    ++row;
                },
                [&](uint32_t channel) {
                    out.recv_rdma_channel_prefix_matrix[node * config_.channels + channel] =
                        static_cast<int32_t>(row - first);
                    std::fill(places.begin(), places.end(), 0);
                });
            out.recv_rdma_rank_prefix_sum[node] = static_cast<int32_t>(row);
        }
    }

    void fill_received(const TwoHopCall& out) const {
        uint32_t row = 0;
        for (uint32_t rank = 0; rank < shape_.num_ranks; ++rank) {
            const TwoHopInput& input = inputs_[rank];
            int32_t* first_rows = out.recv_gbl_channel_prefix_matrix + size_t{rank} * config_.channels;
            *first_rows = static_cast<int32_t>(row);
            for_tokens(
                input,
                [&](uint32_t, uint32_t token) {
                    if (input.is_in_rank(shape_, token, rank_)) fill_row(out, row++, rank, token);
                },
                [&](uint32_t channel) {
                    if (channel + 1 < config_.channels) first_rows[channel + 1] = static_cast<int32_t>(row);
                });
            out.recv_gbl_rank_prefix_sum[rank] = static_cast<int32_t>(row);
        }
    }

    void fill_row(const TwoHopCall& out, size_t row, uint32_t source_rank, uint32_t token) const {
        const TwoHopInput& input = inputs_[source_rank];
        const RowLayout layout = config_.row();
        const auto copy = [&](auto* to, const auto* from, size_t bytes) {
            memcpy(
                reinterpret_cast<char*>(to) + row * bytes, reinterpret_cast<const char*>(from) + token * bytes, bytes);
        };
        copy(out.recv_x, input.x.data(), layout.hidden_bytes);
        if (layout.num_scales) copy(out.recv_x_scales, input.x_scales.data(), layout.num_scales * sizeof(float));
        out.recv_src_meta[row] = {nodes_.node_of(source_rank), peers_of(input, token, node_)};
        for (uint32_t choice = 0; choice < shape_.topk; ++choice) {
            const size_t to = row * shape_.topk + choice, from = size_t{token} * shape_.topk + choice;
            const int64_t local = input.topk_idx[from] - int64_t{rank_} * shape_.num_local_experts();
            const bool is_local = local >= 0 && local < shape_.num_local_experts();
            out.recv_topk_idx[to] = is_local ? local : -1;
            out.recv_topk_weights[to] = is_local ? input.topk_weights[from] : 0.0f;
        }
    }

    const TwoHopConfig& config_;
    const MoeShape& shape_;
    const NodeShape nodes_;
    const TwoHopInputs& inputs_;
    const uint32_t rank_, node_, peer_;
};

}  // namespace tracekern
