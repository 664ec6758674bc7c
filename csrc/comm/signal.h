// Flags between ranks: how one is raised, and the primitives that wait for it.
//
// One writer a flag. A signal releases: what the warp wrote before is visible to every warp that acquires the flag. A
// wait acquires with every lane, so every lane may read the payload. Order, scope and the hook of the tests that leave
// one of them out stand here and in comm/counter.h alone.
#pragma once

#include "comm/flag.h"
#include "comm/give_up.h"
#include "comm/heap.h"
#include "comm/mutation.h"
#include "comm/perturb.h"

namespace tracekern {

struct WaitResult {
    bool ok;  // false: out of time, or a rank gave up. The caller leaves its loop and still reaches its block barriers
    uint32_t value;
};

// Whether a flag carries `epoch` and a value of at least `least`.
template <auto kChannel>
TK_DEVICE bool is_wanted(uint64_t flag, uint64_t epoch, uint32_t least = 0) {
    if (mutated(kChannel, Mutation::acknowledgement)) return true;
    const bool is_of_call =
        mutated(kChannel, Mutation::epoch) ? flag_epoch(flag) != kNeverEpoch : flag_epoch(flag) == epoch;
    return is_of_call && (flag_value(flag) >= least || mutated(kChannel, Mutation::value));
}

// Whether a flag is at {epoch, value} or beyond.
template <auto kChannel>
TK_DEVICE bool is_reached(uint64_t flag, uint64_t epoch, uint32_t value) {
    if (mutated(kChannel, Mutation::acknowledgement)) return true;
    if (mutated(kChannel, Mutation::epoch)) return flag_epoch(flag) != kNeverEpoch;
    if (mutated(kChannel, Mutation::value)) value = 0;
    return !is_ahead(make_flag(epoch, value), flag);
}

// The same on the host, of a word that it was told.
template <auto kChannel>
bool was_told(uint64_t word, uint64_t epoch) {
#if TK_GPU
    return flag_epoch(word) == epoch;
#else
    return is_wanted<kChannel>(word, epoch);
#endif
}

// Who may wait for a flag. A release for all ranks also waits until what is under way to other devices has arrived.
// Flags for the own block alone are in its shared memory.
enum class Scope { ranks, device, block };

// ---- signals ----

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

// Raises a flag in the block's shared memory.
template <auto kChannel>
TK_DEVICE void signal_block(Warp& warp, uint64_t* flag, uint64_t epoch, uint32_t value) {
    perturb(warp);
    warp.leader([&] {
        if (mutated(kChannel, Mutation::release)) {
            store_relaxed_block(flag, make_flag(epoch, value));
        } else {
            store_release_block(flag, make_flag(epoch, value));
        }
    });
}

// Raises several flags, at any ranks: those of the lanes in `lanes`, of the first 32, a flag each. Lanes that release
// side by side wait once for what is under way, where each of so many signals would.
template <auto kChannel, class FlagOf, class ValueOf>
TK_DEVICE void signal_all(Warp& warp, uint32_t lanes, FlagOf flag_of, uint64_t epoch, ValueOf value_of) {
    perturb(warp);
    warp.sync();  // the release of each lane covers what the others wrote
    warp.each_lane([&](int lane) {
        if (lane >= 32 || !(lanes >> lane & 1)) return;
        const uint64_t flag = make_flag(epoch, value_of(lane));
        if (mutated(kChannel, Mutation::release)) {
            store_relaxed_system(flag_of(lane), flag);
        } else {
            store_release_system(flag_of(lane), flag);
        }
    });
}

// For a flag that orders nothing but itself.
TK_DEVICE void signal_relaxed(Warp& warp, uint64_t* flag, uint64_t epoch, uint32_t value) {
    perturb(warp);
    warp.leader([&] { store_relaxed_system(flag, make_flag(epoch, value)); });
}

// The same for `count` neighbouring flags.
template <class ValueOf>
TK_DEVICE void signal_all_relaxed(Warp& warp, uint64_t* flags, uint32_t count, uint64_t epoch, ValueOf value_of) {
    perturb(warp);
    warp.strided(count, [&](uint32_t i) { store_relaxed_system(&flags[i], make_flag(epoch, value_of(i))); });
}

// For the host, which polls: a word that is its own payload. One lane's.
TK_DEVICE void tell_host(uint64_t* word, uint64_t epoch, uint32_t value) {
    store_relaxed_system(word, make_flag(epoch, value));
}

// ---- waits ----

// Loads a flag once; the caller asks is_wanted().
template <auto kChannel, Scope kScope = Scope::ranks>
TK_DEVICE uint64_t look_at(const uint64_t* flag) {
    const bool acquires = !mutated(kChannel, Mutation::acquire);
    if constexpr (kScope == Scope::block) {
        return acquires ? load_acquire_block(flag) : load_relaxed_block(flag);
    } else if constexpr (kScope == Scope::device) {
        return acquires ? load_acquire_device(flag) : load_relaxed_system(flag);
    } else {
        return acquires ? load_acquire_system(flag) : load_relaxed_system(flag);
    }
}

// What a wait does while it spins: on a GPU an acquire empties the cache of the whole block, also of its warps that are
// copying.
template <Scope kScope>
TK_DEVICE uint64_t glance_at(const uint64_t* flag) {
    if constexpr (kScope == Scope::block) {
        return load_relaxed_block(flag);
    } else {
        return load_relaxed_system(flag);
    }
}

// Waits until wanted(*flag); For: RingWait or WaitFor. epoch: for the fault record.
template <auto kChannel, Scope kScope, class Comm, class Wanted, class For>
TK_DEVICE WaitResult
wait_until(Warp& warp, const Comm& comm, const uint64_t* flag, uint64_t epoch, Wanted wanted, const For& wait_for) {
    perturb(warp);
    uint64_t started = 0;
    bool ok = true;
    uint64_t seen = look_at<kChannel, kScope>(flag);
    for (uint32_t spins = 0; !wanted(seen);) {
        warp.relax(spins);
        if (should_give_up(warp, comm, channel_number(kChannel), wait_for, spins, epoch, seen, started)) {
            ok = false;
            break;
        }
        seen = glance_at<kScope>(flag);
        if (wanted(seen)) seen = look_at<kChannel, kScope>(flag);
    }
    // Lanes see the flag in different turns; they go on together, and only if all of them saw it.
    ok = warp.sum([&](int) { return ok ? 0u : 1u; }) == 0;
    return {ok, flag_value(seen)};
}

// Waits until *flag carries `epoch` and a value of at least `least`; returns the value that came.
template <auto kChannel, Scope kScope = Scope::ranks, class Comm>
TK_DEVICE WaitResult
wait_at_least(Warp& warp, const Comm& comm, const uint64_t* flag, uint64_t epoch, uint32_t least, RingWait wait_for) {
    wait_for.least = least;
    const auto wanted = [&](uint64_t seen) { return is_wanted<kChannel>(seen, epoch, least); };
    return wait_until<kChannel, kScope>(warp, comm, flag, epoch, wanted, wait_for);
}

// Waits until *flag carries `epoch`. For: WaitFor, or RingWait where it says how far a ring has come.
template <auto kChannel, class Comm, class For = WaitFor>
TK_DEVICE WaitResult wait(Warp& warp, const Comm& comm, const uint64_t* flag, uint64_t epoch, const For& wait_for) {
    const auto wanted = [&](uint64_t seen) { return is_wanted<kChannel>(seen, epoch); };
    return wait_until<kChannel, Scope::ranks>(warp, comm, flag, epoch, wanted, wait_for);
}

// Waits until *flag is at {epoch, value} or beyond: for flags that say of something that it is over, and with it all
// before.
template <auto kChannel, class Comm>
TK_DEVICE WaitResult wait_reached(
    Warp& warp, const Comm& comm, const uint64_t* flag, uint64_t epoch, uint32_t value, const WaitFor& wait_for) {
    const auto wanted = [&](uint64_t seen) { return is_reached<kChannel>(seen, epoch, value); };
    return wait_until<kChannel, Scope::ranks>(warp, comm, flag, epoch, wanted, wait_for);
}

struct Arrived {
    uint32_t lanes;           // 0: gave up
    PerLane<uint32_t> value;  // of the flags of these lanes
};

// Waits for wait_any_at_least() and wait_any(). Every lane may then read the payload of all that are returned: each
// lane acquires its flag, and sync() orders that before what the others do.
template <auto kChannel, Scope kScope, class Comm, class FlagOf, class LeastOf, class For>
TK_DEVICE Arrived wait_until_any(Warp& warp,
                                 const Comm& comm,
                                 uint32_t lanes,
                                 FlagOf flag_of,
                                 uint64_t epoch,
                                 LeastOf least_of,
                                 const For& wait_for) {
    const auto look = [&](auto load) {
        return warp.lanes([&](int lane) { return lane < 32 && lanes >> lane & 1 ? load(flag_of(lane)) : uint64_t{0}; });
    };
    const auto wanted = [&](const PerLane<uint64_t>& seen) {
        return warp.ballot([&](int lane) {
            return lane < 32 && lanes >> lane & 1 && is_wanted<kChannel>(seen[lane], epoch, least_of(lane));
        });
    };
    const auto acquire = [&] { return look([](const uint64_t* flag) { return look_at<kChannel, kScope>(flag); }); };
    perturb(warp);
    PerLane<uint64_t> seen = acquire();
    uint32_t arrived = wanted(seen);
    uint64_t started = 0;
    for (uint32_t spins = 0; !arrived;) {
        warp.relax(spins);
        seen = look([](const uint64_t* flag) { return glance_at<kScope>(flag); });
        if (wanted(seen)) {
            seen = acquire();
            arrived = wanted(seen);
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
    return {arrived, warp.lanes([&](int lane) { return flag_value(seen[lane]); })};
}

// Waits until one of several flags carries `epoch` and a value of at least least_of(lane): those of the lanes in
// `lanes`, of the first 32, a flag each. Returns the lanes whose flag does. `wait_for` names what the first of them
// waits for.
template <auto kChannel, Scope kScope = Scope::ranks, class Comm, class FlagOf, class LeastOf>
TK_DEVICE Arrived wait_any_at_least(
    Warp& warp, const Comm& comm, uint32_t lanes, FlagOf flag_of, uint64_t epoch, LeastOf least_of, RingWait wait_for) {
    const auto least = warp.lanes([&](int lane) { return lane < 32 && lanes >> lane & 1 ? least_of(lane) : 0u; });
    wait_for.least = warp.shuffle(least, static_cast<int>(first_bit(lanes)));
    return wait_until_any<kChannel, kScope>(warp, comm, lanes, flag_of, epoch, least_of, wait_for);
}

// Waits until one of several flags carries `epoch`; returns the lanes whose flag does, 0: gave up. `wait_for` as above.
template <auto kChannel, class Comm, class FlagOf>
TK_DEVICE uint32_t
wait_any(Warp& warp, const Comm& comm, uint32_t lanes, FlagOf flag_of, uint64_t epoch, WaitFor wait_for) {
    const auto any_value = [](int) { return 0u; };
    return wait_until_any<kChannel, Scope::ranks>(warp, comm, lanes, flag_of, epoch, any_value, wait_for).lanes;
}

// Waits until each of `count` neighbouring flags carries `epoch`. A lane a flag; calls take(i, value) for each. The
// slot of a WaitFor becomes i.
template <auto kChannel, class Comm, class For = WaitFor, class Take>
TK_DEVICE bool wait_all(Warp& warp,
                        const Comm& comm,
                        const uint64_t* flags,
                        uint32_t count,
                        uint64_t epoch,
                        const For& wait_for,
                        Take take) {
    perturb(warp);
    uint32_t failures = 0;
    warp.strided(count, [&](uint32_t i) {
        uint64_t started = 0;
        For waiting = wait_for;
        if constexpr (std::is_same_v<For, WaitFor>) waiting.slot = i;
        for (uint32_t spins = 0;;) {
            const uint64_t seen = look_at<kChannel>(flags + i);
            if (is_wanted<kChannel>(seen, epoch)) return take(i, flag_value(seen));
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
