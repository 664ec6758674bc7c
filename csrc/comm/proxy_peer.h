// Ranks that a network reaches: a rank's proxy writes there what kernels ask for in a ring of commands.
#pragma once

#include <type_traits>

#include "comm/command.h"
#include "comm/context.h"
#include "comm/peer.h"

namespace tracekern {

// What kernels get where proxies reach the ranks of other hosts.
struct FarArgs : CommArgs {
    CommandRing* ring;
    // Memory of the host that this rank's proxy registered, laid out like the heap. Ranks of other hosts write here
    // what ranks of this host write there: bytes themselves, and words by the proxy.
    char* far_heap;

    TK_DEVICE bool is_mapped(uint32_t peer) const { return heap[peer] != nullptr; }
    // at_rank: this one or mapped.
    template <class T>
    TK_DEVICE T* written_by(uint32_t writer, uint32_t at_rank, uint64_t offset) const {
        if (is_mapped(writer)) return at<T>(at_rank, offset);
        return reinterpret_cast<T*>(far_heap + offset);
    }
    TK_DEVICE HeapControl* far_control() const { return reinterpret_cast<HeapControl*>(far_heap); }
};
template <class Comm>
constexpr bool kIsFar = std::is_base_of_v<FarArgs, Comm>;

// Where all ranks are mapped the compiler leaves out what a far rank needs.
template <class Context>
TK_DEVICE bool is_far(const Context& context, uint32_t rank) {
    if constexpr (kIsFar<std::remove_cvref_t<decltype(context.comm)>>) {
        return !context.comm.is_mapped(rank);
    } else {
        return false;
    }
}

// ---- commands of a warp ----

// Asks the proxy for a write. A wait for room is a span of kEvent with these fields; false: it gave up.
template <auto kEvent, class Context, class... Fields>
TK_DEVICE bool post(Context& context, const Command& command, Fields... fields) {
    Warp& warp = context.warp;
    const CommandRing& ring = *context.comm.ring;
    perturb(warp);
    const uint64_t place = warp.once([&] { return claim_place(ring); });
    const bool is_full = warp.once([&] { return uint32_t{!has_room(ring, place)}; }) != 0;
    const auto wait_now = [&] {
        const auto wait = [&] { return uint32_t{wait_for_room(warp, context.comm, ring, place, context.stage)}; };
        return WaitResult{!is_full || warp.once(wait) != 0, 0};
    };
    if (!record_wait_if<kEvent>(is_full, context, wait_now, fields...).ok) return false;
    // leader() orders what all lanes wrote before it.
    warp.leader([&] { fill_place(ring, place, command); });
    return true;
}

// Waits until all commands of a tag are completed that were counted in *num_posted by now: what they were written from
// may be filled anew. A span of kEvent with these fields if it has to wait; false: it gave up.
template <auto kEvent, class Context, class... Fields>
TK_DEVICE bool wait_sent(Context& context, uint32_t tag, const uint64_t* num_posted, Fields... fields) {
    Warp& warp = context.warp;
    const uint64_t* completed = &context.comm.ring->num_completed[tag];
    const uint64_t posted = warp.once([&] { return load_relaxed_system(num_posted); });
    const auto wanted = [&](uint64_t seen) {
        return seen >= posted || mutated(CommChannel::completed, Mutation::acknowledgement);
    };
    const auto wait_now = [&] {
        const WaitFor proxy{context.stage, context.comm.rank, tag};
        return wait_until<CommChannel::completed, Scope::ranks>(warp, context.comm, completed, 0, wanted, proxy);
    };
    const bool waits = warp.once([&] { return uint32_t{!wanted(load_relaxed_system(completed))}; }) != 0;
    return record_wait_if<kEvent>(waits, context, wait_now, fields...).ok;
}

// ---- words of a peer's HeapControl ----

struct ProxyWord {
    const FarArgs& comm;
    uint32_t rank;
    ControlWord which;

    // One lane's.
    TK_DEVICE void send(Warp& warp, const Command& command) const {
        const CommandRing& ring = *comm.ring;
        const uint64_t place = claim_place(ring);
        if (wait_for_room(warp, comm, ring, place, kRankBarrierStage)) fill_place(ring, place, command);
    }
};

class FarPeer {
public:
    TK_DEVICE FarPeer(const FarArgs& comm, uint32_t rank) : comm_(comm), rank_(rank) {}

    TK_DEVICE ProxyWord word(ControlWord which) const { return {comm_, rank_, which}; }

private:
    const FarArgs& comm_;
    const uint32_t rank_;
};

TK_DEVICE ProxyWord control_word(const FarPeer& peer, ControlWord which, uint64_t = 0) {
    return peer.word(which);
}

template <class Use>
TK_DEVICE void with_peer(const FarArgs& comm, uint32_t rank, Use use) {
    if (comm.is_mapped(rank)) {
        use(MappedPeer(comm, rank));
    } else {
        use(FarPeer(comm, rank));
    }
}

// The proxy tells them: it sees this rank's fault.
TK_DEVICE void tell_abort(const FarPeer&, uint64_t) {}

template <auto kChannel>
TK_DEVICE void signal(Warp& warp, const ProxyWord& flag, uint64_t epoch, uint32_t value) {
    perturb(warp);
    // leader() orders what all lanes wrote before it.
    warp.leader([&] { flag.send(warp, flag_command(flag.rank, flag.which, epoch, value)); });
}
TK_DEVICE void store_word(Warp& warp, const ProxyWord& at, uint64_t word) {
    at.send(warp, word_command(at.comm.rank, at.rank, at.which, word));
}

}  // namespace tracekern
