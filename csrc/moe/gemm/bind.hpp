// What the kernels of int4 experts look like from Python; see tracekern/moe/gemm/kernels.py.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "apis/names.hpp"
#include "moe/bind.hpp"
#include "moe/gemm/family.h"

namespace tracekern {

// How many blocks a stage is launched with, and of how many warps.
struct GemmGrid {
    uint32_t num_blocks;
    uint32_t num_warps;
};

inline GemmArgs make_gemm_args(pybind11::kwargs given) {
    const auto number = [&](const char* name) { return take_option<uint32_t>(given, name); };
    const auto address = [&](const char* name) { return reinterpret_cast<char*>(take_option<uint64_t>(given, name)); };
    GemmArgs args{};
    args.num_tokens = number("num_tokens");
    args.topk = number("topk");
    args.num_experts = number("num_experts");
    args.num_listed = number("num_listed");
    args.hidden = number("hidden");
    args.intermediate = number("intermediate");
    args.num_rows = number("num_rows");
    args.rows_per_expert = number("rows_per_expert");
    args.expert_ids = reinterpret_cast<const uint32_t*>(address("expert_ids"));
    args.abort = reinterpret_cast<const uint32_t*>(address("abort"));
    args.x = address("x");
    args.topk_ids = reinterpret_cast<const int32_t*>(address("topk_ids"));
    args.topk_weights = reinterpret_cast<const float*>(address("topk_weights"));
    args.w13 = reinterpret_cast<const PackedPair*>(address("w13"));
    args.w2 = reinterpret_cast<const PackedPair*>(address("w2"));
    args.expert_offset = reinterpret_cast<uint32_t*>(address("expert_offset"));
    args.row_counts = reinterpret_cast<const uint32_t*>(address("row_counts"));
    args.offset_stride = args.row_counts ? 2 : 1;
    args.tile_end = reinterpret_cast<uint32_t*>(address("tile_end"));
    args.tile_list = reinterpret_cast<TokenTile*>(address("tile_list"));
    args.tile_count = reinterpret_cast<uint32_t*>(address("tile_count"));
    args.inverse = reinterpret_cast<int32_t*>(address("inverse"));
    args.x_rows = address("x_rows");
    args.middle_rows = address("middle_rows");
    args.result_rows = address("result_rows");
    args.out = address("out");
    args.detail = number("detail");
    refuse_options_left(given);
    return args;
}

inline GemmConfig gemm_config(const std::string& staging, bool is_detailed) {
    return {enum_named<GemmStaging>("staging", staging, kGemmStagingNames),
            is_detailed ? GemmDetail::steps : GemmDetail::parts};
}

// Binds facts that Python and the kernels share.
inline void bind_gemm_facts(pybind11::module_& family) {
    family.attr("stages") = names_list(kGemmStageNames);
    family.attr("roles") = names_list(kGemmRoleNames);
    family.attr("stagings") = names_list(kGemmStagingNames);
    family.attr("few_tokens") = kFewTokens;
    family.attr("num_tile_lists") = kNumTileWidths;
    family.attr("open_list_rows") = kOpenListRows;
    family.attr("tile_tokens") = GemmTile::kTokens;
    family.attr("tile_outputs") = GemmTile::kOutputs;
    family.attr("max_experts") = kMaxGemmExperts;
    family.attr("max_topk") = kMaxGemmTopk;
    family.def("event_table", &describe_events<GemmEvent>);
    family.def("shared_bytes", &SweepShared::bytes, pybind11::arg("channels"));
}

// Binds Call, the tensors of a call by address, grid() and run(). Backend: where kernels run. comm: whose rank they
// belong to, or None.
template <class Backend>
void bind_gemm_kernels(pybind11::module_& family) {
    namespace py = pybind11;
    py::class_<GemmArgs>(family, "Call", py::module_local()).def(py::init(&make_gemm_args));
    const auto with_body = [](const std::string& stage, const std::string& staging, const GemmArgs& args, auto f) {
        const GemmConfig config = gemm_config(staging, args.detail != 0);
        Gemm::with_kernels(config, [&]<class Kernels>(Kernels) {
            Kernels::with(enum_named<GemmStage>("stage", stage, kGemmStageNames),
                          [&]<class Body>() { f.template operator()<Body>(config); });
        });
    };
    const auto grid = [with_body](const std::string& stage, const std::string& staging, const GemmArgs& args) {
        GemmGrid grid{};
        with_body(stage, staging, args, [&]<class Body>(const GemmConfig& config) {
            grid = Backend::template grid<Body>(config, args);
        });
        return py::make_tuple(grid.num_blocks, grid.num_warps);
    };
    const auto run = [with_body](const std::string& stage,
                                 const std::string& staging,
                                 const GemmArgs& args,
                                 uint32_t num_blocks,
                                 uint32_t num_warps,
                                 uint64_t descriptor,
                                 uint64_t stream,
                                 const typename Backend::Communicator* comm) {
        with_body(stage, staging, args, [&]<class Body>(const GemmConfig& config) {
            py::gil_scoped_release release;
            Backend::template run<Body>(config, args, GemmGrid{num_blocks, num_warps}, descriptor, stream, comm);
        });
    };
    family.def("grid", grid, py::arg("stage"), py::arg("staging"), py::arg("call"));
    family.def("run",
               run,
               py::kw_only(),
               py::arg("stage"),
               py::arg("staging"),
               py::arg("call"),
               py::arg("num_blocks"),
               py::arg("num_warps"),
               py::arg("descriptor"),
               py::arg("stream"),
               py::arg("comm") = py::none());
}

}  // namespace tracekern
