// A low-latency exchange of counts in two protocols: one that hangs when two handles share a buffer, and one that
// cannot. g++ builds it for the CPU backend, `nvcc -x cu` for GPUs. docs/flight_recorder.md tells the story.
//
// Each rank has two slots with a flag from every peer. A call raises its flag in one slot at all peers and waits for
// theirs; handles take the two slots in turn.
//
//   naive   a flag is the count + 1, 0 means "not there yet". While a call works on one slot it clears the other, which
//           the handle's last call is through with. But the other handle may not be.
//   tagged  a flag is {epoch, count}; the epoch belongs to the buffer, not to a handle, and nothing is ever cleared.
#include <comm/signal.h>
#include <pybind11/pybind11.h>
#include <tracekern.h>

#include <cstring>
#include <stdexcept>
#include <string>

#ifndef __CUDACC__
    #include <platform/cpu_executor.hpp>
#endif

namespace py = pybind11;
using namespace tracekern;

// name, class, ends at, channel, fields at begin, fields at end; of a count the trace keeps the lower 16 bits
#define EXCHANGE_EVENTS(EVENT)                                                                             \
    EVENT(clear_slot, work, completion, "", "slot:1 handle:4", "")                                         \
    EVENT(signal_count, signal, completion, "count data slot call", "peer:10 slot:1 handle:4 call:24", "") \
    EVENT(wait_count, wait, completion, "count data slot call", "peer:10 slot:1 handle:4 call:24", "seen:16")
TK_DEFINE_EVENTS(ExchangeEvent, EXCHANGE_EVENTS)

enum class HandleChannel : uint32_t { message = kFirstOwnChannel };

struct ExchangeArgs {
    CommArgs comm;
    uint32_t slot;    // of this call's handle
    uint32_t handle;  // and the next two: for the trace, and `call` as the epoch of the tagged protocol
    uint32_t call;
    uint32_t count;  // what the peers get

    // The flag of `peer` in a slot of `owner`.
    TK_DEVICE uint64_t* flag(uint32_t owner, uint32_t slot, uint32_t peer) const {
        return comm.at<uint64_t>(owner, sizeof(HeapControl)) + slot * kMaxRanks + peer;
    }
};

// Waits until *flag is not 0.
TK_DEVICE WaitResult wait_for_any_value(Warp& warp, const ExchangeArgs& args, const uint64_t* flag, uint32_t peer) {
    const WaitFor wait_for{0, peer, args.slot};
    uint64_t started = 0;
    for (uint32_t spins = 0;;) {
        const uint64_t seen = load_acquire_system(flag);
        if (seen) return {true, static_cast<uint32_t>(seen) - 1};
        warp.relax(spins);
        if (should_give_up(
                warp, args.comm, channel_number(HandleChannel::message), wait_for, spins, args.call, seen, started)) {
            return {false, 0};
        }
    }
}

template <class Rec, bool kTagged>
TK_DEVICE void exchange(Warp& warp, const ExchangeArgs& args, typename Rec::Args trace) {
    Rec recorder(trace, warp, 0, args.call);
    const uint32_t own = args.comm.rank;
    if (!kTagged) {
        TK_RANGE(recorder, ExchangeEvent::clear_slot, 1 - args.slot, args.handle);
        warp.strided(args.comm.num_ranks,
                     [&](uint32_t peer) { store_relaxed_system(args.flag(own, 1 - args.slot, peer), uint64_t{0}); });
    }
    for (uint32_t i = 1; i < args.comm.num_ranks; ++i) {
        const uint32_t peer = (own + i) % args.comm.num_ranks;
        TK_SIGNAL(recorder, ExchangeEvent::signal_count, peer, args.slot, args.handle, args.call);
        const uint64_t value = kTagged ? make_flag(args.call, args.count) : uint64_t{args.count} + 1;
        warp.leader([&] { store_release_system(args.flag(peer, args.slot, own), value); });
    }
    for (uint32_t i = 1; i < args.comm.num_ranks; ++i) {
        const uint32_t peer = (own + i) % args.comm.num_ranks;
        TK_WAIT(recorder, ExchangeEvent::wait_count, peer, args.slot, args.handle, args.call);
        const uint64_t* flag = args.flag(own, args.slot, peer);
        const WaitResult result =
            kTagged ? wait<HandleChannel::message>(warp, args.comm, flag, args.call, {0, peer, args.slot})
                    : wait_for_any_value(warp, args, flag, peer);
        TK_END_IF(result.ok, result.value);
    }
}

