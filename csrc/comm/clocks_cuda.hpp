// Clock samples on GPUs: round trips between devices, and brackets of a device read by host reads.
#pragma once

#include <array>
#include <cstdio>

#include "comm/communicator_cuda.hpp"

namespace tracekern {

using Bracket = std::array<int64_t, 3>;  // CLOCK_REALTIME ns before, device ticks, CLOCK_REALTIME ns after

inline int64_t wall_clock_ns() {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// `count` reads of the device's clock through mapped host memory; one warp answers for at most `timeout_ns`.
inline std::vector<Bracket> read_brackets(uint32_t count, uint64_t timeout_ns) {
    MappedMemory words(2 * 64);
    uint64_t* request = words.as<uint64_t>();
    uint64_t* stamp = request + 8;
    launch_kernel(host_clock_kernel(), 1, 32, 0, 0, {&request, &stamp, &count, &timeout_ns});
    std::vector<Bracket> brackets;
    const int64_t deadline = wall_clock_ns() + static_cast<int64_t>(timeout_ns);
    for (uint64_t next = 1; next <= count; ++next) {
        const int64_t before = wall_clock_ns();
        __atomic_store_n(request, next, __ATOMIC_RELEASE);
        uint64_t seen = 0;
        const uint64_t old = brackets.empty() ? 0 : static_cast<uint64_t>(brackets.back()[1]);
        while ((seen = __atomic_load_n(stamp, __ATOMIC_ACQUIRE)) == old && wall_clock_ns() < deadline) {
        }
        const int64_t after = wall_clock_ns();
        if (seen == old) break;
        brackets.push_back({before, static_cast<int64_t>(seen), after});
    }
    synchronize_device();
    return brackets;
}

// This rank's side of the round trips with `peer`; empty on the side that answers.
inline std::vector<RoundTrip> ping_pong(const CudaCommunicator& comm,
                                        uint32_t peer,
                                        bool initiates,
                                        uint32_t epoch,
                                        uint32_t max_round_trips,
                                        uint64_t duration_ns) {
    MappedMemory round_trips(sizeof(RoundTrip) * max_round_trips + sizeof(uint64_t));
    auto* count = reinterpret_cast<uint32_t*>(round_trips.as<RoundTrip>() + max_round_trips);
    ClockPingPongArgs args{comm.args(), peer, epoch, max_round_trips, duration_ns, round_trips.as<RoundTrip>(), count};
    LaunchSize size{1, 1};
    launch_kernel(ping_pong_kernel(initiates), 1, 32, 0, 0, {&args, &size});
    synchronize_device();
    const auto* first = round_trips.as<RoundTrip>();
    return {first, first + (initiates ? *count : 0)};
}

}  // namespace tracekern
