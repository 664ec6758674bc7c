// The truth about simulated device clocks, for tests and benchmarks: captures never hold it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "apis/register.hpp"
#include "platform/simulated_clock.h"

namespace py = pybind11;

namespace tracekern {
namespace {

using Int64Array = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

// Applies one pure function of a rank's clock to every element.
template <class Function>
py::array_t<int64_t> map_times(uint64_t seed, int rank, int64_t t0_ns, const Int64Array& times, Function function) {
    const SimulatedClock clock = SimulatedClock::draw(seed, rank, t0_ns);
    py::array_t<int64_t> result(times.size());
    const int64_t* in = times.data();
    int64_t* out = result.mutable_data();
    for (py::ssize_t i = 0; i < times.size(); ++i) out[i] = function(clock, in[i]);
    return result;
}

}  // namespace

void register_clocks(py::module_& module) {
    module.def(
        "simulated_clock_ticks",
        [](uint64_t seed, int rank, int64_t t0_ns, const Int64Array& host_ns) {
            return map_times(seed, rank, t0_ns, host_ns, [](const SimulatedClock& clock, int64_t time) {
                return static_cast<int64_t>(clock.ticks_at(time));
            });
        },
        py::arg("seed"),
        py::arg("rank"),
        py::arg("t0_ns"),
        py::arg("host_ns"),
        "[n] int64 ticks that the rank's clock shows at host times (CLOCK_MONOTONIC ns).");
    module.def(
        "simulated_clock_ns",
        [](uint64_t seed, int rank, int64_t t0_ns, const Int64Array& host_ns) {
            return map_times(seed, rank, t0_ns, host_ns, [](const SimulatedClock& clock, int64_t time) {
                return clock.device_ns(time);
            });
        },
        py::arg("seed"),
        py::arg("rank"),
        py::arg("t0_ns"),
        py::arg("host_ns"),
        "[n] int64 ns: the same before it is cut to ticks.");
    module.def(
        "simulated_clock_host_ns",
        [](uint64_t seed, int rank, int64_t t0_ns, const Int64Array& device_ns) {
            return map_times(seed, rank, t0_ns, device_ns, [](const SimulatedClock& clock, int64_t time) {
                return clock.host_ns(time);
            });
        },
        py::arg("seed"),
        py::arg("rank"),
        py::arg("t0_ns"),
        py::arg("device_ns"),
        "[n] int64 host CLOCK_MONOTONIC ns at which the rank's clock stood at device_ns: the inverse, to 1 ns.");
    module.def("simulated_clock_now", &SimulatedClock::host_now_ns, "Host CLOCK_MONOTONIC ns, now.");
}

}  // namespace tracekern
