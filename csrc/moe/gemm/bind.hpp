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
    const auto take = [&](auto& member, const char* name) { take_member(given, member, name); };
    GemmArgs args{};
    take(args.num_tokens, "num_tokens");
    take(args.topk, "topk");
    take(args.num_experts, "num_experts");
    take(args.num_listed, "num_listed");
    take(args.hidden, "hidden");
    take(args.intermediate, "intermediate");
    take(args.num_rows, "num_rows");
    take(args.rows_per_expert, "rows_per_expert");
    take(args.expert_ids, "expert_ids");
    take(args.abort, "abort");
    take(args.x, "x");
    take(args.topk_ids, "topk_ids");
    take(args.topk_weights, "topk_weights");
    take(args.w13, "w13");
    take(args.w2, "w2");
    take(args.expert_offset, "expert_offset");
    take(args.row_counts, "row_counts");
    args.offset_stride = args.row_counts ? 2 : 1;
    take(args.tile_end, "tile_end");
    take(args.tile_list, "tile_list");
    take(args.tile_count, "tile_count");
    take(args.inverse, "inverse");
    take(args.x_rows, "x_rows");
    take(args.middle_rows, "middle_rows");
    take(args.result_rows, "result_rows");
    take(args.out, "out");
    take(args.detail, "detail");
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
    // Blocks, warps of each, and of these the first that are on record.
    const auto grid = [with_body](const std::string& stage, const std::string& staging, const GemmArgs& args) {
        GemmGrid grid{};
        uint32_t num_recorded = 0;
        with_body(stage, staging, args, [&]<class Body>(const GemmConfig& config) {
            grid = Backend::template grid<Body>(config, args);
            num_recorded = grid.num_warps;
            if constexpr (requires { Body::kRecordedWarps; }) num_recorded = Body::kRecordedWarps;
        });
        return py::make_tuple(grid.num_blocks, grid.num_warps, num_recorded);
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
