// What a wait does whose time is over: it leaves the fault record, and makes every wait of every rank give up.
#pragma once

#include "comm/flag.h"
#include "comm/heap.h"
#include "comm/peer.h"
#include "comm/perturb.h"

namespace tracekern {

// ---- a record in memory of the host that one lane of all fills: the first that has something to say ----

// Whether the caller is to fill the record; its `claimed` begins with 0. By reference: kernels load the pointer twice
// rather than keep a register for what hardly ever happens.
template <class Record>
TK_DEVICE bool claim_report(Record* const& record) {
    return !load_relaxed_system(&record->claimed) && claim_system(&record->claimed);
}

// Publishes a record that is whole: a reader that sees `value` in its last word sees the rest.
TK_DEVICE void publish_report(uint32_t* last, uint32_t value) {
    store_release_system(last, value);
}

// ---- what a wait leaves there ----

// Whom a wait is for; goes into the fault record.
struct WaitFor {
    uint32_t stage;  // the kernel, counted from CommArgs::first_stage
    uint32_t peer;
    uint32_t slot;
};

// The same for a wait for a position in a ring. A role may have several, with one peer or with many.
struct RingWait : WaitFor {
    uint32_t role = 0;
    uint32_t ring = 0;
    uint32_t head = 0, tail = 0;  // of the ring, as far as the warp knows them
    uint32_t least = 0;           // set by the wait
};

// What a wait that gives up has to say. For: WaitFor or RingWait.
template <class For>
struct GivenUp {
    FaultCause cause;
    uint32_t channel;
    For wait_for;
    uint64_t wanted_epoch;
    uint64_t seen;  // the flag
    uint64_t waited_ticks;
    uint32_t block, warp;
    uint32_t refusal = 0;  // as in FaultRecord
};

// Makes all waits at a peer give up. aborted_by as in HeapControl; it only tells who and why, so that relaxed is enough
// and a reader that misses it names itself.
TK_DEVICE void tell_abort(const MappedPeer& to, uint64_t aborted_by) {
    HeapControl& control = *to.at<HeapControl>(0);
    if (!load_relaxed_system(&control.aborted_by)) store_relaxed_system(&control.aborted_by, aborted_by);
    store_release_system(&control.abort, 1u);
}

TK_DEVICE void describe_ring(FaultRecord&, const WaitFor&) {}
TK_DEVICE void describe_ring(FaultRecord& fault, const RingWait& wait_for) {
    fault.wanted_value = wait_for.least;
    fault.role = wait_for.role + 1;
    fault.ring = wait_for.ring + 1;
    fault.head = wait_for.head;
    fault.tail = wait_for.tail;
}

// Who gave up first, as far as this rank knows; 0: nobody.
template <class Comm>
TK_DEVICE uint64_t look_at_aborted_by(const Comm& comm) {
    const uint64_t known = load_relaxed_system(&comm.control(comm.rank).aborted_by);
    const HeapControl* far = comm.far_control();
    return known || !far ? known : load_relaxed_system(&far->aborted_by);
}

// Writes the fault record if there is none yet, and makes every rank give up. Every lane that gives up calls it, since
// others of its warp may have seen what they waited for; `claimed` lets one lane write, which learns that it did. A
// function of its own: it would be a quarter of the code of a kernel that waits in many places.
//
// This rank's abort word is stored right after the claim. After it, because a warp that sees the word must not take the
// record from the one that knows the cause. Before all else, even if another warp holds the claim or aborted_by is set:
// the next look on this rank must not miss it, and the peer that set aborted_by may have ended before it stored abort.
template <class Comm, class For>
TK_DEVICE_CALL bool raise_fault(const Comm& comm, const GivenUp<For> given_up) {
    const bool claims = claim_report(comm.fault);
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
    describe_ring(fault, given_up.wait_for);
    const uint64_t known = look_at_aborted_by(comm);
    const uint64_t aborted_by = known ? known : uint64_t{given_up.refusal} << 32 | (comm.rank + 1);
    fault.aborted_by = static_cast<uint32_t>(aborted_by);
    fault.refusal = static_cast<uint32_t>(aborted_by >> 32);
    publish_report(&fault.cause, static_cast<uint32_t>(given_up.cause));
    for (uint32_t peer = 0; peer < comm.num_ranks; ++peer) {
        with_peer(comm, peer, [&](const auto& to) { tell_abort(to, aborted_by); });
    }
    return true;
}

// The same, and ends the device where the communicator asks for that.
template <class Comm, class For>
TK_DEVICE void leave_fault(const Warp& warp, const Comm& comm, const GivenUp<For>& given_up) {
    if (raise_fault(comm, given_up) && comm.on_timeout == OnTimeout::trap) warp.trap();
}

// Not 0: some rank gave up. For kernels that know of the communicator its own abort word alone.
TK_DEVICE uint32_t look_at_abort(const uint32_t* abort) {
    return load_relaxed_system(abort);
}

// In shared memory: in which piece of its work a warp of this block gave up. Relaxed: what orders the end of a piece
// orders this word, too.
struct BlockGaveUp {
    uint64_t piece;

