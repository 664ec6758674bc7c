// What a family looks like from Python: its facts, bound once, and its pipeline on each backend.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "apis/names.hpp"
#include "moe/config.h"
#include "moe/context.h"
#include "trace/trace_choice.h"

namespace tracekern {

// Takes an option out of a call's keyword arguments. Raises TypeError for one that is missing or of another type.
template <class T>
T take_option(pybind11::kwargs& options, const char* name) {
    if (!options.contains(name)) throw pybind11::type_error(std::string("missing option ") + name);
    return options.attr("pop")(name).cast<T>();
}

inline void refuse_options_left(const pybind11::kwargs& options) {
    if (options.empty()) return;
    const auto name = pybind11::str(options.begin()->first).cast<std::string>();
    throw pybind11::type_error("unknown option " + name);
}

// Takes a member of a call's arguments: a number, or a pointer as an address.
template <class Value>
void take_member(pybind11::kwargs& options, Value& value, const char* name) {
    if constexpr (std::is_pointer_v<Value>) {
        value = reinterpret_cast<Value>(take_option<uint64_t>(options, name));
    } else {
        value = take_option<Value>(options, name);
    }
}

inline MoeShape take_shape(pybind11::kwargs& options, NumberType number) {
    MoeShape shape{};
    shape.num_ranks = take_option<uint32_t>(options, "num_ranks");
    shape.max_tokens = take_option<uint32_t>(options, "max_tokens");
    shape.num_experts = take_option<uint32_t>(options, "num_experts");
    shape.topk = take_option<uint32_t>(options, "topk");
    shape.hidden = take_option<uint32_t>(options, "hidden");
    shape.element_bytes = kNumberBytes[static_cast<uint32_t>(number)];
    if (shape.num_ranks == 0 || shape.num_experts < shape.num_ranks) {
        throw std::invalid_argument("wanted ranks, each with an expert");
    }
    return shape;
}

// Takes everything but the grid, which heap_bytes() does not need.
template <class Family>
typename Family::Config take_config(pybind11::kwargs& options) {
    using Variant = typename Family::Variant;
    typename Family::Config config{};
    config.variant =
        enum_named<Variant>("variant", take_option<std::string>(options, "variant"), Family::kVariantNames);
    config.number = enum_named<NumberType>("dtype", take_option<std::string>(options, "dtype"), kNumberNames);
    config.shape = take_shape(options, config.number);
    Family::visit_options(
        config, [&]<class Value>(const char* name, Value& value) { value = take_option<Value>(options, name); });
    return config;
}

// Counts what a family's make_args() asks for.
struct CountingMemory {
    uint64_t num_bytes = 0;

