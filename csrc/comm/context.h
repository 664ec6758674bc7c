// What a warp carries through a kernel that waits for other ranks, and such a wait as one recorded span.
#pragma once

#include <type_traits>

#include "comm/signal.h"
#include "trace/recorder.h"

namespace tracekern {

template <class Rec, class Comm = CommArgs>
struct CommContext {
    Warp& warp;
    const Comm& comm;
    const uint32_t stage;  // the kernel, counted from CommArgs::first_stage; for fault records
    Rec recorder;
    const uint64_t epoch;  // of the call

    // own_epoch: a number, or what is called for it when the track has started, which waits for nothing that it is made
    // of.
    template <class Epoch>
    TK_DEVICE CommContext(Warp& own_warp,
                          const Comm& own_comm,
                          typename Rec::Args trace,
                          uint32_t own_stage,
                          uint32_t role,
                          Epoch own_epoch)
        : warp(own_warp),
          comm(own_comm),
          stage(own_stage),
          recorder(trace, own_warp, role),
          epoch(number_of(own_epoch)) {
        recorder.set_epoch(epoch_on_record(epoch));
    }

private:
    template <class Epoch>
    TK_DEVICE static uint64_t number_of(Epoch& own_epoch) {
        if constexpr (std::is_invocable_v<Epoch&>) {
            return own_epoch();
        } else {
            return own_epoch;
        }
    }
};

// Calls visit(peer) for this warp's share of the ranks, if all warps of one block call it.
template <class Context, class Visit>
TK_DEVICE void for_peers_of_warp(Context& context, Visit visit) {
    for (uint32_t i = context.warp.warp; i < context.comm.num_ranks; i += context.warp.num_warps) {
        visit(context.comm.nth_peer(i));
    }
}

// Raises a flag at `peer`, or at this rank itself, where no other device is to see it.
template <auto kChannel, class Context>
TK_DEVICE void signal_peer(Context& context, uint32_t peer, uint64_t* flag, uint32_t value) {
    const Scope scope = peer == context.comm.rank ? Scope::device : Scope::ranks;
    signal<kChannel>(context.warp, flag, context.epoch, value, scope);
}

// Runs wait(), which returns a WaitResult, as a span of kEvent with these begin fields. It ends with the result's value
// where the event has an end field, and stays open where the wait gave up. Not `wanted`: it is not recorded.
template <auto kEvent, class Context, class Wait, class... Fields>
TK_DEVICE WaitResult
record_wait_if([[maybe_unused]] bool wanted, Context& context, Wait wait, [[maybe_unused]] Fields... fields) {
    TK_WAIT_IF(context.recorder, wanted, kEvent, fields...);
    const WaitResult result = wait();
    if constexpr (has_end_fields<kEvent>) {
        TK_END_IF(result.ok, result.value);
    } else {
        TK_END_IF(result.ok);
    }
    return result;
}
template <auto kEvent, class Context, class Wait, class... Fields>
TK_DEVICE WaitResult record_wait(Context& context, Wait wait, Fields... fields) {
    return record_wait_if<kEvent>(true, context, wait, fields...);
}

// Meets all warps of the block, or of a group of them, as a span of kEvent. Not `wanted`: it is not recorded.
template <auto kEvent, class Context, class AnyWarp, class... Fields>
TK_DEVICE void traced_barrier_if([[maybe_unused]] bool wanted,
                                 Context& context,
                                 AnyWarp& warps,
                                 [[maybe_unused]] Fields... fields) {
    // Without a span that is not wanted: with few tokens most warps come here for nothing, and are to run little.
    if constexpr (detail::is_recorded<std::remove_reference_t<decltype(context.recorder)>, kEvent>) {
        if (!wanted) return static_cast<void>(context.recorder.block_sync(warps));
    }
    TK_WAIT(context.recorder, kEvent, fields...);
    TK_END_AFTER_BARRIER(warps);
}

// Whom a wait of these begin fields is for: the peer, which comes first, and its slot, which comes second; this rank
// itself where there are none.
template <class Context, class... Fields>
TK_DEVICE WaitFor wait_for(const Context& context, Fields... fields) {
    const uint32_t known[sizeof...(Fields) + 2] = {fields...};
    return {context.stage, sizeof...(Fields) == 0 ? context.comm.rank : known[0], known[1]};
}

// Waits until *flag carries the call's epoch. kEvent: of the kChannel; fields: its begin fields.
template <auto kChannel, auto kEvent, class Context, class... Fields>
TK_DEVICE WaitResult traced_wait(Context& context, const uint64_t* flag, Fields... fields) {
    const auto wait_now = [&] {
        return wait<kChannel>(context.warp, context.comm, flag, context.epoch, wait_for(context, fields...));
    };
    return record_wait<kEvent>(context, wait_now, fields...);
}

}  // namespace tracekern