// A rank that was held up: until its peers' flags are in the other slot, two calls ahead, or until the limit.
TK_DEVICE void come_late(Warp& warp, const ExchangeArgs& args, uint64_t limit_ticks) {
    const uint64_t started = read_clock();
    for (uint32_t spins = 0; read_clock() - started < limit_ticks;) {
        uint32_t arrived = 0;
        for (uint32_t peer = 0; peer < args.comm.num_ranks; ++peer) {
            arrived += load_acquire_system(args.flag(args.comm.rank, args.slot, peer)) != 0;
        }
        if (arrived + 1 == args.comm.num_ranks) return;
        warp.relax(spins);
    }
}

#ifdef __CUDACC__
template <class Rec, bool kTagged>
__global__ void exchange_kernel(const ExchangeArgs args, const LaunchSize size, typename Rec::Args trace) {
    Warp warp(size);
    exchange<Rec, kTagged>(warp, args, trace);
}
__global__ void come_late_kernel(const ExchangeArgs args, const LaunchSize size, uint64_t limit_ticks) {
    Warp warp(size);
    come_late(warp, args, limit_ticks);
}

template <class Rec, bool kTagged>
void launch(const ExchangeArgs& args, const std::string&, typename Rec::Args trace) {
    exchange_kernel<Rec, kTagged><<<1, kLanes>>>(args, {1, 1}, trace);
}
void launch_come_late(const ExchangeArgs& args, const std::string&, uint64_t limit_ticks) {
    come_late_kernel<<<1, kLanes>>>(args, {1, 1}, limit_ticks);
}
#else
template <class Body>
void launch_on(const std::string& clock_bytes, Body body) {
    SimulatedClock clock;
    std::memcpy(&clock, clock_bytes.data(), sizeof(clock));
    py::gil_scoped_release release;
    launch_cpu({.clock = &clock}, body);
}

template <class Rec, bool kTagged>
void launch(const ExchangeArgs& args, const std::string& clock, typename Rec::Args trace) {
    launch_on(clock, [&](Warp& warp) { exchange<Rec, kTagged>(warp, args, trace); });
}
void launch_come_late(const ExchangeArgs& args, const std::string& clock, uint64_t limit_ticks) {
    launch_on(clock, [&](Warp& warp) { come_late(warp, args, limit_ticks); });
}
#endif

// comm: Communicator.native.kernel_args; clock: of the CPU backend, Communicator.native.clock.
ExchangeArgs make_args(const std::string& comm, uint32_t slot, uint32_t handle, uint32_t call, uint32_t count) {
    ExchangeArgs args{};
    if (comm.size() != sizeof(args.comm)) throw std::invalid_argument("comm is not what kernel_args gives");
    std::memcpy(static_cast<void*>(&args.comm), comm.data(), sizeof(args.comm));
    args.slot = slot;
    args.handle = handle;
    args.call = call;
    args.count = count;
    return args;
}

void run_exchange(const std::string& comm,
                  const std::string& clock,
                  bool tagged,
                  uint32_t slot,
                  uint32_t handle,
                  uint32_t call,
                  uint32_t count,
                  uint64_t descriptor) {
    const ExchangeArgs args = make_args(comm, slot, handle, call, count);
    with_recorder(descriptor, [&]<class Rec>(auto trace) {
        tagged ? launch<Rec, true>(args, clock, trace) : launch<Rec, false>(args, clock, trace);
    });
}

PYBIND11_MODULE(exchange, extension) {
    extension.def("run", &run_exchange);
    extension.def("come_late", [](const std::string& comm, const std::string& clock, uint32_t slot, uint64_t limit_ns) {
        launch_come_late(make_args(comm, slot, 0, 0, 0), clock, limit_ns);  // ticks of both backends are ns
    });
    extension.def("events", &describe_events<ExchangeEvent>);
    extension.attr("heap_bytes") = sizeof(HeapControl) + 2 * kMaxRanks * sizeof(uint64_t);
}
