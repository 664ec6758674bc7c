// The extension module tracekern._cuda, built where nvcc is; see csrc/apis/cuda.cu.
#include <pybind11/pybind11.h>

#include "apis/register.hpp"

namespace tracekern {
void register_capture(pybind11::module_& module);
void register_cuda(pybind11::module_& module);
}  // namespace tracekern

PYBIND11_MODULE(_cuda, extension) {
    extension.doc() = "tracekern's compiled part for CUDA devices";
    tracekern::register_capture(extension);
    tracekern::register_cuda(extension);
    tracekern::register_families(extension);
}
