// What the low latency family looks like from Python, besides its facts: see tracekern/moe/low_latency/buffer.py.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "apis/names.hpp"
#include "moe/bind.hpp"
#include "moe/low_latency/buffer.hpp"

namespace tracekern {

// Binds launch arithmetic, layout and pair mapping.
inline void bind_low_latency_facts(pybind11::module_& family) {
    namespace py = pybind11;
    family.attr("num_slots") = kNumSlots;
    family.attr("scale_group") = kScaleGroup;
    family.attr("max_topk") = kMaxLowLatencyTopk;
    family.attr("max_tokens") = kMaxLowLatencyTokens;
    family.def(
        "launch_shape",
        [](uint32_t num_experts, uint32_t num_device_sms, uint32_t num_max_warp_groups) {
            const auto launch = LowLatencyLaunch::of(num_experts, num_device_sms, num_max_warp_groups);
            return py::make_tuple(launch.num_warp_groups, launch.num_warps_per_group, launch.num_sms);
        },
        py::arg("num_experts"),
        py::arg("num_device_sms"),
        py::arg("num_max_warp_groups"));
    family.def("responsible_expert_idx",
               [](uint32_t sm_id, uint32_t warp_id, uint32_t num_warp_groups, uint32_t num_warps_per_group) {
                   return LowLatencyLaunch{num_warp_groups, num_warps_per_group, 0}.responsible_expert_idx(sm_id,
                                                                                                           warp_id);
               });
    family.def("expert_pair", [](uint32_t responsible_expert_idx, uint32_t num_local_experts) {
        const auto pair = ExpertPair::of(responsible_expert_idx, num_local_experts);
        return py::make_tuple(pair.rank, pair.local_expert);
    });
    family.def("message_bytes", [](uint32_t hidden, bool fp8) { return MessageLayout::of(hidden, fp8).bytes; });
}

inline LowLatencyCall make_low_latency_call(pybind11::kwargs given) {
    const auto take = [&](auto& member, const char* name) { take_member(given, member, name); };
    LowLatencyCall call{};
    take(call.slot, "slot");
    if (call.slot >= kNumSlots) throw std::invalid_argument("slot: wanted 0 or 1");
    take(call.num_tokens, "num_tokens");
    take(call.topk, "topk");
    call.records_idle = take_option<bool>(given, "records_idle");
    call.has_long_ids = take_option<bool>(given, "has_long_ids");
    take(call.topk_idx, "topk_idx");
    take(call.x, "x");
    take(call.packed_recv_x, "packed_recv_x");
    call.round_scale = take_option<bool>(given, "round_scale");
    call.use_ue8m0 = take_option<bool>(given, "use_ue8m0");
    take(call.packed_recv_scales, "packed_recv_scales");
    take(call.packed_recv_src_info, "packed_recv_src_info");
    take(call.packed_recv_layout_range, "packed_recv_layout_range");
    take(call.packed_recv_count, "packed_recv_count");
    take(call.handle, "handle");
    take(call.recv_stats, "recv_stats");
    take(call.wait_ticks, "wait_ticks");
    take(call.expert_rows, "expert_rows");
    take(call.expert_scale, "expert_scale");
    take(call.topk_weights, "topk_weights");
    take(call.out, "out");
    refuse_options_left(given);
    return call;
}

// Binds LowLatencyBuffer. Comm: see LowLatencyOn.
template <class Backend, auto kTakeBackend, class Comm>
pybind11::class_<LowLatencyBuffer<Backend, Comm>> bind_low_latency_buffer_on(pybind11::module_& family,
                                                                             const char* name) {
    namespace py = pybind11;
    using Buffer = LowLatencyBuffer<Backend, Comm>;
    const auto take_grid = [](LowLatencyConfig& config, py::kwargs& options) {
        take_member(options, config.num_blocks, "num_blocks");
        take_member(options, config.warps_per_block, "warps_per_block");
        take_member(options, config.num_warp_groups, "num_warp_groups");
        take_member(options, config.first_byte, "first_byte");
        if constexpr (kIsFar<Comm>) {
            take_member(options, config.commands, "commands");
            take_member(options, config.far_heap, "far_heap");
        }
    };
    const auto run = [](Buffer& buffer,
                        const std::vector<std::string>& names,
                        const LowLatencyCall& call,
                        bool fp8,
                        const std::vector<uint64_t>& descriptors,
                        uint64_t stream) {
        std::vector<LowLatencyStage> stages;
        for (const auto& name : names) {
            stages.push_back(enum_named<LowLatencyStage>("stage", name, kLowLatencyStageNames));
        }
        const std::vector<TraceChoice> traces(descriptors.begin(), descriptors.end());
        py::gil_scoped_release release;
        buffer.run(stages, call, fp8, traces, stream);
    };
    py::class_<Buffer> bound(family, name, py::module_local());
    bound
        .def(py::init(maker<LowLatencyOn<Comm>, Buffer, kTakeBackend>(take_grid)),
             py::keep_alive<1, 2>(),
             py::arg("comm"))
        .def("reset", &Buffer::reset)
        .def("epoch", &Buffer::epoch, py::arg("slot"))
        // (token, choice, expert) of a choice that no kernel followed, or None.
        .def("take_bad_choice",
             [](Buffer& buffer) -> py::object {
                 const auto bad = buffer.take_bad_choice();
                 return bad ? py::object(py::make_tuple(bad->token, bad->choice, bad->expert)) : py::none();
             })
        .def("run",
             run,
             py::arg("stages"),
             py::arg("call"),
             py::arg("fp8"),
             py::arg("descriptors"),
             py::arg("stream") = 0);
    return bound;
}

// Binds Call, the tensors of a call by address, and Buffer.
template <class Backend, auto kTakeBackend>
void bind_low_latency_buffer(pybind11::module_& family) {
    pybind11::class_<LowLatencyCall>(family, "Call", pybind11::module_local())
        .def(pybind11::init(&make_low_latency_call));
    bind_low_latency_buffer_on<Backend, kTakeBackend, CommArgs>(family, "Buffer");
}

}  // namespace tracekern
