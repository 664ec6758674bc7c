// What a proxy does with the words that it shares with its rank's kernels; comm/command.h and comm/signal.h have what
// those do. For the host.
#pragma once

#include <functional>

#include "comm/command.h"
#include "comm/heap.h"

namespace tracekern {

// Stores what an immediate of a peer tells. False: the peer does not keep to the protocol.
using Inbox = std::function<bool(uint32_t source, const Immediate&)>;

// Notes that a write of this rank to a peer is complete: what it was written from is no longer read.
using Completed = std::function<void(uint32_t peer, const Immediate&)>;

// The epoch that an immediate is of, which becomes the source's latest if it is ahead; kNeverEpoch: it cannot be.
inline uint64_t take_epoch(uint64_t& latest, const Immediate& imm) {
    if (mutated(CommChannel::command, Mutation::epoch) && latest != kNeverEpoch) return latest;
    const uint64_t epoch = nearest_epoch(latest, imm.epoch);
    if (epoch != kNeverEpoch && is_ahead(make_flag(epoch, 0), make_flag(latest, 0))) latest = epoch;
    return epoch;
}
// Whether a write takes of the room at a peer, which its credits give back.
inline bool takes_room() {
    return !mutated(CommChannel::command, Mutation::value);
}
// Whether so many writes have come as were told.
template <auto kChannel>
bool have_come(uint32_t num_writes, uint32_t num_due) {
    return num_writes >= num_due || mutated(kChannel, Mutation::value);
}

// Whether the command of this place is there, and copies it. The acquired lap orders the command, and the bytes that it
// names, before; the released number lets its place be filled anew.
inline bool take_command(const CommandRing& ring, uint64_t place, Command& command) {
    const Command& at = ring.commands[place % ring.capacity];
    const bool acquires = !mutated(CommChannel::command, Mutation::acquire);
    const uint32_t lap = acquires ? load_acquire_system(&at.lap) : load_relaxed_system(&at.lap);
    if (lap != lap_of(place, ring.capacity)) return false;
    command = {lap, at.imm, at.bytes, at.peer, at.tag, at.carries_value, at.src, at.dst};
    store_release_system(ring.num_taken, place + 1);
    return true;
}

// One more command of a tag is completed. Released: what it was written from was read.
inline void count_completed(const CommandRing& ring, uint32_t tag) {
    store_release_system(&ring.num_completed[tag], ring.num_completed[tag] + 1);
}

// What a peer tells of something that only grows, in whatever order it comes.
template <auto kChannel>
uint32_t keep_largest(uint32_t had, uint32_t came) {
    return came > had || mutated(kChannel, Mutation::maximum) ? came : had;
}

// Raises a flag that is not ahead already. Released: who waits for it reads what came before.
template <auto kChannel>
void raise_flag(uint64_t* flag, uint64_t value) {
    if (!is_ahead(value, load_relaxed_system(flag)) && !mutated(kChannel, Mutation::maximum)) return;
    if (mutated(kChannel, Mutation::release)) {
        store_relaxed_system(flag, value);
    } else {
        store_release_system(flag, value);
    }
}

// A word that is no flag.
inline void pass_on_word(uint64_t* at, uint64_t word) {
    store_release_system(at, word);
}

// Makes all waits of this rank give up; the first to say so is named. aborted_by as in HeapControl.
inline void abort_rank(HeapControl& control, uint64_t aborted_by) {
    if (!load_relaxed_system(&control.aborted_by)) store_relaxed_system(&control.aborted_by, aborted_by);
    store_release_system(&control.abort, 1u);
}

// Whether a kernel of this rank gave up; its record is whole then.
inline bool has_fault(const FaultRecord& fault) {
    return load_acquire_system(&fault.cause) != 0;
}

}  // namespace tracekern
