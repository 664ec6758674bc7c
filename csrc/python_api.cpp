// The extension module tracekern._core: all that belongs to no family of kernels. Each domain registers itself; see
// csrc/apis/. The families have modules of their own: csrc/moe/<family>/bindings.cpp.
#include <pybind11/pybind11.h>

#include "apis/built_from.hpp"
#include "apis/register.hpp"

PYBIND11_MODULE(_core, module) {
    module.doc() = "tracekern's compiled part, without the families of kernels";
    module.attr("built_from") = tracekern::kBuiltFrom;
    tracekern::register_clocks(module);
    tracekern::register_comm(module);
    tracekern::register_dlpack(module);
    tracekern::register_encode(module);
    tracekern::register_launches(module);
    tracekern::register_layout(module);
    tracekern::register_longest_path(module);
    tracekern::register_probe(module);
    tracekern::register_tracks(module);
}
