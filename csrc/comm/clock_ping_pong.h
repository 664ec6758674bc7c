// Round trips between two ranks that tell how far their clocks are apart. One warp of each rank runs its side.
//
// The initiator stamps, raises a flag at the responder and spins; the responder stamps and sends the stamp back as the
// reply itself, so neither side has anything to store but one word. That keeps both ways alike, which is what makes the
// middle of a round trip a good estimate. No flag guards a payload here: relaxed order is enough.
#pragma once

#include "comm/signal.h"

namespace tracekern {

// One round trip: sent and received on the initiator's clock, answered on the responder's.
struct RoundTrip {
    uint64_t sent_ticks;
    uint64_t answered_ticks;
    uint64_t received_ticks;
};

template <class Comm>
struct ClockPingPongArgs {
    Comm comm;
    uint32_t peer;
    uint32_t epoch;  // the same on both sides, another one each time
    uint32_t max_round_trips;
    uint64_t duration_ticks;  // the initiator stops after this even if there were fewer
    RoundTrip* round_trips;   // [max_round_trips], written by the initiator
    uint32_t* num_round_trips;
};

// How the host asks a device for its clock: memory of the host that the device maps.
struct HostClockMailbox {
    alignas(64) uint64_t request;  // by the host: 1, 2, ... for a stamp each
    alignas(64) uint64_t stamp;    // by the device, its answer
};

constexpr uint32_t kPingPongStop = 0xffffffffu;

// No flag: nobody waits for its epoch alone, and both halves count more than a flag holds.
TK_DEVICE uint64_t ping_word(uint32_t epoch, uint32_t count) {
    return uint64_t{epoch} << 32 | count;
}

// Orders nothing. One lane's.
TK_DEVICE void store_word(Warp&, uint64_t* at, uint64_t word) {
    store_relaxed_system(at, word);
}

// A polite wait would be the slowest part of the way, so the first turns are nothing but loads. An answer that takes
// more turns than that (about 5 us on a CPU) comes from a side that was not running: let it.
constexpr uint32_t kHardTurns = 1u << 12;

// Returns false when done() stayed false for longer than the communicator's limit, or a rank gave up.
template <class Comm, class Done>
TK_DEVICE bool spin_until(Warp& warp, const Comm& comm, Done done) {
    for (uint32_t turn = 0; turn < kHardTurns; ++turn) {
        if (done()) return true;
    }
    const uint64_t started = read_clock();
    for (uint32_t spins = 0; !done();) {
        warp.relax(spins);
        if (read_clock() - started > comm.timeout_ticks) return false;
        if (lane_sees_abort(comm)) return false;
    }
    return true;
}

// Sends, counts the round trips that came back whole, and tells the responder to stop. `request` is a word of the peer.
template <class Comm, class Word>
TK_DEVICE void initiate_with(Warp& warp, const ClockPingPongArgs<Comm>& args, const Word& request) {
    const Comm& comm = args.comm;
    const uint64_t* reply = own_word(comm, ControlWord::ping_reply, args.peer);
    warp.leader([&] {
        uint64_t seen = load_acquire_system(reply);
        uint64_t first_ticks = 0;
        uint32_t count = 0;
        while (count < args.max_round_trips) {
            const uint64_t before = seen;
            const uint64_t sent_ticks = read_clock();
            store_word(warp, request, ping_word(args.epoch, count));
            if (!spin_until(warp, comm, [&] { return (seen = load_acquire_system(reply)) != before; })) break;
            const uint64_t received_ticks = read_clock_after(seen);
            args.round_trips[count++] = {sent_ticks, seen >> 1, received_ticks};
            // From the first reply on: until then the responder may not have been there.
            if (first_ticks == 0) first_ticks = received_ticks;
            if (received_ticks - first_ticks > args.duration_ticks) break;
        }
        store_word(warp, request, ping_word(args.epoch, kPingPongStop));
        *args.num_round_trips = count;
    });
}

template <class Comm>
TK_DEVICE void initiate_ping_pong(Warp& warp, const ClockPingPongArgs<Comm>& args) {
    with_peer(args.comm, args.peer, [&](const auto& to) {
        initiate_with(warp, args, control_word(to, ControlWord::ping_request));
    });
}

// Answers until it has to stop. A reply is the stamp and, in its lowest bit, the parity of the round trip: two replies
// in a row differ even within one tick.
template <class Comm, class Word>
TK_DEVICE void answer_with(Warp& warp, const ClockPingPongArgs<Comm>& args, const Word& reply) {
    const Comm& comm = args.comm;
    const uint64_t* request = own_word(comm, ControlWord::ping_request, args.peer);
    warp.leader([&] {
        for (uint32_t count = 0;; ++count) {
            const uint64_t next = ping_word(args.epoch, count);
            const uint64_t stop = ping_word(args.epoch, kPingPongStop);
            uint64_t seen = 0;
            const auto arrived = [&] {
                seen = load_acquire_system(request);
                return seen == next || seen == stop;
            };
            if (!spin_until(warp, comm, arrived) || seen == stop) break;
            store_word(warp, reply, read_clock_after(seen) << 1 | (count & 1));
        }
    });
}

template <class Comm>
TK_DEVICE void answer_ping_pong(Warp& warp, const ClockPingPongArgs<Comm>& args) {
    with_peer(args.comm, args.peer, [&](const auto& to) {
        answer_with(warp, args, control_word(to, ControlWord::ping_reply));
    });
}

}  // namespace tracekern
