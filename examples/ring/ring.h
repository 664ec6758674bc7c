// A ring of slots between ranks, as libraries for all-to-all keep one for each channel. g++ compiles it for the CPU
// backend, `nvcc -x cu` for GPUs; ring.cpp is its extension of Python, examples/mpi a host without Python.
//
// Every rank sends tokens to the next one, a block for each channel: some warps send, the others receive. Counts only
// grow, from call to call too, and nothing is ever cleared:
//
//   tail     in the receiver's memory: tokens that are in the ring, or were. One store publishes a chunk of them.
//   credit   in the sender's memory: tokens for which there is, or was, a slot. It begins at kSlots: the ring is empty.
//   arrival  in every rank's memory: ranks that have ended a call, by an atomic addition from each.
#pragma once

#include <comm/signal.h>
#include <tracekern.h>

#include <stdexcept>
#include <string>

#ifndef __CUDACC__
    #include <platform/cpu_executor.hpp>
#endif

using namespace tracekern;

// name, class, ends at, channel, fields at begin, fields at end; initial: kSlots
#define RING_EVENTS(EVENT)                                                                                     \
    EVENT(send_token, work, issue, "", "peer:10 channel:5 token:24", "")                                       \
    EVENT(take_token, work, completion, "", "peer:10 channel:5 token:24", "")                                  \
    EVENT(signal_tail, signal, completion, "tail count channel", "peer:10 channel:5 value:32", "")             \
    EVENT(wait_tail, wait, completion, "tail count channel", "peer:10 channel:5 wanted:32", "")                \
    EVENT(signal_credit,                                                                                       \
          signal,                                                                                              \
          completion,                                                                                          \
          "credit credit initial=12 tail=tail channel",                                                        \
          "peer:10 channel:5 value:32",                                                                        \
          "")                                                                                                  \
    EVENT(wait_credit,                                                                                         \
          wait,                                                                                                \
          completion,                                                                                          \
          "credit credit initial=12 tail=tail channel",                                                        \
          "peer:10 channel:5 wanted:32",                                                                       \
          "")                                                                                                  \
    EVENT(wait_group, wait, completion, "warps group barrier", "barrier:4 warps:6", "")                        \
    EVENT(wait_block, wait, completion, "", "", "")                                                            \
    EVENT(signal_arrival, signal, completion, "arrival barrier channel call", "peer:10 channel:5 call:24", "") \
    EVENT(wait_arrival, wait, completion, "arrival barrier channel call", "channel:5 call:24", "")
TK_DEFINE_EVENTS(RingEvent, RING_EVENTS)

enum class RingChannel : uint32_t { tail = kFirstOwnChannel, credit, arrival };
enum Role : uint32_t { kSend, kReceive };

constexpr uint32_t kSlots = 12, kWordsPerToken = 64;
constexpr uint32_t kWarpsPerRole = 2, kWarps = 2 * kWarpsPerRole;
constexpr uint32_t kSentAtOnce = 4, kTakenAtOnce = 2;  // tokens: one tail serves two waits

struct RingArgs {
    CommArgs comm;
    uint64_t slots;  // this one and the next three: offsets in the heap. u32 [channel][kSlots][kWordsPerToken]
    uint64_t tails, credits, arrivals;  // u64 [channel]
    const uint32_t* sent;               // [channel][num_tokens][kWordsPerToken]
    uint32_t* received;                 // the same of the previous rank
    uint32_t num_tokens;                // of a call and channel
    uint32_t call;                      // from 1 on
    uint64_t slow_ticks;                // what a token takes longer at this receiver

    TK_DEVICE uint32_t* slot(uint32_t rank, uint32_t channel, uint64_t token) const {
        return comm.at<uint32_t>(rank, slots) + (channel * kSlots + token % kSlots) * kWordsPerToken;
    }
    TK_DEVICE uint64_t row(uint32_t channel, uint32_t token) const {
        return (uint64_t{channel} * num_tokens + token) * kWordsPerToken;
    }
    TK_DEVICE uint64_t before() const { return uint64_t{call - 1} * num_tokens; }  // tokens of earlier calls
    TK_DEVICE uint32_t chunk_end(uint32_t end) const { return end < num_tokens ? end : num_tokens; }
};

