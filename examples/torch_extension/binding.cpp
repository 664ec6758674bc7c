// What Python sees of square.cu.
#include <torch/extension.h>

#include "square.h"

namespace {

// All but the matrix is what capture.launch(...) returned.
void square(const torch::Tensor& matrix, uint64_t descriptor, uint32_t grid, uint32_t warps, uint64_t stream) {
    TORCH_CHECK(matrix.is_cuda() && matrix.is_contiguous() && matrix.dim() == 2 && matrix.dtype() == torch::kFloat32,
                "matrix is ",
                matrix.toString(),
                " of ",
                matrix.dim(),
                " dimensions; wanted a contiguous CUDA float32 matrix");
    launch_square(matrix.data_ptr<float>(),
                  static_cast<uint32_t>(matrix.size(0)),
                  static_cast<uint32_t>(matrix.size(1)),
                  {descriptor, grid, warps, stream});
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("square", &square);
    module.def("load", &load_square);
    module.def("events", &square_events);
}
