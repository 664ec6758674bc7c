// The device clock of the CPU backend: the host's clock, plus an offset, plus a rate that wanders, in coarse ticks.
//
// It is drawn from (seed, rank) and a pure function of host time, so that a test can compute the truth for any tick of
// any rank afterwards while the capture itself knows nothing of it. The sizes follow 8 H200 of one host: 32 ns ticks,
// clocks -69 to +248 us apart, 3.9 us/s of drift between two of them, a rate that changed by 6 % within 20 s.
#pragma once

#include <cmath>
#include <cstdint>

#include "platform/host_clock.h"

namespace tracekern {

struct SimulatedClock {
    static constexpr uint64_t kTicksPerSecond = 1'000'000'000;
    static constexpr uint64_t kResolutionTicks = 32;
    static constexpr double kMaxOffsetNs = 250e3;
    static constexpr double kMaxRate = 4e-6;
    static constexpr double kWander = 0.06 * kMaxRate / 2;  // amplitude: 6 % from peak to peak
    // Of the core, within 10 %. Slow: where a host takes 80 ns to tell the time, both clocks are still read together
    // within kMaxAnchorCycles.
    static constexpr double kCyclesPerNs = 0.755;
    static constexpr double kWanderRadiansPerNs = 3.14159265358979 / 20e9;  // from one peak to the other in 20 s

    int64_t t0_ns = 0;  // host time at which the clock is exactly offset_ns off
    double offset_ns = 0;
    double rate = 0;
    double wander = 0;
    double wander_phase = 0;
    double cycles_per_ns = kCyclesPerNs;
    int64_t anchor_ns = 0;  // what it adds to host_now_ns()

    // Seed 0 is the host's clock itself, in ticks of 32 ns. All ranks of a run share seed and t0_ns.
    static SimulatedClock draw(uint64_t seed, int rank, int64_t t0_ns) {
        SimulatedClock clock;
        clock.t0_ns = t0_ns;
        if (seed == 0) return clock;
        uint64_t state = seed * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(rank) * 0xd1b54a32d192ed03u;
        clock.offset_ns = kMaxOffsetNs * uniform(state);
        clock.rate = (kMaxRate - kWander) * uniform(state);
        clock.wander = kWander;
        clock.wander_phase = 3.14159265358979 * uniform(state);
        clock.cycles_per_ns *= 1 + 0.1 * uniform(state);
        return clock;
    }

    // CLOCK_MONOTONIC: one clock for all processes of a host, and no step of the wall clock can turn it back.
    static int64_t host_now_ns() { return monotonic_ns(); }

    // The clock's value, before it is cut to ticks. Never falls as host_ns grows.
    int64_t device_ns(int64_t host_ns) const {
        return host_ns + static_cast<int64_t>(std::floor(correction_ns(host_ns)));
    }

    // The first host time at which device_ns() is at least `device`, to within 1 ns.
    int64_t host_ns(int64_t device) const {
        int64_t host = device - static_cast<int64_t>(offset_ns);
        // The correction moves by 4 ns a millisecond: each round leaves 4e-6 of the error before it.
        for (int round = 0; round < 4; ++round) host = device - static_cast<int64_t>(std::floor(correction_ns(host)));
        return host;
    }

    uint64_t ticks_at(int64_t host_ns) const {
        return static_cast<uint64_t>(device_ns(host_ns)) / kResolutionTicks * kResolutionTicks;
    }

    uint64_t read() const { return ticks_at(host_now_ns() + anchor_ns); }

    // The cycle counter of the core: another rate, another zero, and no coarse ticks.
    uint64_t read_cycles() const { return static_cast<uint64_t>(static_cast<double>(host_now_ns()) * cycles_per_ns); }

private:
    // offset + the integral of rate + wander * sin(phase + w t) since t0.
    double correction_ns(int64_t host_ns) const {
        if (wander == 0) return offset_ns;
        const double elapsed_ns = static_cast<double>(host_ns - t0_ns);
        const double swing = std::cos(wander_phase) - std::cos(wander_phase + kWanderRadiansPerNs * elapsed_ns);
        return offset_ns + rate * elapsed_ns + wander / kWanderRadiansPerNs * swing;
    }

    // Uniform in [-1, 1): splitmix64.
    static double uniform(uint64_t& state) {
        uint64_t bits = state += 0x9e3779b97f4a7c15u;
        bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
        bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
        bits ^= bits >> 31;
        return static_cast<double>(static_cast<int64_t>(bits)) * 0x1p-63;
    }
};

}  // namespace tracekern
