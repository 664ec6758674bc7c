// Flags between ranks: how one is raised, and the one primitive that waits for it.
//
// A flag is a 64-bit word {epoch, value}: the epoch says of which call it is, so flags are never cleared, and equality
// of the epoch survives its wrap. One writer a flag. signal() releases at system scope: what the warp wrote before is
// visible to every warp that acquires the flag. wait() acquires at system scope with every lane, so every lane may read
// the payload.
#pragma once

#include "comm/heap.h"
#include "comm/mutation.h"
#include "comm/perturb.h"

namespace tracekern {

TK_HOST_DEVICE constexpr uint64_t make_flag(uint32_t epoch, uint32_t value) {
    return uint64_t{epoch} << 32 | value;
}
TK_HOST_DEVICE constexpr uint32_t flag_epoch(uint64_t flag) {
    return static_cast<uint32_t>(flag >> 32);
}
TK_HOST_DEVICE constexpr uint32_t flag_value(uint64_t flag) {
    return static_cast<uint32_t>(flag);
}

// Whom a wait is for; goes into the fault record.
struct WaitFor {
    uint32_t stage;  // the kernel, counted from CommArgs::first_stage
    uint32_t peer;
    uint32_t slot;
};

struct WaitResult {
    bool ok;  // false: out of time, or a rank gave up. The caller leaves its loop and still reaches its block barriers
    uint32_t value;
};

// The first epoch of a communicator: just below the wrap, so that every run crosses it. Flags start one before it.
constexpr uint32_t kFirstEpoch = 0xfffffff0u;
constexpr uint32_t kNeverEpoch = kFirstEpoch - 1;

// A flag that was never raised must not become one of this call: kNeverEpoch is left out, and the epoch behind it, so
// that odd and even ones still take turns.
TK_HOST_DEVICE constexpr uint32_t next_epoch(uint32_t epoch) {
    return epoch + 1 == kNeverEpoch ? kFirstEpoch + 1 : epoch + 1;
}
static_assert(next_epoch(kNeverEpoch - 1) == kFirstEpoch + 1 && (kNeverEpoch - 1) % 2 != (kFirstEpoch + 1) % 2);

template <class Channel>
TK_DEVICE bool is_wanted_epoch(Channel channel, uint32_t epoch, uint32_t wanted) {
    if (mutated(channel, Mutation::acknowledgement)) return true;
    if (mutated(channel, Mutation::epoch)) return epoch != kNeverEpoch;
    return epoch == wanted;
}

template <auto kChannel>
TK_DEVICE void signal(Warp& warp, uint64_t* flag, uint32_t epoch, uint32_t value) {
    perturb(warp);
    // leader() orders the stores of all lanes before the one lane's release; the release is cumulative, so it covers
    // them.
    warp.leader([&] {
        if (mutated(kChannel, Mutation::release)) {
            store_relaxed_system(flag, make_flag(epoch, value));
        } else {
            store_release_system(flag, make_flag(epoch, value));
        }
    });
}

// For a flag that orders nothing but itself.
TK_DEVICE void signal_relaxed(Warp& warp, uint64_t* flag, uint32_t epoch, uint32_t value) {
    perturb(warp);
    warp.leader([&] { store_relaxed_system(flag, make_flag(epoch, value)); });
}

// Writes the fault record if there is none yet, and makes every rank give up. Every lane that gives up calls it, since
// others of its warp may have seen what they waited for; `claimed` lets one lane write.
TK_DEVICE void raise_fault(const Warp& warp,
                           const CommArgs& comm,
                           FaultCause cause,
                           uint32_t channel,
                           const WaitFor& wait_for,
                           uint32_t wanted_epoch,
                           uint64_t seen,
                           uint64_t waited_ticks) {
    if (load_relaxed_system(&comm.fault->claimed) || !claim_system(&comm.fault->claimed)) {
        // The next reader must not miss it, even if the winner is still writing.
        store_release_system(&comm.control(comm.rank).abort, 1u);
        return;
    }
    FaultRecord& fault = *comm.fault;
    fault.stage = comm.first_stage + wait_for.stage;
    fault.channel = channel;
    fault.rank = comm.rank;
    fault.peer = wait_for.peer;
    fault.block = warp.block;
    fault.warp = warp.warp;
    fault.slot = wait_for.slot;
    fault.wanted_epoch = wanted_epoch;
    fault.seen_epoch = flag_epoch(seen);
    fault.seen_value = flag_value(seen);
    fault.waited_ticks = waited_ticks;
    fault.on_timeout = static_cast<uint32_t>(comm.on_timeout);
    const uint32_t aborted_by = load_relaxed_system(&comm.control(comm.rank).aborted_by);
    fault.aborted_by = aborted_by ? aborted_by : comm.rank + 1;
    store_release_system(&fault.cause, static_cast<uint32_t>(cause));
    for (uint32_t peer = 0; peer < comm.num_ranks; ++peer) {
        HeapControl& control = comm.control(peer);
        if (load_relaxed_system(&control.aborted_by)) continue;
        store_relaxed_system(&control.aborted_by, comm.rank + 1);
        store_release_system(&control.abort, 1u);
    }
    if (comm.on_timeout == OnTimeout::trap) warp.trap();
}

// Whether some rank gave up. A kernel asks before it passes on what one before it was to receive: that may never have
// come, and its signal would make it look like a right result.
TK_DEVICE bool has_aborted(const CommArgs& comm) {
    return load_relaxed_system(&comm.control(comm.rank).abort) != 0;
}

// Called in the turns of a spin: has the time run out, or did a rank give up? Looks every 16th turn. A wait whose time
// is over has 16 turns more: it may have been stopped itself, by a debugger say, while what it waits for came.
// started: the caller's, 0 at first; its lowest bit marks those turns.
TK_DEVICE bool should_give_up(const Warp& warp,
                              const CommArgs& comm,
                              uint32_t channel,
                              const WaitFor& wait_for,
                              uint32_t spins,
                              uint32_t wanted_epoch,
                              uint64_t seen,
                              uint64_t& started) {
    if (spins % 16 != 1) return false;
    const uint64_t now = read_clock();
    if (started == 0) started = now & ~uint64_t{1};
    const bool aborted = has_aborted(comm);
    if (!aborted && now - started < comm.timeout_ticks) return false;
    if (!aborted && started % 2 == 0) {
        started |= 1;
        return false;
    }
    const FaultCause cause = aborted ? FaultCause::peer_aborted : FaultCause::timeout;
    raise_fault(warp, comm, cause, channel, wait_for, wanted_epoch, seen, now - started);
    return true;
}

// Loads a flag once; the caller compares its epoch.
template <auto kChannel>
TK_DEVICE uint64_t look_at(const uint64_t* flag) {
    return mutated(kChannel, Mutation::acquire) ? load_relaxed_system(flag) : load_acquire_system(flag);
}

// Waits until *flag carries `epoch`. Relaxed while it spins: on a GPU an acquire empties the cache of the whole block,
// also of its warps that are copying.
template <auto kChannel>
TK_DEVICE WaitResult wait(Warp& warp, const CommArgs& comm, const uint64_t* flag, uint32_t epoch, WaitFor wait_for) {
    perturb(warp);
    uint64_t started = 0;
    bool ok = true;
    uint64_t seen = look_at<kChannel>(flag);
    for (uint32_t spins = 0; !is_wanted_epoch(kChannel, flag_epoch(seen), epoch);) {
        warp.relax(spins);
        if (should_give_up(warp, comm, channel_number(kChannel), wait_for, spins, epoch, seen, started)) {
            ok = false;
            break;
        }
        seen = load_relaxed_system(flag);
        if (is_wanted_epoch(kChannel, flag_epoch(seen), epoch)) seen = look_at<kChannel>(flag);
    }
    // Lanes see the flag in different turns; they go on together, and only if all of them saw it.
    ok = warp.sum([&](int) { return ok ? 0u : 1u; }) == 0;
    return {ok, flag_value(seen)};
}

// Waits until each of `count` neighbouring flags carries `epoch`, a lane a flag, and calls take(i, value) for each.
// Meant for flags that are their own payload (raised relaxed).
template <auto kChannel, class Take>
TK_DEVICE bool wait_all(Warp& warp,
                        const CommArgs& comm,
                        const uint64_t* flags,
                        uint32_t count,
                        uint32_t epoch,
                        WaitFor wait_for,
                        Take take) {
    perturb(warp);
    uint32_t failures = 0;
    warp.strided(count, [&](uint32_t i) {
        uint64_t started = 0;
        WaitFor waiting = wait_for;
        waiting.slot = i;
        for (uint32_t spins = 0;;) {
            const uint64_t seen = load_acquire_system(flags + i);
            if (is_wanted_epoch(kChannel, flag_epoch(seen), epoch)) return take(i, flag_value(seen));
            warp.relax(spins);
            if (failures ||
                should_give_up(warp, comm, channel_number(kChannel), waiting, spins, epoch, seen, started)) {
                failures = 1;
                return;
            }
        }
    });
    return warp.sum([&](int) { return failures; }) == 0;
}

}  // namespace tracekern
