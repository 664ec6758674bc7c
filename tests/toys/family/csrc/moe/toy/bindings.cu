// tracekern._cuda.families["toy"]
#include "moe/bind_cuda.hpp"
#include "moe/toy/family.h"

namespace tracekern {

void register_toy(pybind11::module_& extension) {
    bind_cuda_family<Toy>(extension);
}

}  // namespace tracekern
