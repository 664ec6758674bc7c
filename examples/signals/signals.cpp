// The smallest kernel that waits for other ranks: in each call every rank tells all others a number.
#include <comm/signal.h>
#include <pybind11/pybind11.h>
#include <tracekern.h>

#include <cstring>
#include <platform/cpu_executor.hpp>
#include <stdexcept>
#include <string>

namespace py = pybind11;
using namespace tracekern;

// name, class, ends at, channel, fields at begin, fields at end; of a number the trace keeps the lower 21 bits
#define NUMBER_EVENTS(EVENT)                                                            \
    EVENT(signal_number, signal, completion, "number data call", "peer:10 call:24", "") \
    EVENT(wait_number, wait, completion, "number data call", "peer:10 call:24", "number:21")
TK_DEFINE_EVENTS(NumberEvent, NUMBER_EVENTS)

enum class NumberChannel : uint32_t { number = kFirstOwnChannel };

// flags: offset in the heap of u64 [num_ranks], a flag from each rank.
template <class Rec>
TK_DEVICE void tell(
    Warp& warp, const CommArgs& comm, uint64_t flags, uint32_t call, uint32_t number, typename Rec::Args trace) {
    Rec recorder(trace, warp);
    for (uint32_t i = 1; i < comm.num_ranks; ++i) {
        const uint32_t peer = comm.nth_peer(i);
        TK_SIGNAL(recorder, NumberEvent::signal_number, peer, call);
        signal<NumberChannel::number>(warp, comm.at<uint64_t>(peer, flags) + comm.rank, call, number);
    }
    for (uint32_t i = 1; i < comm.num_ranks; ++i) {
        const uint32_t peer = comm.nth_peer(i);
        TK_WAIT(recorder, NumberEvent::wait_number, peer, call);
        const uint64_t* flag = comm.at<uint64_t>(comm.rank, flags) + peer;
        const WaitResult told = wait<NumberChannel::number>(warp, comm, flag, call, {0, peer, 0});
        TK_END_IF(told.ok, told.value);
    }
}

// comm, clock: Communicator.native.kernel_args and .clock. descriptor: of capture.launch(...).
void launch_tell(const std::string& comm_bytes,
                 const std::string& clock_bytes,
                 uint64_t flags,
                 uint32_t call,
                 uint32_t number,
                 uint64_t descriptor) {
    CommArgs comm;
    SimulatedClock clock;
    if (comm_bytes.size() != sizeof(comm) || clock_bytes.size() != sizeof(clock)) {
        throw std::invalid_argument("wanted kernel_args and clock of a Communicator");
    }
    std::memcpy(&comm, comm_bytes.data(), sizeof(comm));
    std::memcpy(&clock, clock_bytes.data(), sizeof(clock));
    py::gil_scoped_release release;
    with_recorder(descriptor, [&]<class Rec>(auto trace) {
        launch_cpu({.clock = &clock}, [&](Warp& warp) { tell<Rec>(warp, comm, flags, call, number, trace); });
    });
}

PYBIND11_MODULE(signals, module) {
    module.def("tell", &launch_tell);
    module.def("events", &describe_events<NumberEvent>);
}
