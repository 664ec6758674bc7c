// One warp waits for several flags, a lane each, and one of them never comes.
//
//   lanes COUNT ABSENT      the flag that stays away; none where ABSENT is not below COUNT
//
// A CPU warp calls every lane its leader. Here lane 0 alone is, as on a GPU: what a wait leaves to the leader does not
// happen where another lane's time runs out.
// Exit: 0 all came, 1 something else is wrong, 3 a wait ran out of time, with the fault on stderr.
#include <cstdlib>

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

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    const auto count = static_cast<uint32_t>(std::strtoul(argv[1], nullptr, 10));
    const auto absent = static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10));
    std::vector<uint64_t> flags(count, make_flag(kFirstEpoch, 7));
    if (absent < count) flags[absent] = make_flag(kNeverEpoch, 0);
    HeapControl control{};
    FaultRecord fault{};
    CommArgs comm{};
    comm.num_ranks = 1;
    comm.heap[0] = reinterpret_cast<char*>(&control);
    comm.fault = &fault;
    comm.timeout_ticks = 20'000'000;
    bool ok = false;
    uint32_t sum = 0;
    launch_cpu(CpuLaunch{}, [&](Warp& warp) {
        LaneWarp lanes(warp);
        const auto take = [&](uint32_t, uint32_t value) { sum += value; };
        ok = wait_all<CommChannel::grid>(lanes, comm, flags.data(), count, kFirstEpoch, {3, 0, 0}, take);
    });
    if (ok) return sum == 7 * count && !fault.claimed && !control.abort ? 0 : 1;
    if (!control.abort) return 1;
    std::fprintf(stderr, "cause=%u stage=%u slot=%u seen=%u\n", fault.cause, fault.stage, fault.slot, fault.seen_epoch);
    return 3;
}
