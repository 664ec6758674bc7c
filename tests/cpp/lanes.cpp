// One warp waits for several flags, a lane each.
//
//   lanes all COUNT ABSENT      for all of them; ABSENT stays away, where it is below COUNT
//   lanes any COUNT PRESENT     for whichever comes; only PRESENT does, where it is below COUNT
//   lanes least COUNT PRESENT   for whichever comes with the value that its lane wants, or a larger one; the others
//                               have one less
//   lanes one VALUE WANTED      for a flag of this value to have at least another one
//
// A flag that stays away carries the epoch of 2^32 calls before, which 32 bits could not tell from the one that is
// waited for.
//
// A CPU warp calls every lane its leader. Here lane 0 alone is, as on a GPU: what a wait leaves to the leader does not
// happen where another lane's time runs out.
// Exit: 0 what was to come came, 1 something else is wrong, 3 a wait ran out of time, with the fault on stderr.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "platform/cpu_executor.hpp"
#include "platform/device.h"

namespace tracekern {

class LaneWarp : public Warp {
public:
    explicit LaneWarp(const Warp& warp) : Warp(warp) {}
    bool is_leader() const { return lane_ == 0; }
    template <class F>
    void strided(uint32_t n, F f) {
        for (uint32_t i = 0; i < n; ++i) {
            lane_ = i % kLanes;
            f(i);
        }
        lane_ = 0;
    }

private:
    uint32_t lane_ = 0;
};

}  // namespace tracekern

#define Warp LaneWarp
#include "comm/signal.h"
#undef Warp

using namespace tracekern;

namespace {

constexpr uint64_t kLongAgo = kFirstEpoch - (uint64_t{1} << 32);

bool wait_for_all(LaneWarp& lanes, const CommArgs& comm, const std::vector<uint64_t>& flags) {
    uint32_t sum = 0;
    const auto take = [&](uint32_t, uint32_t value) { sum += value; };
    const uint32_t count = static_cast<uint32_t>(flags.size());
    const bool ok = wait_all<CommChannel::grid>(lanes, comm, flags.data(), count, kFirstEpoch, {3, 1, 0}, take);
    return ok && sum == 7 * count;
}

bool wait_for_any(LaneWarp& lanes, const CommArgs& comm, const std::vector<uint64_t>& flags, uint32_t present) {
    const uint32_t lookers = static_cast<uint32_t>((uint64_t{1} << flags.size()) - 1);
    const auto flag_of = [&](int lane) { return &flags[static_cast<size_t>(lane)]; };
    const uint32_t came = wait_any<CommChannel::grid>(lanes, comm, lookers, flag_of, kFirstEpoch, {3, 1, 9});
    return came && came == 1u << present;
}

// What lane i wants is 10 + i.
bool wait_for_least(LaneWarp& lanes, const CommArgs& comm, const std::vector<uint64_t>& flags, uint32_t present) {
    const uint32_t lookers = static_cast<uint32_t>((uint64_t{1} << flags.size()) - 1);
    const auto flag_of = [&](int lane) { return &flags[static_cast<size_t>(lane)]; };
    const auto least_of = [](int lane) { return 10 + static_cast<uint32_t>(lane); };
    const Arrived came =
        wait_any_at_least<CommChannel::grid>(lanes, comm, lookers, flag_of, kFirstEpoch, least_of, {3, 1, 9});
    return came.lanes && came.lanes == 1u << present && came.value[static_cast<int>(present)] == 41;
}

std::vector<uint64_t> flags_of(const std::string& mode, uint32_t count, uint32_t chosen) {
    if (mode == "one") return {make_flag(kFirstEpoch, count)};
    std::vector<uint64_t> flags;
    for (uint32_t i = 0; i < count; ++i) {
        const bool comes = mode == "all" ? i != chosen : i == chosen;
        if (mode == "least") {
            flags.push_back(make_flag(kFirstEpoch, comes ? 41 : 9 + i));
        } else {
            flags.push_back(make_flag(comes ? kFirstEpoch : kLongAgo, 7));
        }
    }
    return flags;
}

bool run(const std::string& mode, LaneWarp& lanes, const CommArgs& comm, uint32_t count, uint32_t chosen) {
    const std::vector<uint64_t> flags = flags_of(mode, count, chosen);
    if (mode == "all") return wait_for_all(lanes, comm, flags);
    if (mode == "any") return wait_for_any(lanes, comm, flags, chosen);
    if (mode == "least") return wait_for_least(lanes, comm, flags, chosen);
    const WaitResult result =
        wait_at_least<CommChannel::grid>(lanes, comm, flags.data(), kFirstEpoch, chosen, {3, 1, 9});
    return result.ok && result.value == count;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    const auto count = static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10));
    const auto chosen = static_cast<uint32_t>(std::strtoul(argv[3], nullptr, 10));
    HeapControl control{};
    FaultRecord fault{};
    CommArgs comm{};
    comm.num_ranks = 1;
    comm.heap[0] = reinterpret_cast<char*>(&control);
    comm.fault = &fault;
    comm.timeout_ticks = 20'000'000;
    bool ok = false;
    launch_cpu(CpuLaunch{}, [&](Warp& warp) {
        LaneWarp lanes(warp);
        ok = run(argv[1], lanes, comm, count, chosen);
    });
    if (ok) return !fault.claimed && !control.abort ? 0 : 1;
    if (!control.abort) return 1;
    std::fprintf(stderr,
                 "cause=%u stage=%u slot=%u seen=%u value=%u\n",
                 fault.cause,
                 fault.stage,
                 fault.slot,
                 fault.seen_epoch,
                 fault.seen_value);
    return 3;
}
