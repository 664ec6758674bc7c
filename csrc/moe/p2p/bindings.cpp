// The extension module tracekern._p2p
#include "moe/bind_cpu.hpp"
#include "moe/p2p/family.h"

PYBIND11_MODULE(_p2p, family) {
    tracekern::bind_cpu_family<tracekern::P2P>(family);
}
