// Binds a family's pipeline on a GPU.
#pragma once

#include "moe/bind.hpp"
#include "moe/pipeline_cuda.hpp"

namespace tracekern {

#ifdef TK_PLANTED_FAULTS
// Binds plant(channel, mutation), which leaves one thing out of the protocol from now on, on the current device; see
// comm/mutation.h.
template <class Family>
void bind_planted_faults(pybind11::module_& family) {
    family.def("plant", [](const std::string& channel, const std::string& mutation) {
        const auto left_out = enum_named<Mutation>("mutation", mutation, kMutationNames);
        if (channel == kCommChannelNames[channel_number(CommChannel::grid)]) {
            return plant_in_kernels<Family>({channel_number(CommChannel::grid), left_out});
        }
        const auto own = enum_named<uint32_t>("channel", channel, Family::kChannelNames);
        plant_in_kernels<Family>({kFirstOwnChannel + own, left_out});
    });
}
#endif

// The module of a family in an extension: `families` of that extension, under the family's name.
template <class Family>
pybind11::module_ family_module(pybind11::module_& extension) {
    const auto name = extension.attr("__name__").cast<std::string>() + "." + Family::kName;
    auto family = pybind11::reinterpret_steal<pybind11::module_>(PyModule_New(name.c_str()));
    if (!family) throw pybind11::error_already_set();
    extension.attr("families")[Family::kName] = family;
#ifdef TK_PLANTED_FAULTS
    if constexpr (requires { Family::kChannelNames; }) bind_planted_faults<Family>(family);
#endif
    return family;
}

inline PipelineBackendCuda take_cuda_backend(pybind11::kwargs&) {
    return {};
}

template <class Family>
void bind_cuda_family(pybind11::module_& extension) {
    auto family = family_module<Family>(extension);
    bind_pipeline<Family, PipelineCuda<Family>, take_cuda_backend>(family);
}

}  // namespace tracekern
