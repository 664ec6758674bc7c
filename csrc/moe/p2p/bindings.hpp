// The P2P family in both extensions.
#pragma once

#include "moe/bind.hpp"
#include "moe/p2p/family.h"

namespace tracekern {

inline P2PConfig take_p2p_config(pybind11::kwargs& options) {
    P2PConfig config{};
    config.variant = enum_named<P2PVariant>("variant", take_option<std::string>(options, "variant"), kP2PVariantNames);
    config.number = enum_named<NumberType>("dtype", take_option<std::string>(options, "dtype"), kNumberNames);
    config.shape = take_shape(options, config.number);
    config.partitions = take_option<uint32_t>(options, "partitions");
    return config;
}

// Addresses of the tensors of the next call; P2PArgs gives shapes.
template <class Pipeline>
void set_p2p_call(Pipeline& pipeline,
                  uint64_t x,
                  uint64_t topk_idx,
                  uint64_t topk_weights,
                  uint64_t expert_scale,
                  uint64_t out,
                  uint32_t num_tokens) {
    P2PArgs& args = pipeline.args();
    args.x = reinterpret_cast<const char*>(x);
    args.topk_idx = reinterpret_cast<const int32_t*>(topk_idx);
    args.topk_weights = reinterpret_cast<const float*>(topk_weights);
    args.expert_scale = reinterpret_cast<const float*>(expert_scale);
    args.out = reinterpret_cast<char*>(out);
    args.num_tokens = num_tokens;
}

template <class Pipeline>
void bind_p2p_call(pybind11::class_<Pipeline>& pipeline) {
    namespace py = pybind11;
    pipeline.def("set_call",
                 &set_p2p_call<Pipeline>,
                 py::kw_only(),
                 py::arg("x"),
                 py::arg("topk_idx"),
                 py::arg("topk_weights"),
                 py::arg("expert_scale"),
                 py::arg("out"),
                 py::arg("num_tokens"));
}

}  // namespace tracekern
