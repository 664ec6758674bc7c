// What the two-hop family looks like from Python, besides its facts: see tracekern/moe/two_hop/buffer.py.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "apis/names.hpp"
#include "moe/bind.hpp"
#include "moe/two_hop/buffer.hpp"

namespace tracekern {

inline void bind_two_hop_facts(pybind11::module_& family) {
    namespace py = pybind11;
    family.attr("num_senders") = kNumSenders;
    family.attr("max_warps") = kMaxTeamWarps;
    family.attr("max_nodes") = kMaxTwoHopNodes;
    family.attr("max_channels") = kMaxTwoHopChannels;
    family.attr("max_tokens") = kMaxTwoHopTokens;
    family.attr("rings") = names_list(kTwoHopRingNames);
    family.attr("refusals") = names_list(kTwoHopRefusalNames);
    family.attr("handle_number_bits") = kHandleNumberBits;
    family.def("least_rdma_slots", &RingSizes::least_rdma_slots);
    // Warps of a block of dispatch or combine.
    family.def("warps", [](uint32_t num_nodes, uint32_t peers, uint32_t peer_warps) {
        TwoHopConfig config;
        config.shape.num_ranks = num_nodes * peers;
        config.num_nodes = num_nodes;
        config.peer_warps = peer_warps;
        config.set_grid();
        return config.warps_per_block;
    });
    family.def("part_slots", [](uint32_t nvl_slots, uint32_t num_nodes) {
        return RingSizes::of(0, 0, nvl_slots, 1, num_nodes).part_slots;
    });
    family.def("row_bytes", [](uint32_t hidden_bytes, uint32_t num_places, uint32_t num_scales, uint32_t topk) {
        return RowLayout::of(hidden_bytes, num_places, num_scales, topk).bytes;
    });
    // (send, receive) of a channel's part for a node.
    family.def("sym_buffer",
               [](uint64_t part_bytes, uint32_t num_nodes, uint32_t num_channels, uint32_t channel, uint32_t node) {
                   const SymBuffer buffer{part_bytes, num_nodes, num_channels};
                   return py::make_tuple(buffer.send(channel, node), buffer.recv(channel, node));
               });
    family.def("asym_buffer",
               [](uint64_t part_bytes, uint32_t num_peers, uint32_t num_channels, uint32_t channel, uint32_t peer) {
                   return AsymBuffer{part_bytes, num_peers, num_channels}.at(channel, peer);
               });
}

inline TwoHopCall make_two_hop_call(pybind11::kwargs given) {
    TwoHopCall call{};
    const auto take = [&](auto& member, const char* name) { take_member(given, member, name); };
    take(call.num_tokens, "num_tokens");
    take(call.expert_alignment, "expert_alignment");
    take(call.recv_capacity, "recv_capacity");
    take(call.forward_capacity, "forward_capacity");
    take(call.ticket, "ticket");
    take(call.told, "handle_number");
    call.has_weights = take_option<bool>(given, "has_weights");
    take(call.x, "x");
    take(call.x_scales, "x_scales");
    take(call.topk_idx, "topk_idx");
    take(call.topk_weights, "topk_weights");
    take(call.is_token_in_rank, "is_token_in_rank");
    take(call.num_tokens_per_rank, "num_tokens_per_rank");
    take(call.num_tokens_per_rdma_rank, "num_tokens_per_rdma_rank");
    take(call.num_tokens_per_expert, "num_tokens_per_expert");
    take(call.rdma_channel_prefix_matrix, "rdma_channel_prefix_matrix");
    take(call.gbl_channel_prefix_matrix, "gbl_channel_prefix_matrix");
    take(call.recv_rdma_rank_prefix_sum, "recv_rdma_rank_prefix_sum");
    take(call.recv_gbl_rank_prefix_sum, "recv_gbl_rank_prefix_sum");
    take(call.recv_x, "recv_x");
    take(call.recv_x_scales, "recv_x_scales");
    take(call.recv_topk_idx, "recv_topk_idx");
    take(call.recv_topk_weights, "recv_topk_weights");
    take(call.recv_src_meta, "recv_src_meta");
    take(call.send_rdma_head, "send_rdma_head");
    take(call.send_nvl_head, "send_nvl_head");
    take(call.recv_rdma_channel_prefix_matrix, "recv_rdma_channel_prefix_matrix");
    take(call.recv_gbl_channel_prefix_matrix, "recv_gbl_channel_prefix_matrix");
    take(call.combine_x, "combine_x");
    take(call.combine_topk_weights, "combine_topk_weights");
    take(call.bias[0], "bias_0");
    take(call.bias[1], "bias_1");
    take(call.combined_x, "combined_x");
    take(call.combined_topk_weights, "combined_topk_weights");
    refuse_options_left(given);
    return call;
}

// A member function that launches a kernel, as Python calls it: with a trace's descriptor, and without Python's lock.
template <class Buffer, class Result>
auto launching(Result (Buffer::*launch)(const TwoHopCall&, TraceChoice, uint64_t)) {
    return [launch](Buffer& buffer, const TwoHopCall& call, uint64_t descriptor, uint64_t stream) {
        const pybind11::gil_scoped_release release;
        return (buffer.*launch)(call, descriptor, stream);
    };
}

// Binds Call, the tensors of a call by address (0: not there yet), and Buffer.
template <class Backend, auto kTakeBackend>
void bind_two_hop_buffer(pybind11::module_& family) {
    namespace py = pybind11;
    using Buffer = TwoHopBuffer<Backend>;
    py::class_<TwoHopCall>(family, "Call", py::module_local()).def(py::init(&make_two_hop_call));
    const auto check = [](TwoHopConfig& config, py::kwargs&) {
        config.check(RingSizes::least_rdma_slots(config.rdma_send));
        config.set_grid();
    };
    const auto wait_counts = [](const Buffer& buffer, uint64_t ticket, uint32_t limit_us) -> py::object {
        const auto counts = [&] {
            const py::gil_scoped_release release;
            return buffer.wait_counts(ticket, limit_us);
        }();
        if (!counts) return py::none();
        return py::make_tuple(
            counts->num_recv_tokens, counts->num_rdma_recv_tokens, counts->num_recv_tokens_per_expert);
    };
    py::class_<Buffer>(family, "Buffer", py::module_local())
        .def(py::init(maker<TwoHop, Buffer, kTakeBackend>(check)), py::keep_alive<1, 2>(), py::arg("comm"))
        .def("reset", &Buffer::reset)
        .def_property_readonly("epoch", &Buffer::epoch)
        .def("notify", launching(&Buffer::notify), py::arg("call"), py::arg("descriptor"), py::arg("stream") = 0)
        .def("dispatch", launching(&Buffer::dispatch), py::arg("call"), py::arg("descriptor"), py::arg("stream") = 0)
        .def("cached_dispatch",
             launching(&Buffer::cached_dispatch),
             py::arg("call"),
             py::arg("descriptor"),
             py::arg("stream") = 0)
        .def("combine", launching(&Buffer::combine), py::arg("call"), py::arg("descriptor"), py::arg("stream") = 0)
        .def("take_overflow", &Buffer::take_overflow)
        // (moe_recv_counter, moe_recv_rdma_counter, moe_recv_expert_counter) of the notify with that ticket, or None.
        .def("wait_counts", wait_counts, py::arg("ticket"), py::arg("limit_us"));
}

}  // namespace tracekern
