// Reading device clocks for samples; and the truth about simulated ones, for tests and benchmarks: captures never hold
// it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "apis/register.hpp"
#include "comm/clock_ping_pong.h"
#include "comm/communicator_cpu.hpp"
#include "platform/host_clock.h"
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

// [count, 3]: CLOCK_MONOTONIC ns, device ticks, CLOCK_MONOTONIC ns.
py::array_t<int64_t> read_brackets(const CpuCommunicator& comm, py::ssize_t count) {
    py::array_t<int64_t> result({count, py::ssize_t{3}});
    auto rows = result.mutable_unchecked<2>();
    for (py::ssize_t i = 0; i < count; ++i) {
        rows(i, 0) = monotonic_ns();
        rows(i, 1) = static_cast<int64_t>(comm.clock().read());
        rows(i, 2) = monotonic_ns();
    }
    return result;
}

// [n, 3] ticks sent, answered, received on the initiator; [0, 3] on the responder.
py::array_t<int64_t> clock_ping_pong(const CpuCommunicator& comm,
                                     uint32_t peer,
                                     bool initiates,
                                     uint32_t epoch,
                                     uint32_t max_round_trips,
                                     uint64_t duration_ns) {
    if (peer >= comm.args().num_ranks || peer == comm.args().rank) throw py::value_error("peer: not another rank");
    std::vector<RoundTrip> round_trips(initiates ? max_round_trips : 0);
    uint32_t count = 0;
    {
        py::gil_scoped_release release;
        // The simulated clock counts ns.
        comm.with_comm([&]<class Comm>(const Comm& reached) {
            const ClockPingPongArgs<Comm> args{
                reached, peer, epoch, max_round_trips, duration_ns, round_trips.data(), &count};
            comm.launch(CpuLaunch{}, [&](Warp& warp) {
                if (initiates) {
                    initiate_ping_pong(warp, args);
                } else {
                    answer_ping_pong(warp, args);
                }
            });
        });
    }
    py::array_t<int64_t> result({py::ssize_t{count}, py::ssize_t{3}});
    static_assert(sizeof(RoundTrip) == 3 * sizeof(int64_t));
    if (count) memcpy(result.mutable_data(), round_trips.data(), count * sizeof(RoundTrip));
    return result;
}

}  // namespace

void register_clocks(py::module_& module) {
    module.def(
        "read_clock",
        [](const CpuCommunicator& comm) { return static_cast<int64_t>(comm.clock().read()); },
        py::arg("communicator"),
        "Device ticks, now.");
    module.def("read_brackets", &read_brackets, py::arg("communicator"), py::arg("count"));
    module.def("clock_ping_pong",
               &clock_ping_pong,
               py::arg("communicator"),
               py::arg("peer"),
               py::arg("initiates"),
               py::arg("epoch"),
               py::arg("max_round_trips"),
               py::arg("duration_ns"));
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
