// The extension module tracekern._C. Each domain registers itself; see csrc/apis/.
#include <pybind11/pybind11.h>

#include "apis/register.hpp"

PYBIND11_MODULE(_C, module) {
    module.doc() = "tracekern's compiled part";
    tracekern::register_clocks(module);
    tracekern::register_comm(module);
    tracekern::register_dlpack(module);
    tracekern::register_encode(module);
    tracekern::register_layout(module);
    tracekern::register_longest_path(module);
    tracekern::register_probe(module);
    tracekern::register_tracks(module);
    tracekern::register_families(module);
}
