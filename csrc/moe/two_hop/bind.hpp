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
    const auto take = [&](auto& value, const char* name) {
        value = take_option<std::decay_t<decltype(value)>>(given, name);
    };
    const auto address = [&](auto& pointer, const char* name) {
        pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(take_option<uint64_t>(given, name));
    };
    take(call.num_tokens, "num_tokens");
    take(call.expert_alignment, "expert_alignment");
    take(call.recv_capacity, "recv_capacity");
    take(call.forward_capacity, "forward_capacity");
    take(call.ticket, "ticket");
    take(call.told, "handle_number");
    call.has_weights = take_option<bool>(given, "has_weights");
    address(call.x, "x");
    address(call.x_scales, "x_scales");
    address(call.topk_idx, "topk_idx");
    address(call.topk_weights, "topk_weights");
    address(call.is_token_in_rank, "is_token_in_rank");
    address(call.num_tokens_per_rank, "num_tokens_per_rank");
    address(call.num_tokens_per_rdma_rank, "num_tokens_per_rdma_rank");
    address(call.num_tokens_per_expert, "num_tokens_per_expert");
    address(call.rdma_channel_prefix_matrix, "rdma_channel_prefix_matrix");
    address(call.gbl_channel_prefix_matrix, "gbl_channel_prefix_matrix");
    address(call.recv_rdma_rank_prefix_sum, "recv_rdma_rank_prefix_sum");
    address(call.recv_gbl_rank_prefix_sum, "recv_gbl_rank_prefix_sum");
    address(call.recv_x, "recv_x");
    address(call.recv_x_scales, "recv_x_scales");
    address(call.recv_topk_idx, "recv_topk_idx");
    address(call.recv_topk_weights, "recv_topk_weights");
    address(call.recv_src_meta, "recv_src_meta");
    address(call.send_rdma_head, "send_rdma_head");
    address(call.send_nvl_head, "send_nvl_head");
    address(call.recv_rdma_channel_prefix_matrix, "recv_rdma_channel_prefix_matrix");
    address(call.recv_gbl_channel_prefix_matrix, "recv_gbl_channel_prefix_matrix");
    address(call.combine_x, "combine_x");
    address(call.combine_topk_weights, "combine_topk_weights");
    address(call.bias[0], "bias_0");
    address(call.bias[1], "bias_1");
    address(call.combined_x, "combined_x");
    address(call.combined_topk_weights, "combined_topk_weights");
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
    const auto make = [](typename Backend::Communicator& comm, py::kwargs options) {
        options["num_ranks"] = comm.args().num_ranks;
        auto config = take_config<TwoHop>(options);
        config.check(RingSizes::least_rdma_slots(config.rdma_send));
        config.set_grid();
        const auto first_stage = take_option<uint32_t>(options, "first_stage");
        auto backend = kTakeBackend(options);
        refuse_options_left(options);
        return std::make_unique<Buffer>(comm, config, std::move(backend), first_stage);
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
        .def(py::init(make), py::keep_alive<1, 2>(), py::arg("comm"))
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