struct RingShared {
    uint32_t arrivals[2];  // at the barriers of a role's warps, where the machine has none; 0 at first
};

// Waits until *word is at least `wanted`.
template <RingChannel kChannel>
TK_DEVICE bool wait_until(
    Warp& warp, const CommArgs& comm, const uint64_t* word, uint64_t wanted, uint32_t peer, uint32_t channel) {
    perturb(warp);
    uint64_t started = 0;
    bool ok = true;
    for (uint32_t spins = 0; ok;) {
        const uint64_t seen = load_acquire_system(word);
        if (seen >= wanted) break;
        warp.relax(spins);
        const WaitFor wait_for{0, peer, channel};
        ok =
            !should_give_up(warp, comm, channel_number(kChannel), wait_for, spins, wanted, make_flag(seen, 0), started);
    }
    return warp.sum([&](int) { return ok ? 0u : 1u; }) == 0;  // lanes see the word in different turns
}

TK_DEVICE void publish(Warp& warp, uint64_t* word, uint64_t value) {
    perturb(warp);
    warp.leader([&] { store_release_system(word, value); });
}

// What one rank adds, any other sees, with all that was written before.
TK_DEVICE void add_for_all_ranks(uint64_t* word) {
#ifdef __CUDACC__
    __threadfence_system();
    atomicAdd_system(reinterpret_cast<unsigned long long*>(word), 1ull);
#else
    add_acq_rel_device(word, uint64_t{1});  // there all ranks are processes of one machine
#endif
}

// The warps of a role. Named barrier 0 is the whole block's.
template <class Rec>
TK_DEVICE void meet(Warp& warp, Rec& recorder, Role role) {
    TK_WAIT(recorder, RingEvent::wait_group, 1 + role, kWarpsPerRole);
    TK_END_AFTER_GROUP_BARRIER(1 + role, kWarpsPerRole, warp, warp.shared<RingShared>().arrivals);
}

// A wait that gave up makes all others give up. Its warp then only keeps the barriers.
template <class Rec>
TK_DEVICE void send(Warp& warp, Rec& recorder, const RingArgs& args) {
    const uint32_t own = args.comm.rank, channel = warp.block, next = (own + 1) % args.comm.num_ranks;
    bool ok = true;
    for (uint32_t first = 0; first < args.num_tokens; first += kSentAtOnce) {
        const uint32_t end = args.chunk_end(first + kSentAtOnce);
        const uint64_t tail = args.before() + end;
        if (ok) {
            TK_WAIT(recorder, RingEvent::wait_credit, next, channel, tail);
            const uint64_t* credit = args.comm.at<uint64_t>(own, args.credits) + channel;
            ok = wait_until<RingChannel::credit>(warp, args.comm, credit, tail, next, channel);
            TK_END_IF(ok);
        }
        for (uint32_t token = first + warp.warp % kWarpsPerRole; ok && token < end; token += kWarpsPerRole) {
            TK_RANGE(recorder, RingEvent::send_token, next, channel, token);
            uint32_t* slot = args.slot(next, channel, args.before() + token);
            copy_row(warp, slot, args.sent + args.row(channel, token), kWordsPerToken * sizeof(uint32_t));
        }
        meet(warp, recorder, kSend);
        if (ok && warp.warp % kWarpsPerRole == 0) {
            TK_SIGNAL(recorder, RingEvent::signal_tail, next, channel, tail);
            publish(warp, args.comm.at<uint64_t>(next, args.tails) + channel, tail);
        }
    }
}

TK_DEVICE void be_slow(Warp& warp, uint64_t ticks) {
    const uint64_t started = read_clock();
    for (uint32_t spins = 0; read_clock() - started < ticks;) warp.relax(spins);
    warp.sync();
}