    void* allocate(uint64_t bytes) {
        // Arguments point into it and behind it, and nothing is stored there. As large as any state that they begin
        // with: a compiler sees how far into it they point.
        alignas(128) static char nothing[4096];
        num_bytes += bytes;
        return nothing;
    }
};

// Binds what is the same on every backend.
//
//   variants     {variant: (stages of a call, in their order)}
//   stages, roles, channels    names; Communicator.add_kernels() takes stages and channels, for faults
//   options                    names of the options of heap_bytes() besides shape and variant
//   event_table()              JSON, see describe_events()
//   heap_bytes(**options)      of the symmetric heap of each rank
//   own_bytes(**options)       what a rank's pipeline keeps beside it
template <class Family>
void bind_facts(pybind11::module_& family) {
    namespace py = pybind11;
    py::dict variants;
    for (size_t i = 0; i < std::size(Family::kVariantNames); ++i) {
        py::list stages;
        typename Family::Config config{};
        config.variant = static_cast<typename Family::Variant>(i);
        config.number = NumberType::bf16;
        Family::with_kernels(config, [&]<class Kernels>(Kernels) {
            Kernels::for_each(
                [&]<class Body>() { stages.append(Family::kStageNames[static_cast<uint32_t>(Body::kStage)]); });
        });
        variants[Family::kVariantNames[i]] = py::tuple(stages);
    }
    family.attr("variants") = variants;
    py::list option_names;
    typename Family::Config any{};
    Family::visit_options(any, [&](const char* name, auto&) { option_names.append(name); });
    family.attr("options") = option_names;
    family.attr("stages") = names_list(Family::kStageNames);
    family.attr("roles") = names_list(Family::kRoleNames);
    family.attr("channels") = names_list(Family::kChannelNames);
    family.def("event_table", &describe_events<typename Family::Event>);
    family.def("heap_bytes", [](py::kwargs options) {
        const auto config = take_config<Family>(options);
        refuse_options_left(options);
        return Family::heap_bytes(config);
    });
    family.def("own_bytes", [](py::kwargs options) {
        const auto config = take_config<Family>(options);
        refuse_options_left(options);
        CountingMemory memory;
        Family::make_args(config, memory);
        return memory.num_bytes;
    });
}

// Addresses of the tensors of the next call; MoeCall gives shapes.
template <class Pipeline>
void set_call(Pipeline& pipeline,
              uint64_t x,
              uint64_t topk_idx,
              uint64_t topk_weights,
              uint64_t expert_scale,
              uint64_t out,
              uint32_t num_tokens) {
    static_cast<MoeCall&>(pipeline.args()) = {reinterpret_cast<const char*>(x),
                                              reinterpret_cast<const int32_t*>(topk_idx),
                                              reinterpret_cast<const float*>(topk_weights),
                                              Experts{reinterpret_cast<const float*>(expert_scale)},
                                              reinterpret_cast<char*>(out),
                                              num_tokens};
}

// Where a call has kernels for each partition of the tokens: which one the next kernel is for, and its blocks.
template <class Family, class Pipeline>
void bind_partitions(pybind11::class_<Pipeline>& bound) {
    if constexpr (requires(Pipeline& pipeline) { pipeline.args().partition; }) {
        bound
            .def("set_partition", [](Pipeline& pipeline, uint32_t partition) { pipeline.args().partition = partition; })
            .def("set_blocks",
                 [](Pipeline& pipeline, const std::string& stage, uint32_t num_blocks) {
                     pipeline.set_blocks(enum_named<typename Family::Stage>("stage", stage, Family::kStageNames),
                                         num_blocks);
                 })
            .def_property_readonly("num_partitions",
                                   [](Pipeline& pipeline) { return pipeline.args().layout.num_partitions; });
    }
}

// Addresses of what dispatch leaves, for experts that are kernels of their own: the first row of each local expert,
// and the rows, which combine reads. 0 where there are no rows.
template <class Pipeline>
void bind_expert_input(pybind11::class_<Pipeline>& bound) {
    namespace py = pybind11;
    if constexpr (requires(Pipeline& pipeline) { pipeline.args().expert_rows; }) {
        bound.def_property_readonly("expert_input", [](Pipeline& pipeline) {
            const auto& args = pipeline.args();
            return py::make_tuple(reinterpret_cast<uint64_t>(args.expert_offset),
                                  reinterpret_cast<uint64_t>(args.expert_rows));
        });
    }
}

// Returns what makes an Owner of a family's kernels out of a communicator and options. kTakeBackend: takes the
// backend out of them. take_own: what a config has that take_config() leaves, or checks of it.
template <class Family, class Owner, auto kTakeBackend, class TakeOwn>
auto maker(TakeOwn take_own) {
    return [take_own](typename Owner::Backend::Communicator& comm, pybind11::kwargs options) {
        options["num_ranks"] = comm.args().num_ranks;
        auto config = take_config<Family>(options);
        take_own(config, options);
        const auto first_stage = take_option<uint32_t>(options, "first_stage");
        auto backend = kTakeBackend(options);
        refuse_options_left(options);
        return std::make_unique<Owner>(comm, config, std::move(backend), first_stage);
    };
}

// Binds what pipelines have in common on all backends.
template <class Family, class Pipeline, auto kTakeBackend>
void bind_pipeline(pybind11::module_& family) {
    namespace py = pybind11;
    static_assert(std::size(Family::kStageNames) <= kMaxStages);
    const auto take_grid = [](typename Family::Config& config, py::kwargs& options) {
        config.num_blocks = take_option<uint32_t>(options, "num_blocks");
        config.warps_per_block = take_option<uint32_t>(options, "warps_per_block");
        for (const auto& [name, blocks] : take_option<std::map<std::string, uint32_t>>(options, "stage_blocks")) {
            const auto stage = enum_named<typename Family::Stage>("stage", name, Family::kStageNames);
            config.stage_blocks[static_cast<uint32_t>(stage)] = blocks;
        }
    };
    const auto run = [](Pipeline& pipeline,
                        const std::vector<std::string>& stages,
                        const std::vector<uint64_t>& descriptors,
                        uint64_t stream) {
        for (size_t i = 0; i < stages.size(); ++i) {
            const auto stage = enum_named<typename Family::Stage>("stage", stages[i], Family::kStageNames);
            const TraceChoice trace = descriptors.at(i);
            py::gil_scoped_release release;
            pipeline.run(stage, trace, stream);
        }
    };
    py::class_<Pipeline> bound(family, "Pipeline");
    bound.def(py::init(maker<Family, Pipeline, kTakeBackend>(take_grid)), py::keep_alive<1, 2>(), py::arg("comm"))
        .def("reset", &Pipeline::reset)
        .def("set_call",
             &set_call<Pipeline>,
             py::kw_only(),
             py::arg("x"),
             py::arg("topk_idx"),
             py::arg("topk_weights"),
             py::arg("expert_scale"),
             py::arg("out"),
             py::arg("num_tokens"))
        .def_property_readonly("epoch", &Pipeline::epoch)
        // Several stages with one call: between two launches of a traced call the GPU is to wait no longer than between
        // those of an untraced one.
        .def("run_stages", run, py::arg("stages"), py::arg("descriptors"), py::arg("stream") = 0);
    bind_partitions<Family>(bound);
    bind_expert_input(bound);
}

}  // namespace tracekern
