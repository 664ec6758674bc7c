// tracekern._C.families["toy"]
#include "moe/bind_cpu.hpp"
#include "moe/toy/family.h"

namespace tracekern {

void register_toy(pybind11::module_& extension) {
    bind_cpu_family<Toy>(extension);
}

}  // namespace tracekern
