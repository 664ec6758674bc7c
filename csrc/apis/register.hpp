// What an extension is made of.
#pragma once

#include <pybind11/pybind11.h>

namespace tracekern {

// One function per domain; each is defined in the .cpp of that name.
void register_clocks(pybind11::module_& module);
void register_comm(pybind11::module_& module);
void register_dlpack(pybind11::module_& module);
void register_encode(pybind11::module_& module);
void register_layout(pybind11::module_& module);
void register_longest_path(pybind11::module_& module);
void register_probe(pybind11::module_& module);
void register_tracks(pybind11::module_& module);

// The kernel families of an extension: setup.py finds their folders and defines TK_FAMILIES as FAMILY(p2p) ...
#define TK_DECLARE_FAMILY(name) void register_##name(pybind11::module_& extension);
#define TK_CALL_FAMILY(name)    register_##name(extension);

#define FAMILY TK_DECLARE_FAMILY
TK_FAMILIES
#undef FAMILY

#define FAMILY TK_CALL_FAMILY
inline void register_families(pybind11::module_& extension) {
    extension.attr("families") = pybind11::dict();
    TK_FAMILIES
}
#undef FAMILY

}  // namespace tracekern
