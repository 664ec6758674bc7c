// Barriers of our own, because they must be able to give up: all blocks of a grid, all ranks.
#pragma once

#include "comm/context.h"
#include "comm/counter.h"
#include "comm/signal.h"

namespace tracekern {

// All blocks of the grid arrive before any goes on. Every warp calls it; *count starts at 0 and is this grid's
// alone. What any warp wrote before is visible to all after. Returns false when it gave up. A rank may abort while the
// warps of a block are on their way out, so that their answers differ: either way they go on to their next block
// barrier.
TK_DEVICE bool grid_barrier(Warp& warp, const CommArgs& comm, uint64_t* count, uint32_t stage) {
    warp.block_sync();
    bool ok = true;
    if (warp.warp == 0) {
        const uint64_t ticket = take_ticket<CommChannel::grid>(warp, count);
        const uint64_t goal = (ticket / warp.num_blocks + 1) * warp.num_blocks;
        // A fault names as its slot how many blocks are missing, and has seen how many came.
        const auto blocks = [&](uint64_t arrived) {
            return WaitFor{stage, comm.rank, static_cast<uint32_t>(goal - arrived)};
        };
        ok = wait_for_count<CommChannel::grid>(warp, comm, count, goal, blocks);
    }
    warp.block_sync();
    if (!ok) return false;
    // Warps that did not wait learn of a failure from the abort word, which the fault set before it ended the wait.
    return !gives_up_with_others(warp, comm, channel_number(CommChannel::grid), WaitFor{stage, comm.rank, 0});
}

// The same as a span of kEvent, if it is to be on record.
template <auto kEvent, class Context>
TK_DEVICE bool traced_grid_barrier(Context& context, uint64_t* count, bool is_recorded = true) {
    const auto wait_now = [&] { return WaitResult{grid_barrier(context.warp, context.comm, count, context.stage), 0}; };
    return record_wait_if<kEvent>(is_recorded, context, wait_now).ok;
}

}  // namespace tracekern

#define TK_BARRIER_EVENTS(EVENT)                                             \
    EVENT(signal_barrier, signal, completion, "barrier data", "peer:10", "") \
    EVENT(wait_barrier, wait, completion, "barrier data", "peer:10", "")
TK_DEFINE_EVENTS(BarrierEvent, TK_BARRIER_EVENTS)

namespace tracekern {

// All ranks arrive before any goes on; one warp a rank, epoch one larger each time. Release and acquire at system
// scope. Two sets of flags in turns: a rank that is through may raise the next epoch's flag before a slow peer has seen
// this one's, but not the one after, for which it needs that peer. What was put to a peer over a network may
// come after the barrier: it has flags of its own.
template <class Context>
TK_DEVICE bool rank_barrier(Context& context) {
    const auto& comm = context.comm;
    for (uint32_t i = 0; i < comm.num_ranks; ++i) {
        const uint32_t peer = comm.nth_peer(i);
        TK_SIGNAL(context.recorder, BarrierEvent::signal_barrier, peer);
        with_peer(comm, peer, [&](const auto& to) {
            const auto flag = control_word(to, ControlWord::barrier, context.epoch);
            signal<CommChannel::barrier>(context.warp, flag, context.epoch, 0);
        });
    }
    bool ok = true;
    for (uint32_t i = 0; i < comm.num_ranks; ++i) {
        const uint32_t peer = comm.nth_peer(i);
        const uint64_t* flag = own_word(comm, ControlWord::barrier, peer, context.epoch);
        ok = traced_wait<CommChannel::barrier, BarrierEvent::wait_barrier>(context, flag, peer).ok && ok;
    }
    return ok;
}

}  // namespace tracekern
