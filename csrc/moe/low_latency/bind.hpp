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
    const auto address = [&](const char* name) { return reinterpret_cast<char*>(take_option<uint64_t>(given, name)); };
    LowLatencyCall call{};
    call.slot = take_option<uint32_t>(given, "slot");
    if (call.slot >= kNumSlots) throw std::invalid_argument("slot: wanted 0 or 1");
    call.num_tokens = take_option<uint32_t>(given, "num_tokens");
    call.topk = take_option<uint32_t>(given, "topk");
    call.records_idle = take_option<bool>(given, "records_idle");
    call.has_long_ids = take_option<bool>(given, "has_long_ids");
    call.topk_idx = address("topk_idx");
    call.x = address("x");
    call.packed_recv_x = address("packed_recv_x");
    call.round_scale = take_option<bool>(given, "round_scale");
    call.use_ue8m0 = take_option<bool>(given, "use_ue8m0");
    call.packed_recv_scales = address("packed_recv_scales");
    call.packed_recv_src_info = reinterpret_cast<uint32_t*>(address("packed_recv_src_info"));
    call.packed_recv_layout_range = reinterpret_cast<int64_t*>(address("packed_recv_layout_range"));
    call.packed_recv_count = reinterpret_cast<uint32_t*>(address("packed_recv_count"));
    call.handle = reinterpret_cast<HandleWords*>(address("handle"));
    call.recv_stats = reinterpret_cast<uint32_t*>(address("recv_stats"));
    call.wait_ticks = reinterpret_cast<uint64_t*>(address("wait_ticks"));
    call.expert_rows = address("expert_rows");
    call.expert_scale = reinterpret_cast<const float*>(address("expert_scale"));
    call.topk_weights = reinterpret_cast<const float*>(address("topk_weights"));
    call.out = address("out");
    refuse_options_left(given);
    return call;
}

// Binds Call, the tensors of a call by address, and Buffer.
template <class Backend, auto kTakeBackend>
void bind_low_latency_buffer(pybind11::module_& family) {
    namespace py = pybind11;
    using Buffer = LowLatencyBuffer<Backend>;
    py::class_<LowLatencyCall>(family, "Call", py::module_local()).def(py::init(&make_low_latency_call));
    const auto make = [](typename Backend::Communicator& comm, py::kwargs options) {
        options["num_ranks"] = comm.args().num_ranks;
        auto config = take_config<LowLatency>(options);
        config.num_blocks = take_option<uint32_t>(options, "num_blocks");
        config.warps_per_block = take_option<uint32_t>(options, "warps_per_block");
        config.num_warp_groups = take_option<uint32_t>(options, "num_warp_groups");
        config.first_byte = take_option<uint64_t>(options, "first_byte");
        const auto first_stage = take_option<uint32_t>(options, "first_stage");
        auto backend = kTakeBackend(options);
        refuse_options_left(options);
        return std::make_unique<Buffer>(comm, config, std::move(backend), first_stage);
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
    py::class_<Buffer>(family, "Buffer", py::module_local())
        .def(py::init(make), py::keep_alive<1, 2>(), py::arg("comm"))
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
}

}  // namespace tracekern
