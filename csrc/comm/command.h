// How a kernel asks for a write over a network: commands in a ring, which the rank's proxy, a thread of its host,
// takes.
//
// A lane takes the next place, waits until the proxy has taken what was there a lap before, and fills it. It releases
// the lap last, at system scope: a proxy that acquires the lap of its turn sees the command, and the bytes that the
// warp wrote before it. The proxy has read the command when it releases how many it has taken, so that the acquire of
// that number lets the place be filled anew.
#pragma once

#include "comm/give_up.h"
#include "comm/immediate.h"
#include "comm/mutation.h"
#include "comm/perturb.h"

namespace tracekern {

// A put that a kernel asks for.
struct alignas(32) Command {
    uint32_t lap;  // from 1 on
    uint32_t imm;
    uint32_t bytes;  // from src to dst
    uint16_t peer;
    uint8_t tag;            // below kNumTags: which count it is completed in; 0: nobody waits for it
    uint8_t carries_value;  // src is the value to be written, of 8 bytes, and no place
    uint64_t src;           // places are in the memory that a rank's proxy registered, counted from its begin
    uint64_t dst;
};
static_assert(sizeof(Command) == 32, "Command is shared between device and host");
constexpr uint32_t kNumTags = 8;

// Where the memory that a proxy registered has room for a word that comes with its write, which a barrier's does not.
TK_HOST_DEVICE constexpr uint64_t inbox_place(uint32_t source, ControlWord which) {
    const uint32_t place = source * (kNumControlWords - 1) + static_cast<uint32_t>(which) - 1;
    return offsetof(HeapControl, inbox) + place * sizeof(uint64_t);
}
static_assert(static_cast<uint32_t>(ControlWord::barrier) == 0);

// Raises a flag of the peer's HeapControl.
TK_HOST_DEVICE constexpr Command flag_command(uint32_t peer, ControlWord which, uint64_t epoch, uint32_t n) {
    Command command{};
    command.imm = pack_immediate({PutKind::word, 0, static_cast<uint32_t>(epoch), static_cast<uint32_t>(which), n});
    command.peer = static_cast<uint16_t>(peer);
    return command;
}

// Stores a word there that is no flag. source: the rank that sends it.
TK_HOST_DEVICE constexpr Command word_command(uint32_t source, uint32_t peer, ControlWord which, uint64_t word) {
    Command command = flag_command(peer, which, 0, 0);
    command.bytes = sizeof(word);
    command.carries_value = true;
    command.src = word;
    command.dst = inbox_place(source, which);
    return command;
}

// In memory that kernels and the proxy reach; what kernels alone count in is a GPU's own. One for each block, or for
// all.
struct CommandRing {
    Command* commands;
    uint32_t capacity;        // a power of 2
    uint64_t* num_claimed;    // by kernels
    uint64_t* num_seen;       // num_taken, as one of their warps saw it
    uint64_t* num_taken;      // by the proxy
    uint64_t* num_completed;  // [tag] the bytes of so many are at the peers, and no longer read here; by the proxy
};

TK_HOST_DEVICE constexpr uint32_t lap_of(uint64_t place, uint32_t capacity) {
    return static_cast<uint32_t>(place / capacity) + 1;
}

// The functions below are one lane's.

TK_DEVICE uint64_t claim_place(const CommandRing& ring) {
    return add_relaxed_device(ring.num_claimed, uint64_t{1});
}
// A GPU reads memory of the host slowly, so it asks for num_taken only where the ring is full by what was seen before.
// Who saw that had acquired it from the proxy, and released it: who acquires it from there is behind the proxy, too.
// Warps that see num_taken at the same time may store the lower number last, and only look once more than they need.
TK_DEVICE bool has_room(const CommandRing& ring, uint64_t place) {
    if (mutated(CommChannel::command, Mutation::acknowledgement)) return true;
    if (place - load_acquire_device(ring.num_seen) < ring.capacity) return true;
    const uint64_t taken = load_acquire_system(ring.num_taken);
    store_release_device(ring.num_seen, taken);
    return place - taken < ring.capacity;
}
// False: it gave up. stage: of the fault record.
template <class Comm>
TK_DEVICE bool wait_for_room(Warp& warp, const Comm& comm, const CommandRing& ring, uint64_t place, uint32_t stage) {
    uint64_t started = 0;
    for (uint32_t spins = 0; !has_room(ring, place);) {
        warp.relax(spins);
        const WaitFor proxy{stage, comm.rank, static_cast<uint32_t>(place)};
        if (should_give_up(warp, comm, channel_number(CommChannel::command), proxy, spins, 0, 0, started)) return false;
    }
    return true;
}
// Where there is room.
TK_DEVICE void fill_place(const CommandRing& ring, uint64_t place, const Command& command) {
    Command& at = ring.commands[place % ring.capacity];
    at.imm = command.imm;
    at.bytes = command.bytes;
    at.peer = command.peer;
    at.tag = command.tag;
    at.carries_value = command.carries_value;
    at.src = command.src;
    at.dst = command.dst;
    if (mutated(CommChannel::command, Mutation::release)) {
        store_relaxed_system(&at.lap, lap_of(place, ring.capacity));
    } else {
        store_release_system(&at.lap, lap_of(place, ring.capacity));
    }
}

}  // namespace tracekern
