// Runs a warp-granular kernel on the CPU with forward progress for every warp, so that kernels may spin on each other.
//
//   fibers   all warps of a rank share one thread; a wait switches to the next warp. The default.
//   threads  a thread a warp, for the race detector.
//
// A trap stops all warps of a launch at once. Fibers are left on their stacks and launch_cpu() throws
// DeviceTrapped; threads cannot be stopped one by one, so the process ends.
//
// A thread whose warps all wait for other ranks gives its core away, so any number of ranks runs on any number of
// cores.
#pragma once

#include <sched.h>
#include <time.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "platform/device.h"
#include "platform/fiber.hpp"

namespace tracekern {

struct DeviceTrapped : std::runtime_error {
    DeviceTrapped() : std::runtime_error("a kernel trapped") {}
};

enum class CpuExecutor { fibers, threads };

struct CpuLaunch {
    uint32_t num_blocks = 1;
    uint32_t warps_per_block = 1;
    size_t shared_bytes = 0;
    CpuExecutor executor = CpuExecutor::fibers;
    const SimulatedClock* clock = &kHostClock;
    SlowLink* link = nullptr;  // over which warps store to other nodes; nullptr: these are as near as the own one
    // Called by the launching thread every 0.1 s or so while warps wait; must not throw. It can make them give up.
    std::function<void()> while_waiting = nullptr;
};

// A kernel as the executor sees it; a template parameter would compile threads and fibers again for each.
using CpuKernel = std::function<void(Warp&)>;

// Pauses, then yields the core, then sleeps: a spin that lasts waits for a thread that needs the core.
inline void relax_thread(uint32_t& spins) {
    ++spins;
    if (spins < 64) {
        fiber_pause();
    } else if (spins < 512) {
        sched_yield();
    } else {
        const timespec interval{0, 20'000};
        nanosleep(&interval, nullptr);
    }
}

// Points this thread's warps at a clock; puts the old one back at the end of the scope.
class ClockScope {
public:
    explicit ClockScope(const SimulatedClock* clock) : old_(current_clock) { current_clock = clock; }
    ~ClockScope() { current_clock = old_; }
    ClockScope(const ClockScope&) = delete;

private:
    const SimulatedClock* old_;
};

namespace detail {

// Begins with 0. Not a byte more than a kernel asked for, so that sanitizers see what is beyond.
class SharedMemory {
public:
    explicit SharedMemory(size_t bytes) : memory_(::operator new(bytes, kAlignment)) {
        std::memset(memory_.get(), 0, bytes);
    }
    void* get() const { return memory_.get(); }

private:
    static constexpr std::align_val_t kAlignment{1024};  // what copy_box() wants, the most of all
    struct Delete {
        void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
    };
    std::unique_ptr<void, Delete> memory_;
};

class ThreadBlock final : public BlockContext {
public:
    ThreadBlock(uint32_t num_warps, size_t shared_bytes) : memory_(shared_bytes), barrier_(num_warps) {
        shared = memory_.get();
    }
    void sync() override { barrier_.arrive_and_wait(); }
    void relax(uint32_t& spins) override { relax_thread(spins); }
    void trap() override { std::abort(); }

private:
    SharedMemory memory_;
    std::barrier<> barrier_;
};

class FiberBlock final : public BlockContext {
public:
    FiberBlock(FiberScheduler& scheduler, uint32_t num_warps, size_t shared_bytes)
        : memory_(shared_bytes), scheduler_(scheduler), num_warps_(num_warps) {
        shared = memory_.get();
    }
    void sync() override {
        const uint32_t generation = generation_;
        scheduler_.note_progress();
        if (++arrived_ == num_warps_) {
            arrived_ = 0;
            ++generation_;
        }
        while (generation == generation_) scheduler_.yield();
        scheduler_.note_progress();
    }
    void relax(uint32_t& spins) override {
        if (spins++ == 0) scheduler_.note_progress();  // it got as far as a new wait
        scheduler_.yield();
    }
    void trap() override { scheduler_.stop(); }

private:
    SharedMemory memory_;
    FiberScheduler& scheduler_;
    const uint32_t num_warps_;
    uint32_t arrived_ = 0;
    uint32_t generation_ = 0;
};

// Threads of a launch begin together, or none does: a barrier would wait for one that could not be started.
class StartGate {
public:
    enum class State { closed, open, cancelled };
    // Once, with open or cancelled.
    void set(State state) {
        state_.store(state);
        state_.notify_all();
    }
    bool opens() {
        state_.wait(State::closed);
        return state_.load() == State::open;
    }

private:
    std::atomic<State> state_ = State::closed;
};

inline void launch_threads(const CpuLaunch& launch, const CpuKernel& kernel) {
    std::vector<std::unique_ptr<ThreadBlock>> blocks;
    StartGate gate;
    std::atomic<uint32_t> left = launch.num_blocks * launch.warps_per_block;
    uint32_t turns = 0;
    std::vector<std::jthread> threads;
    const auto start_threads = [&](uint32_t block) {
        blocks.push_back(std::make_unique<ThreadBlock>(launch.warps_per_block, launch.shared_bytes));
        for (uint32_t warp = 0; warp < launch.warps_per_block; ++warp) {
            threads.emplace_back([&launch, &kernel, &gate, &left, block, warp, context = blocks.back().get()] {
                if (!gate.opens()) return;
                ClockScope clock(launch.clock);
                LinkScope link(launch.link);
                Warp self(*context, block, launch.num_blocks, warp, launch.warps_per_block);
                kernel(self);
                --left;
            });
        }
    };
    try {
        for (uint32_t block = 0; block < launch.num_blocks; ++block) start_threads(block);
    } catch (...) {
        gate.set(StartGate::State::cancelled);
        throw;
    }
    gate.set(StartGate::State::open);
    while (launch.while_waiting && left.load() != 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (++turns % 100 == 0) launch.while_waiting();
    }
}

inline void launch_fibers(const CpuLaunch& launch, const CpuKernel& kernel) {
    ClockScope clock(launch.clock);
    LinkScope link(launch.link);
    FiberScheduler scheduler;
    std::vector<std::unique_ptr<FiberBlock>> blocks;
    for (uint32_t block = 0; block < launch.num_blocks; ++block) {
        blocks.push_back(std::make_unique<FiberBlock>(scheduler, launch.warps_per_block, launch.shared_bytes));
        for (uint32_t warp = 0; warp < launch.warps_per_block; ++warp) {
            scheduler.spawn([&launch, &kernel, block, warp, context = blocks.back().get()] {
                Warp self(*context, block, launch.num_blocks, warp, launch.warps_per_block);
                kernel(self);
            });
        }
    }
    const auto relax = [&launch](uint32_t& spins) {
        relax_thread(spins);
        if (spins % 2048 == 0 && launch.while_waiting) launch.while_waiting();
    };
    if (!scheduler.run(relax)) throw DeviceTrapped();
}

}  // namespace detail

// Runs kernel(warp) for every warp of the grid; returns when all are through.
inline void launch_cpu(const CpuLaunch& launch, const CpuKernel& kernel) {
    if (launch.executor == CpuExecutor::threads) {
        detail::launch_threads(launch, kernel);
    } else {
        detail::launch_fibers(launch, kernel);
    }
}

}  // namespace tracekern