    TK_DEVICE void begin() { piece = ~uint64_t{0}; }
    TK_DEVICE void tell(uint32_t own) { store_relaxed_block(&piece, uint64_t{own}); }
    TK_DEVICE bool is_told(uint32_t own) const { return load_relaxed_block(&piece) == own; }
};

// Whether some rank gave up, as this lane sees it.
template <class Comm>
TK_DEVICE bool lane_sees_abort(const Comm& comm) {
    if (aborts_at_this_look()) store_relaxed_system(&comm.control(comm.rank).abort, 1u);
    if (look_at_abort(&comm.control(comm.rank).abort)) return true;
    const HeapControl* far = comm.far_control();
    return far && look_at_abort(&far->abort);
}

// The same, seen by one lane for its whole warp: lanes that looked for themselves could part ways. So could the warps
// of a block: whether one comes to a barrier of its block or its grid must never depend on a look of its own. Either
// all of them come, whatever each saw, or one looks for all and tells them through memory of the block, behind a block
// barrier.
//
// A kernel asks before it passes on what one before it was to receive: that may never have come, and its signal would
// make it look like a right result.
template <class Comm>
TK_DEVICE bool has_aborted(Warp& warp, const Comm& comm) {
    return warp.once([&] { return uint32_t{lane_sees_abort(comm)}; }) != 0;
}

// The same, for a kernel that then leaves out what follows, perhaps without having waited in vain for anything. Leaves
// a fault: without one the host would take what is there for a result.
template <class Comm, class For>
TK_DEVICE bool gives_up_with_others(Warp& warp, const Comm& comm, uint32_t channel, const For& whom) {
    if (!has_aborted(warp, comm)) return false;
    leave_fault(warp, comm, GivenUp<For>{FaultCause::peer_aborted, channel, whom, 0, 0, 0, warp.block, warp.warp});
    return true;
}

// Makes all ranks give up a call that the kernel cannot make, and raise why. reason: from 1 on, in the order of the
// texts that Communicator.add_kernels() is given. number: of 24 bits, for the text.
template <class Comm, class For>
TK_DEVICE void refuse_call(
    const Warp& warp, const Comm& comm, uint32_t channel, const For& whom, uint32_t reason, uint32_t number) {
    const uint32_t refusal = reason << kFlagValueBits | (number & kMaxFlagValue);
    leave_fault(
        warp, comm, GivenUp<For>{FaultCause::peer_aborted, channel, whom, 0, 0, 0, warp.block, warp.warp, refusal});
}

// Called in the turns of a spin: has the time run out, or did a rank give up? Looks every 16th turn. A wait whose time
// is over has 16 turns more: it may have been stopped itself, by a debugger say, while what it waits for came. One for
// this rank itself has an eighth more time: what it waits for may wait for another rank, and that one is to be named.
// started: the caller's, 0 at first; its lowest bit marks those turns.
template <class Comm, class For>
TK_DEVICE bool should_give_up(const Warp& warp,
                              const Comm& comm,
                              uint32_t channel,
                              const For& wait_for,
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
    const GivenUp<For> given_up{cause, channel, wait_for, wanted_epoch, seen, now - started, warp.block, warp.warp};
    leave_fault(warp, comm, given_up);
    return true;
}

}  // namespace tracekern
