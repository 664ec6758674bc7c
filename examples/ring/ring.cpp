// The ring of ring.h as an extension of Python.
#include "ring.h"

#include <pybind11/pybind11.h>

#include <cstring>

namespace py = pybind11;

// comm, clock: Communicator.native.kernel_args and .clock. descriptor, channels: of capture.launch(...).
void run_ring(const std::string& comm,
              const std::string& clock,
              py::dict memory,
              uint32_t num_tokens,
              uint32_t call,
              uint64_t slow_ns,
              uint64_t descriptor,
              uint32_t channels) {
    RingArgs args{};
    if (comm.size() != sizeof(args.comm)) throw std::invalid_argument("wanted kernel_args of a Communicator");
    std::memcpy(static_cast<void*>(&args.comm), comm.data(), sizeof(args.comm));
    const auto number = [&](const char* name) { return memory[name].cast<uint64_t>(); };
    args.slots = number("slots");
    args.tails = number("tails");
    args.credits = number("credits");
    args.arrivals = number("arrivals");
    args.sent = reinterpret_cast<const uint32_t*>(number("sent"));
    args.received = reinterpret_cast<uint32_t*>(number("received"));
    args.num_tokens = num_tokens;
    args.call = call;
    args.slow_ticks = slow_ns;  // ticks of both backends are ns
#ifdef __CUDACC__
    with_recorder(descriptor, [&]<class Rec>(auto trace) { launch<Rec>(args, channels, trace); });
#else
    SimulatedClock own;
    if (clock.size() != sizeof(own)) throw std::invalid_argument("wanted the clock of a Communicator");
    std::memcpy(&own, clock.data(), sizeof(own));
    py::gil_scoped_release release;
    with_recorder(descriptor, [&]<class Rec>(auto trace) { launch<Rec>(args, channels, trace, &own); });
#endif
}

PYBIND11_MODULE(ring, extension) {
    extension.def("run", &run_ring);
    extension.def("events", &describe_events<RingEvent>);
    extension.attr("slots") = kSlots;
    extension.attr("words_per_token") = kWordsPerToken;
    extension.attr("warps") = kWarps;
}
