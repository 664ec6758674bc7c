// The kernel families of an extension: setup.py finds their folders and defines TK_FAMILIES as FAMILY(p2p) ...
#pragma once

#include <pybind11/pybind11.h>

namespace tracekern {

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
