// Counters that the warps of one device add to, one at a time, and wait for: plain 64-bit numbers.
//
// An addition releases what its warp wrote before, and acquires what earlier additions released: acq_rel at device
// scope. A wait acquires at device scope with every lane.
#pragma once

#include "comm/signal.h"

namespace tracekern {

// One lane's. Returns the count before.
template <auto kChannel, class Word>
TK_DEVICE Word add_one(Word* counter) {
    return mutated(kChannel, Mutation::release) ? add_relaxed_device(counter, Word{1})
                                                : add_acq_rel_device(counter, Word{1});
}

template <auto kChannel>
TK_DEVICE void count_up(Warp& warp, uint64_t* counter) {
    perturb(warp);
    // leader() orders what all lanes wrote before it.
    warp.leader([&] { add_one<kChannel>(counter); });
}

// The same, and tells all lanes the count before.
template <auto kChannel, class Word>
TK_DEVICE Word take_ticket(Warp& warp, Word* counter) {
    perturb(warp);
    return warp.once([&] { return add_one<kChannel>(counter); });
}

// Waits until *counter is at least `wanted`; false when it gave up. wait_for(seen) says what is missing.
template <auto kChannel, class For>
TK_DEVICE bool wait_for_count(
    Warp& warp, const CommArgs& comm, const uint64_t* counter, uint64_t wanted, For wait_for) {
    perturb(warp);
    uint64_t started = 0;
    bool ok = true;
    for (uint32_t spins = 0; !mutated(kChannel, Mutation::acknowledgement);) {
        const uint64_t seen = look_at<kChannel, Scope::device>(counter);
        if (seen >= wanted) break;
        warp.relax(spins);
        const uint32_t channel = channel_number(kChannel);
        if (should_give_up(warp, comm, channel, wait_for(seen), spins, wanted, make_flag(seen, 0), started)) {
            ok = false;
            break;
        }
    }
    return warp.sum([&](int) { return ok ? 0u : 1u; }) == 0;
}

}  // namespace tracekern
