// Flags between ranks: how one is raised, and the primitives that wait for it.
//
// A flag is a 64-bit word {epoch, value}: the epoch says of which call it is, so flags are never cleared, and equality
// of the epoch survives its wrap. A flag that nobody raises for exactly 2^40 calls would pass for a new one: with calls
// of 10 us that takes four months. One writer a flag. signal() releases at system scope: what the warp wrote before is
// visible to every warp that acquires the flag. wait() acquires at system scope with every lane, so every lane may read
// the payload.
#pragma once

#include "comm/heap.h"
#include "comm/mutation.h"
#include "comm/perturb.h"

namespace tracekern {

constexpr uint32_t kFlagValueBits = 24;
constexpr uint64_t kEpochMask = ~uint64_t{0} >> kFlagValueBits;
constexpr uint32_t kMaxFlagValue = (1u << kFlagValueBits) - 1;

// Of the value the low 24 bits: whoever counts checks beforehand that they are enough.
TK_HOST_DEVICE constexpr uint64_t make_flag(uint64_t epoch, uint32_t value) {
    return epoch << kFlagValueBits | (value & kMaxFlagValue);
}
TK_HOST_DEVICE constexpr uint64_t flag_epoch(uint64_t flag) {
    return flag >> kFlagValueBits;
}
TK_HOST_DEVICE constexpr uint32_t flag_value(uint64_t flag) {
    return static_cast<uint32_t>(flag) & kMaxFlagValue;
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
constexpr uint64_t kFirstEpoch = kEpochMask - 15;
constexpr uint64_t kNeverEpoch = kFirstEpoch - 1;

// A flag that was never raised must not become one of this call: kNeverEpoch is left out, and the epoch behind it, so
// that odd and even ones still take turns.
TK_HOST_DEVICE constexpr uint64_t next_epoch(uint64_t epoch) {
    const uint64_t next = (epoch + 1) & kEpochMask;
    return next == kNeverEpoch ? kFirstEpoch + 1 : next;
}
static_assert(next_epoch(kNeverEpoch - 1) == kFirstEpoch + 1 && (kNeverEpoch - 1) % 2 != (kFirstEpoch + 1) % 2);
static_assert(next_epoch(kEpochMask) == 0 && flag_epoch(make_flag(kEpochMask, 0)) == kEpochMask);

// What records and faults keep of an epoch.
TK_HOST_DEVICE constexpr uint32_t epoch_on_record(uint64_t epoch) {
    return static_cast<uint32_t>(epoch);
}

template <class Channel>
TK_DEVICE bool is_wanted_epoch(Channel channel, uint64_t epoch, uint64_t wanted) {
    if (mutated(channel, Mutation::acknowledgement)) return true;
    if (mutated(channel, Mutation::epoch)) return epoch != kNeverEpoch;
    return epoch == wanted;
}

// Who may wait for a flag. A release for all ranks also waits until what is under way to other devices has arrived.
enum class Scope { ranks, device };

template <auto kChannel>
TK_DEVICE void signal(Warp& warp, uint64_t* flag, uint64_t epoch, uint32_t value, Scope scope = Scope::ranks) {
    perturb(warp);
    // leader() orders the stores of all lanes before the one lane's release; the release is cumulative, so it covers
    // them.
    warp.leader([&] {
        if (mutated(kChannel, Mutation::release)) {
            store_relaxed_system(flag, make_flag(epoch, value));
        } else if (scope == Scope::device) {
            store_release_device(flag, make_flag(epoch, value));
        } else {
            store_release_system(flag, make_flag(epoch, value));
        }
    });
}

// For a flag that orders nothing but itself.
TK_DEVICE void signal_relaxed(Warp& warp, uint64_t* flag, uint64_t epoch, uint32_t value) {
    perturb(warp);
    warp.leader([&] { store_relaxed_system(flag, make_flag(epoch, value)); });
}

// What a wait that gives up has to say.
struct GivenUp {
    FaultCause cause;
    uint32_t channel;
    WaitFor wait_for;
    uint64_t wanted_epoch;
    uint64_t seen;  // the flag
    uint64_t waited_ticks;
    uint32_t block, warp;
};

// Writes the fault record if there is none yet, and makes every rank give up. Every lane that gives up calls it, since
// others of its warp may have seen what they waited for; `claimed` lets one lane write, which learns that it did. A
// function of its own: it would be a quarter of the code of a kernel that waits in many places.
//
// The own abort word comes before all else, whoever claimed the record and whatever aborted_by says: the next to look
// on this rank must not miss it, and the peer that stored aborted_by may have ended before it stored the other word.
// But behind the claim: a warp that sees the word must not take the record from the one that knows the cause. Relaxed
// is enough for aborted_by: it only tells who, and a reader that misses it names itself.
TK_DEVICE_CALL bool raise_fault(const CommArgs& comm, const GivenUp given_up) {
    const bool claims = !load_relaxed_system(&comm.fault->claimed) && claim_system(&comm.fault->claimed);
    store_release_system(&comm.control(comm.rank).abort, 1u);
    if (!claims) return false;
    FaultRecord& fault = *comm.fault;
    fault.stage = comm.first_stage + given_up.wait_for.stage;
    fault.channel = given_up.channel;
    fault.rank = comm.rank;
    fault.peer = given_up.wait_for.peer;
    fault.block = given_up.block;
    fault.warp = given_up.warp;
    fault.slot = given_up.wait_for.slot;
    fault.wanted_epoch = epoch_on_record(given_up.wanted_epoch);
    fault.seen_epoch = epoch_on_record(flag_epoch(given_up.seen));
    fault.seen_value = flag_value(given_up.seen);
    fault.waited_ticks = given_up.waited_ticks;
    fault.on_timeout = static_cast<uint32_t>(comm.on_timeout);
    const uint32_t known = load_relaxed_system(&comm.control(comm.rank).aborted_by);
    const uint32_t aborted_by = known ? known : comm.rank + 1;
    fault.aborted_by = aborted_by;
    store_release_system(&fault.cause, static_cast<uint32_t>(given_up.cause));
    for (uint32_t peer = 0; peer < comm.num_ranks; ++peer) {
        HeapControl& control = comm.control(peer);
        if (!load_relaxed_system(&control.aborted_by)) store_relaxed_system(&control.aborted_by, aborted_by);
        store_release_system(&control.abort, 1u);
    }
    return true;
}

// The same, and ends the device where the communicator asks for that.
TK_DEVICE void leave_fault(const Warp& warp, const CommArgs& comm, const GivenUp& given_up) {
    if (raise_fault(comm, given_up) && comm.on_timeout == OnTimeout::trap) warp.trap();
}

// Whether some rank gave up, as this lane sees it.
TK_DEVICE bool lane_sees_abort(const CommArgs& comm) {
    if (aborts_at_this_look()) store_relaxed_system(&comm.control(comm.rank).abort, 1u);
    return load_relaxed_system(&comm.control(comm.rank).abort) != 0;
}

// The same, seen by one lane for its whole warp: lanes that looked for themselves could part ways. So could the warps
// of a block: whether one comes to a barrier of its block or its grid must never depend on a look of its own. Either
// all of them come, whatever each saw, or one looks for all and tells them through memory of the block, behind a block
// barrier.
//
// A kernel asks before it passes on what one before it was to receive: that may never have come, and its signal would
// make it look like a right result.
TK_DEVICE bool has_aborted(Warp& warp, const CommArgs& comm) {
    return warp.once([&] { return uint32_t{lane_sees_abort(comm)}; }) != 0;
}

// Called in the turns of a spin: has the time run out, or did a rank give up? Looks every 16th turn. A wait whose time
// is over has 16 turns more: it may have been stopped itself, by a debugger say, while what it waits for came. One for
// this rank itself has an eighth more time: what it waits for may wait for another rank, and that one is to be named.
// started: the caller's, 0 at first; its lowest bit marks those turns.
TK_DEVICE bool should_give_up(const Warp& warp,
                              const CommArgs& comm,
                              uint32_t channel,
                              const WaitFor& wait_for,
                              uint32_t spins,
                              uint64_t wanted_epoch,
                              uint64_t seen,
                              uint64_t& started) {
    if (spins % 16 != 1) return false;
    const uint64_t now = read_clock();
    if (started == 0) started = now & ~uint64_t{1};
    const bool aborted = lane_sees_abort(comm);
    const uint64_t more = wait_for.peer == comm.rank ? comm.timeout_ticks / 8 : 0;
    if (!aborted && now - started < comm.timeout_ticks + more) return false;
    if (!aborted && started % 2 == 0) {
        started |= 1;
        return false;
    }
    const FaultCause cause = aborted ? FaultCause::peer_aborted : FaultCause::timeout;
    leave_fault(warp, comm, {cause, channel, wait_for, wanted_epoch, seen, now - started, warp.block, warp.warp});
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
TK_DEVICE WaitResult wait(Warp& warp, const CommArgs& comm, const uint64_t* flag, uint64_t epoch, WaitFor wait_for) {
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

// Waits until one of several flags carries `epoch`: those of the lanes in `lanes`, of the first 32, a flag each.
// Returns the lanes whose flag does; 0: gave up. `wait_for` names what the first of them waits for. Every lane may then
// read the payload of all that are returned: each lane acquires its flag, and sync() orders that before what the others
// do.
template <auto kChannel, class FlagOf>
TK_DEVICE uint32_t
wait_any(Warp& warp, const CommArgs& comm, uint32_t lanes, FlagOf flag_of, uint64_t epoch, WaitFor wait_for) {
    const auto look = [&](auto load) {
        return warp.lanes([&](int lane) { return lane < 32 && lanes >> lane & 1 ? load(flag_of(lane)) : uint64_t{0}; });
    };
    const auto wanted = [&](const PerLane<uint64_t>& seen) {
        return warp.ballot([&](int lane) {
            return lane < 32 && lanes >> lane & 1 && is_wanted_epoch(kChannel, flag_epoch(seen[lane]), epoch);
        });
    };
    const auto acquired = [&] { return wanted(look([](const uint64_t* flag) { return look_at<kChannel>(flag); })); };
    perturb(warp);
    uint32_t arrived = acquired();
    uint64_t started = 0;
    for (uint32_t spins = 0; !arrived;) {
        warp.relax(spins);
        // Relaxed while it spins, see wait().
        const auto seen = look([](const uint64_t* flag) { return load_relaxed_system(flag); });
        if (wanted(seen)) {
            arrived = acquired();
            continue;
        }
        const uint64_t first = warp.shuffle(seen, static_cast<int>(first_bit(lanes)));
        const auto gives_up = [&] {
            return uint32_t{
                should_give_up(warp, comm, channel_number(kChannel), wait_for, spins, epoch, first, started)};
        };
        if (warp.once(gives_up)) break;  // all lanes together
    }
    warp.sync();
    return arrived;
}

// Waits until each of `count` neighbouring flags carries `epoch`, or or_epoch where one is given: a flag may go on to
// that one before all warps have looked. A lane a flag; calls take(i, value) for each.
template <auto kChannel, class Take, class... Epoch>
TK_DEVICE bool wait_all(Warp& warp,
                        const CommArgs& comm,
                        const uint64_t* flags,
                        uint32_t count,
                        uint64_t epoch,
                        WaitFor wait_for,
                        Take take,
                        Epoch... or_epoch) {
    perturb(warp);
    uint32_t failures = 0;
    warp.strided(count, [&](uint32_t i) {
        uint64_t started = 0;
        WaitFor waiting = wait_for;
        waiting.slot = i;
        for (uint32_t spins = 0;;) {
            const uint64_t seen = look_at<kChannel>(flags + i);
            const uint64_t seen_epoch = flag_epoch(seen);
            if (is_wanted_epoch(kChannel, seen_epoch, epoch) || (... || (seen_epoch == or_epoch))) {
                return take(i, flag_value(seen));
            }
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
