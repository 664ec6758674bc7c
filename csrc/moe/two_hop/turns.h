// Warps of a block that take the items of a ring in turns, and one that comes behind the slowest of them: what it tells
// others waits for all that is under way, so those that copy are not held up by it.
#pragma once

#include "comm/signal.h"
#include "moe/two_hop/layout.h"

namespace tracekern {

constexpr uint32_t kMaxTeamWarps = 16;  // of a block

// A warp's place in a team. The last one coordinates, the others take items; one that has a team for itself does both.
struct TeamPlace {
    uint32_t index;
    uint32_t num_warps;

    TK_DEVICE uint32_t num_workers() const { return num_warps == 1 ? 1 : num_warps - 1; }
    TK_DEVICE bool is_worker() const { return index < num_workers(); }
    TK_DEVICE bool is_coordinator() const { return index + 1 == num_warps; }
};

// Warps of a block in teams.
struct Teams {
    uint32_t first;      // warp of the first team
    uint32_t num_warps;  // of a team

    // All warps of a block.
    TK_DEVICE static Teams of(const Warp& warp, uint32_t num_teams) { return {0, warp.num_warps / num_teams}; }
    TK_DEVICE uint32_t team_of(uint32_t warp) const { return (warp - first) / num_warps; }
    TK_DEVICE TeamPlace place_of(uint32_t warp) const { return {(warp - first) % num_warps, num_warps}; }
};

// In shared memory, a word a warp: of the items that are this warp's, all before this one are done.
using TurnFlags = uint64_t[kMaxTeamWarps];

// All warps of a block, before any takes its turn.
template <class Context>
TK_DEVICE void clear_turns(Context& context, TurnFlags& flags, const Teams& teams) {
    context.warp.block_strided(context.warp.num_warps,
                               [&](uint32_t i) { flags[i] = make_flag(context.epoch, teams.place_of(i).index); });
}

// Of warps that say in flags of the block which of their items is the next: the first item that some warp has not done.
// One is done, `passed`, whose warp the caller has waited for.
template <auto kChannel>
TK_DEVICE uint32_t least_in_turns(const uint64_t* flags, uint32_t count, uint32_t passed, uint32_t stride = 1) {
    uint32_t least = kMaxFlagValue;
    for (uint32_t i = 0; i < count; ++i) {
        const uint32_t next = flag_value(look_at<kChannel, Scope::block>(flags + i * stride));
        least = next < least ? next : least;
    }
    return least > passed ? least : passed + 1;
}

// A lane a ring: one more than the place of the last of the items [first, end) that has one there, `before` where none
// has. A few items at a time, whose loads are under way together.
template <class PlacesOf>
TK_DEVICE PerLane<uint32_t> behind_places(
    Warp& warp, PerLane<uint32_t> before, uint32_t first, uint32_t end, PlacesOf places_of) {
    constexpr uint32_t kTogether = 4;
    TK_NO_UNROLL
    for (; first < end; first += kTogether) {
        PerLane<int32_t> places[kTogether];
        TK_UNROLL
        for (uint32_t i = 0; i < kTogether; ++i) places[i] = places_of(first + i < end ? first + i : end - 1);
        TK_UNROLL
        for (uint32_t i = 0; i < kTogether; ++i) {
            before = warp.lanes([&](int lane) {
                return places[i][lane] < 0 ? before[lane] : 1u + static_cast<uint32_t>(places[i][lane]);
            });
        }
    }
    return before;
}

// One warp's place in the turns of its team. `ring`: what its waits name.
template <class Context, auto kChannel, auto kSignalEvent, auto kWaitEvent>
class Turns {
public:
    TK_DEVICE Turns(Context& context, TurnFlags& flags, const Teams& teams, uint32_t team, TwoHopRing ring)
        : context_(context),
          place_(teams.place_of(context.warp.warp)),
          flags_(flags + context.warp.warp - place_.index),
          team_(team),
          ring_(ring) {}

    TK_DEVICE const TeamPlace& place() const { return place_; }

    // Released: what this warp did with `item` and all of its own before.
    TK_DEVICE void done(uint32_t item) {
        const uint32_t next = item + place_.num_workers();
        TK_SIGNAL(context_.recorder, kSignalEvent, context_.channel(), team_, place_.index, next);
        signal_block<kChannel>(context_.warp, flags_ + place_.index, context_.epoch, next);
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
        const uint32_t index = passed % place_.num_workers();
        const auto wait_now = [&] {
            const RingWait whom = context_.ring_wait(ring_, context_.comm.rank, passed, passed);
            return wait_at_least<kChannel, Scope::block>(
                context_.warp, context_.comm, flags_ + index, context_.epoch, passed + 1, whom);
        };
        const bool ok = record_wait<kWaitEvent>(context_, wait_now, context_.channel(), team_, index, passed + 1).ok;
        return {ok, least_in_turns<kChannel>(flags_, place_.num_workers(), passed)};
    }

