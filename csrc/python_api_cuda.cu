// The extension module tracekern._cuda, built where nvcc is; see csrc/apis/cuda.cu. It has all families.
#include <pybind11/pybind11.h>

namespace tracekern {

void register_capture(pybind11::module_& module);
void register_cuda(pybind11::module_& module);

// setup.py finds the families' folders and defines TK_FAMILIES as FAMILY(p2p) ...
#define FAMILY(name) void register_##name(pybind11::module_& extension);
TK_FAMILIES
#undef FAMILY

}  // namespace tracekern

PYBIND11_MODULE(_cuda, extension) {
    extension.doc() = "tracekern's compiled part for CUDA devices";
    tracekern::register_capture(extension);
    tracekern::register_cuda(extension);
    extension.attr("families") = pybind11::dict();
#define FAMILY(name) tracekern::register_##name(extension);
    TK_FAMILIES
#undef FAMILY
}
