// Warps that meet in pairs by a named barrier, then all of the grid, in each round. One of each comes when the others
// wait already: the odd warp of pair 0, the even one of pair 1; to the grid the last warp of the last block.
#include <tracekern.h>

#include <platform/cpu_executor.hpp>

#define MEET_EVENTS(EVENT)                                                            \
    EVENT(wait_pair, wait, completion, "pair group barrier", "barrier:4 warps:6", "") \
    EVENT(wait_grid, wait, completion, "", "", "")
TK_DEFINE_EVENTS(MeetEvent, MEET_EVENTS)

using namespace tracekern;

namespace {

constexpr uint32_t kBlocks = 2, kWarps = 4, kRounds = 3;

struct MeetShared {
    uint32_t arrivals[2];
    uint32_t here[2];  // of each pair
};
struct Grid {
    uint32_t here = 0, arrived = 0, early = 0;
};

void wait_until(Warp& warp, const uint32_t& count, uint32_t wanted) {
    for (uint32_t spins = 0; load_acquire_device(&count) < wanted;) warp.relax(spins);
}

// Counts this warp, which waits next: no other fiber runs in between. The one that is late counts last, a tick later.
void come(Warp& warp, uint32_t& here, uint32_t wanted, bool is_late) {
    if (is_late) {
        wait_until(warp, here, wanted - 1);
        for (const uint64_t now = read_clock(); read_clock() == now;) {
        }
    }
    ++here;
}

template <class Rec>
void meet(Warp& warp, Grid& grid, typename Rec::Args trace) {
    Rec recorder(trace, warp);
    auto& shared = warp.shared<MeetShared>();
    const uint32_t pair = warp.warp / 2, id = 1 + pair;
    for (uint32_t round = 1; round <= kRounds; ++round) {
        come(warp, shared.here[pair], 2 * round, warp.warp % 2 != pair);
        {
            TK_WAIT(recorder, MeetEvent::wait_pair, id, 2);
            if (round == 1) {
                TK_END_AFTER_BARRIER(WarpGroup{id, 2, warp, shared.arrivals});
            } else {
                TK_END_AFTER_GROUP_BARRIER(id, 2, warp, shared.arrivals);
            }
        }
        grid.early += shared.here[pair] < 2 * round;
        come(warp, grid.here, kBlocks * kWarps * round, warp.block == kBlocks - 1 && warp.warp == kWarps - 1);
        TK_WAIT(recorder, MeetEvent::wait_grid);
        TK_END_AFTER_GRID_BARRIER(warp, ++grid.arrived, wait_until(warp, grid.arrived, kBlocks * kWarps * round));
        grid.early += grid.here < kBlocks * kWarps * round;
    }
}

}  // namespace

// Returns how many warps went on too early.
extern "C" uint32_t run(uint64_t descriptor) {
    Grid grid;
    const CpuLaunch launch{.num_blocks = kBlocks, .warps_per_block = kWarps, .shared_bytes = sizeof(MeetShared)};
    with_recorder(descriptor, [&]<class Rec>(auto trace) {
        launch_cpu(launch, [&](Warp& warp) { meet<Rec>(warp, grid, trace); });
    });
    return grid.early;
}

extern "C" const char* describe() {
    static const std::string table = describe_events<MeetEvent>();
    return table.c_str();
}
