// Warps of a block that take the items of a ring in turns, and one that comes behind the slowest of them: what it tells
// others waits for all that is under way, so those that copy are not held up by it.
#pragma once

#include "comm/signal.h"
#include "moe/two_hop/layout.h"

namespace tracekern {

constexpr uint32_t kMaxTeamWarps = 16;  // of a block

// A block's warps in teams. The last of a team coordinates; one that has a team for itself does both.
struct Teams {
    uint32_t num_warps;  // of a team

    TK_DEVICE static Teams of(const Warp& warp, uint32_t num_teams) { return {warp.num_warps / num_teams}; }
    TK_DEVICE uint32_t team_of(uint32_t warp) const { return warp / num_warps; }
    TK_DEVICE uint32_t index_of(uint32_t warp) const { return warp % num_warps; }
    // Those that take items.
    TK_DEVICE uint32_t num_workers() const { return num_warps == 1 ? 1 : num_warps - 1; }
    TK_DEVICE bool is_coordinator(uint32_t warp) const { return index_of(warp) + 1 == num_warps; }
};

// In shared memory, a word a warp: of the items that are this warp's, all before this one are done.
using TurnFlags = uint64_t[kMaxTeamWarps];

// All warps of a block, before any takes its turn.
template <class Context>
TK_DEVICE void clear_turns(Context& context, TurnFlags& flags, const Teams& teams) {
    context.warp.block_strided(context.warp.num_warps,
                               [&](uint32_t i) { flags[i] = make_flag(context.epoch, teams.index_of(i)); });
}

// Of warps that say in flags of the block which of their items is the next: the first item that some warp has not done.
// One is done, `passed`, whose warp the caller has waited for.
template <auto kChannel>
TK_DEVICE uint32_t least_in_turns(const uint64_t* flags, uint32_t count, uint32_t passed) {
    uint32_t least = kMaxFlagValue;
    for (uint32_t i = 0; i < count; ++i) {
        const uint32_t next = flag_value(look_at<kChannel, Scope::block>(flags + i));
        least = next < least ? next : least;
    }
    return least > passed ? least : passed + 1;
}

// One warp's place in the turns of its team. `ring`: what its waits name.
template <class Context, auto kChannel, auto kSignalEvent, auto kWaitEvent>
class Turns {
public:
    TK_DEVICE Turns(Context& context, TurnFlags& flags, const Teams& teams, uint32_t team, TwoHopRing ring)
        : context_(context),
          flags_(flags + context.warp.warp - teams.index_of(context.warp.warp)),
          team_(team),
          ring_(ring),
          index_(teams.index_of(context.warp.warp)),
          num_workers_(teams.num_workers()) {}

    TK_DEVICE uint32_t index() const { return index_; }
    TK_DEVICE uint32_t num_workers() const { return num_workers_; }

    // Released: what this warp did with `item` and all of its own before.
    TK_DEVICE void done(uint32_t item) {
        const uint32_t next = item + num_workers_;
        TK_SIGNAL(context_.recorder, kSignalEvent, context_.channel(), team_, index_, next);
        signal_block<kChannel>(context_.warp, flags_ + index_, context_.epoch, next);
    }

    // The coordinator's: calls pass(first, end) for [0, count), part by part, as soon as they are done; false: gave up.
    template <class Pass>
    TK_DEVICE bool follow(uint32_t count, Pass pass) {
        for (uint32_t passed = 0; passed < count;) {
            const WaitResult slowest = wait_done(passed);
            if (!slowest.ok) return false;
            const uint32_t end = slowest.value < count ? slowest.value : count;
            pass(passed, end);
            passed = end;
        }
        return true;
    }

private:
    // Waits for the warp whose item is the next one; the value is how far all of them have come then.
    TK_DEVICE WaitResult wait_done(uint32_t passed) {
        const uint32_t index = passed % num_workers_;
        const auto wait_now = [&] {
            const RingWait whom = context_.ring_wait(ring_, context_.comm.rank, passed, passed);
            return wait_at_least<kChannel, Scope::block>(
                context_.warp, context_.comm, flags_ + index, context_.epoch, passed + 1, whom);
        };
        const bool ok = record_wait<kWaitEvent>(context_, wait_now, context_.channel(), team_, index, passed + 1).ok;
        return {ok, least_in_turns<kChannel>(flags_, num_workers_, passed)};
    }

    Context& context_;
    uint64_t* flags_;  // of the team
    const uint32_t team_;
    const TwoHopRing ring_;
    const uint32_t index_, num_workers_;
};

}  // namespace tracekern
