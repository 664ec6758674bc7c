// What tracekern._core is made of.
#pragma once

#include <pybind11/pybind11.h>

namespace tracekern {

// One function per domain; each is defined in the .cpp of that name.
void register_clocks(pybind11::module_& module);
void register_comm(pybind11::module_& module);
void register_dlpack(pybind11::module_& module);
void register_encode(pybind11::module_& module);
void register_launches(pybind11::module_& module);
void register_layout(pybind11::module_& module);
void register_longest_path(pybind11::module_& module);
void register_probe(pybind11::module_& module);
void register_tracks(pybind11::module_& module);

}  // namespace tracekern