template <class Rec>
TK_DEVICE void receive(Warp& warp, Rec& recorder, const RingArgs& args) {
    const uint32_t own = args.comm.rank, channel = warp.block;
    const uint32_t source = (own + args.comm.num_ranks - 1) % args.comm.num_ranks;
    bool ok = true;
    for (uint32_t first = 0; first < args.num_tokens; first += kTakenAtOnce) {
        const uint32_t end = args.chunk_end(first + kTakenAtOnce);
        const uint64_t taken = args.before() + end;
        if (ok) {
            TK_WAIT(recorder, RingEvent::wait_tail, source, channel, taken);
            const uint64_t* tail = args.comm.at<uint64_t>(own, args.tails) + channel;
            ok = wait_until<RingChannel::tail>(warp, args.comm, tail, taken, source, channel);
            TK_END_IF(ok);
        }
        for (uint32_t token = first + warp.warp % kWarpsPerRole; ok && token < end; token += kWarpsPerRole) {
            TK_RANGE(recorder, RingEvent::take_token, source, channel, token);
            const uint32_t* slot = args.slot(own, channel, args.before() + token);
            copy_row(warp, args.received + args.row(channel, token), slot, kWordsPerToken * sizeof(uint32_t));
            be_slow(warp, args.slow_ticks);
        }
        meet(warp, recorder, kReceive);
        if (ok && warp.warp % kWarpsPerRole == 0) {
            TK_SIGNAL(recorder, RingEvent::signal_credit, source, channel, taken + kSlots);
            publish(warp, args.comm.at<uint64_t>(source, args.credits) + channel, taken + kSlots);
        }
    }
}

// Nobody ends a call before all ranks have what they were sent.
template <class Rec>
TK_DEVICE void meet_ranks(Warp& warp, Rec& recorder, const RingArgs& args) {
    const uint32_t own = args.comm.rank, channel = warp.block;
    for (uint32_t i = 0; i < args.comm.num_ranks; ++i) {
        const uint32_t peer = args.comm.nth_peer(i);
        TK_SIGNAL(recorder, RingEvent::signal_arrival, peer, channel, args.call);
        perturb(warp);
        warp.leader([&] { add_for_all_ranks(args.comm.at<uint64_t>(peer, args.arrivals) + channel); });
    }
    TK_WAIT(recorder, RingEvent::wait_arrival, channel, args.call);
    const uint64_t* arrived = args.comm.at<uint64_t>(own, args.arrivals) + channel;
    const uint64_t wanted = uint64_t{args.call} * args.comm.num_ranks;
    const bool ok = wait_until<RingChannel::arrival>(warp, args.comm, arrived, wanted, own, channel);
    TK_END_IF(ok);
}

template <class Rec>
TK_DEVICE void ring(Warp& warp, const RingArgs& args, typename Rec::Args trace) {
    const uint32_t role = warp.warp / kWarpsPerRole;
    Rec recorder(trace, warp, role);
    if (role == kSend) {
        send(warp, recorder, args);
    } else {
        receive(warp, recorder, args);
    }
    {
        TK_WAIT(recorder, RingEvent::wait_block);
        TK_END_AFTER_BARRIER(warp);
    }
    if (warp.warp == 0) meet_ranks(warp, recorder, args);
}

#ifdef __CUDACC__
template <class Rec>
__global__ void ring_kernel(const __grid_constant__ RingArgs args, const LaunchSize size, typename Rec::Args trace) {
    Warp warp(size);
    ring<Rec>(warp, args, trace);
}
template <class Rec>
void launch(const RingArgs& args, uint32_t channels, typename Rec::Args trace) {
    ring_kernel<Rec><<<channels, kWarps * kLanes>>>(args, {channels, kWarps}, trace);
    if (const cudaError_t code = cudaGetLastError()) throw std::runtime_error(cudaGetErrorString(code));
}
#else
template <class Rec>
void launch(const RingArgs& args,
            uint32_t channels,
            typename Rec::Args trace,
            const SimulatedClock* clock = &kHostClock) {
    launch_cpu({.num_blocks = channels, .warps_per_block = kWarps, .shared_bytes = sizeof(RingShared), .clock = clock},
               [&](Warp& warp) { ring<Rec>(warp, args, trace); });
}
#endif
