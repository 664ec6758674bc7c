// Clock samples on GPUs: round trips between devices, and brackets of a device read by host reads.
#pragma once

#include <array>
#include <memory>

#include "comm/communicator_cuda.hpp"
#include "platform/host_clock.h"

namespace tracekern {

using Bracket = std::array<int64_t, 3>;  // CLOCK_MONOTONIC ns before, device ticks, CLOCK_MONOTONIC ns after

// A GPU's clock, read on a stream of its own: no other stream's kernels are waited for, and a graph that another thread
// captures meanwhile stays whole.
class GpuClock {
public:
    // Of the current device; so are all calls.
    GpuClock() : shared_(sizeof(Shared)) {}

    // `count` reads of the clock through mapped host memory, at least one; one warp answers for at most `timeout_ns`
    // from its first on.
    std::vector<Bracket> read_brackets(uint32_t count, uint64_t timeout_ns) {
        const BesideGraphCapture beside;
        wait();
        HostClockMailbox* mailbox = &shared_.as<Shared>()->mailbox;
        *mailbox = {};
        LaunchSize size{1, 1};
        launch_kernel(host_clock_kernel(), {1, kLanes, 0, stream_.handle()}, {&mailbox, &count, &timeout_ns, &size});
        std::vector<Bracket> brackets;
        int64_t deadline = monotonic_ns() + kStartTimeoutNs;
        for (uint64_t next = 1; next <= count; ++next) {
            const int64_t before = monotonic_ns();
            __atomic_store_n(&mailbox->request, next, __ATOMIC_RELEASE);
            const uint64_t old = brackets.empty() ? 0 : static_cast<uint64_t>(brackets.back()[1]);
            const uint64_t seen = next_stamp(*mailbox, old, deadline);
            const int64_t after = monotonic_ns();
            if (seen == old) break;
            if (next == 1) deadline = after + static_cast<int64_t>(timeout_ns);
            brackets.push_back({before, static_cast<int64_t>(seen), after});
        }
        wait();
        return brackets;
    }

    // This rank's side of the round trips with `peer`; empty on the side that answers.
    std::vector<RoundTrip> ping_pong(const CudaCommunicator& comm,
                                     uint32_t peer,
                                     bool initiates,
                                     uint32_t epoch,
                                     uint32_t max_round_trips,
                                     uint64_t duration_ns) {
        const BesideGraphCapture beside;
        wait();
        if (max_round_trips > room_) {
            round_trips_ = std::make_unique<MappedMemory>(sizeof(RoundTrip) * max_round_trips);
            room_ = max_round_trips;
        }
        auto* trips = round_trips_->as<RoundTrip>();
        uint32_t* count = &shared_.as<Shared>()->num_round_trips;
        *count = 0;
        ClockPingPongArgs<CommArgs> args{comm.args(), peer, epoch, max_round_trips, duration_ns, trips, count};
        LaunchSize size{1, 1};
        launch_kernel(ping_pong_kernel(initiates), {1, kLanes, 0, stream_.handle()}, {&args, &size});
        wait();
        return {trips, trips + (initiates ? *count : 0)};
    }

private:
    struct Shared {  // with the device
        HostClockMailbox mailbox;
        uint32_t num_round_trips;
    };

    // The stamp behind `old`; `old` itself if none comes until the deadline, or the kernel has ended. Throws if the
    // device is lost: a trap of any kernel ends this one, too, which then never answers.
    uint64_t next_stamp(const HostClockMailbox& mailbox, uint64_t old, int64_t deadline) const {
        uint64_t seen = 0;
        int64_t ask_at = monotonic_ns() + kAskEveryNs;
        while ((seen = __atomic_load_n(&mailbox.stamp, __ATOMIC_ACQUIRE)) == old) {
            const int64_t now = monotonic_ns();
            if (now >= deadline) break;
            if (now < ask_at) continue;
            if (stream_.is_idle_within(0)) return __atomic_load_n(&mailbox.stamp, __ATOMIC_ACQUIRE);
            ask_at = now + kAskEveryNs;
        }
        return seen;
    }

    // For the kernel before, which may have been given up. Its own time is limited; until it starts the GPU may be full
    // of others for good.
    void wait() const {
        if (!stream_.is_idle_within(kStartTimeoutNs)) {
            throw std::runtime_error("the clock was not read: for 30 s kernels left no room on the GPU");
        }
    }

    static constexpr int64_t kStartTimeoutNs = 30'000'000'000;
    static constexpr int64_t kAskEveryNs = 10'000'000;  // in vain: an answer takes microseconds

    const SideStream stream_;
    const MappedMemory shared_;
    std::unique_ptr<MappedMemory> round_trips_;
    uint32_t room_ = 0;
};

}  // namespace tracekern
