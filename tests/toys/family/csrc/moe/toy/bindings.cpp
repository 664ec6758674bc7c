// The extension module tracekern._toy
#include "moe/bind_cpu.hpp"
#include "moe/toy/family.h"

PYBIND11_MODULE(_toy, family) {
    tracekern::bind_cpu_family<tracekern::Toy>(family);
}