    Context& context_;
    const TeamPlace place_;
    uint64_t* const flags_;  // of the team
    const uint32_t team_;
    const TwoHopRing ring_;
};

// The same where the items are of several nodes, each in its order, and come in any. A lane a node.
using NodeTurnFlags = uint64_t[kMaxTeamWarps][kMaxTwoHopNodes];

template <class Context>
TK_DEVICE void clear_turns(Context& context, NodeTurnFlags& flags, const Teams& teams) {
    const uint32_t num_warps = context.warp.num_warps - teams.first;
    context.warp.block_strided(num_warps * kMaxTwoHopNodes, [&](uint32_t i) {
        const uint32_t warp = teams.first + i / kMaxTwoHopNodes;
        flags[warp][i % kMaxTwoHopNodes] = make_flag(context.epoch, teams.place_of(warp).index);
    });
}

template <class Context, auto kChannel, auto kSignalEvent, auto kWaitEvent>
class NodeTurns {
public:
    TK_DEVICE NodeTurns(Context& context, NodeTurnFlags& flags, const Teams& teams, uint32_t team, TwoHopRing ring)
        : context_(context),
          place_(teams.place_of(context.warp.warp)),
          flags_(flags + context.warp.warp - place_.index),
          team_(team),
          ring_(ring) {}

    TK_DEVICE const TeamPlace& place() const { return place_; }

    // Released: what this warp did with the node's `item` and all of its own before.
    TK_DEVICE void done(uint32_t node, uint32_t item) {
        const uint32_t next = item + place_.num_workers();
        TK_SIGNAL(context_.recorder, kSignalEvent, context_.channel(), team_, place_.index, node, next);
        signal_block<kChannel>(context_.warp, &flags_[place_.index][node], context_.epoch, next);
    }

    // The coordinator's: calls pass(node, end) until all items of all nodes are done; false: gave up.
    template <class Pass>
    TK_DEVICE bool follow(const PerLane<uint32_t>& count, Pass pass) {
        Warp& warp = context_.warp;
        auto passed = warp.lanes([](int) { return 0u; });
        while (warp.ballot([&](int lane) { return passed[lane] < count[lane]; })) {
            PerLane<uint32_t> end;
            const uint32_t risen = wait_done(passed, count, end);
            if (!risen) return false;
            for (uint32_t nodes = risen; nodes; nodes &= nodes - 1) {
                const uint32_t node = first_bit(nodes);
                pass(node, warp.shuffle(end, static_cast<int>(node)));
            }
            passed = end;
        }
        return true;
    }

private:
    // Waits until all warps have done more of some node; returns which. end: how far they have come. 0: gave up.
    TK_DEVICE uint32_t wait_done(const PerLane<uint32_t>& passed,
                                 const PerLane<uint32_t>& count,
                                 PerLane<uint32_t>& end) {
        Warp& warp = context_.warp;
        const uint32_t left = warp.ballot([&](int lane) { return passed[lane] < count[lane]; });
        const int first = static_cast<int>(first_bit(left));
        // Of each node the one whose item is the next.
        const auto flag_of = [&](int lane) { return &flags_[passed[lane] % place_.num_workers()][lane]; };
        const auto least_of = [&](int lane) { return passed[lane] + 1; };
        const RingWait whom =
            context_.ring_wait(ring_, context_.comm.rank, warp.shuffle(passed, first), warp.shuffle(passed, first));
        TK_WAIT(context_.recorder, kWaitEvent, context_.channel(), team_);
        const uint32_t risen = wait_any_at_least<kChannel, Scope::block>(
                                   warp, context_.comm, left, flag_of, context_.epoch, least_of, whom)
                                   .lanes;
        const int node = static_cast<int>(first_in_turn(risen, 0));
        TK_END_IF(risen != 0,
                  static_cast<uint32_t>(node),
                  warp.shuffle(passed, node) % place_.num_workers(),
                  warp.shuffle(passed, node) + 1);
        end = warp.lanes([&](int lane) {
            if (lane >= 32 || !(risen >> lane & 1)) return passed[lane];
            const uint32_t least =
                least_in_turns<kChannel>(&flags_[0][lane], place_.num_workers(), passed[lane], kMaxTwoHopNodes);
            return least < count[lane] ? least : count[lane];
        });
        return risen;
    }

    Context& context_;
    const TeamPlace place_;
    uint64_t (*const flags_)[kMaxTwoHopNodes];  // of the team
    const uint32_t team_;
    const TwoHopRing ring_;
};

}  // namespace tracekern
