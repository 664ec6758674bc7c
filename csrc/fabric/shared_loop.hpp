// The loop of an engine. Its worker does the turns or, while it waits, a thread that needs what a turn may bring: that
// spares a short message two changes of threads.
#pragma once

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "fabric/rule.hpp"

namespace tracekern {

class SharedLoop {
public:
    using Clock = std::chrono::steady_clock;

    SharedLoop() : wakes_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
        if (wakes_ < 0) throw std::runtime_error("no file descriptor is left for an engine; raise ulimit -n");
    }
    SharedLoop(const SharedLoop&) = delete;
    ~SharedLoop() { close(wakes_); }

    // ---- any thread ----

    enum class Sleep { awake, resting, asleep };  // resting: another thread does the turns, or did a moment ago

    // Wakes the worker if it sleeps at least so deeply; after something was put where a turn takes it.
    void wake(Sleep least = Sleep::resting) {
        // Sequentially consistent here and where the worker goes to sleep: of what was put before this load, and of its
        // store to sleep_, one comes first. Either this sees a sleeper, or the worker sees what was put.
        if (sleep_.load(std::memory_order_seq_cst) < least) return;
        if (sleep_.exchange(Sleep::awake, std::memory_order_relaxed) == Sleep::awake) return;  // by another thread
        constexpr uint64_t kOne = 1;
        [[maybe_unused]] const auto written = write(wakes_, &kOne, sizeof(kOne));  // fails where it is set already
    }

    // Does something between two turns; false: one is under way, or none will be any more.
    template <class What>
    bool try_between(What&& what) {
        const std::unique_lock lock(turn_mutex_, std::try_to_lock);
        if (!lock || !turn_) return false;
        what();
        return true;
    }

    // Does the worker's turns for a while, until is_reached() or the time limit; returns which. The worker has its core
    // back afterwards.
    template <class IsReached>
    bool wait(IsReached is_reached, std::chrono::nanoseconds limit) {
        if (is_reached()) return true;
        std::optional<Clock::time_point> until;  // what comes at once is not worth a look at the clock
        bool has_reached = false;
        const auto do_some = [&] {
            is_driven_.store(true, std::memory_order_relaxed);
            for (uint32_t i = 0; i < kTurnsInARow && !has_reached; ++i) {
                turn_(false);
                has_reached = is_reached();
            }
        };
        while (true) {
            if (!try_between(do_some)) {
                is_driven_.store(true, std::memory_order_relaxed);
                sched_yield();
                has_reached = is_reached();
            }
            if (has_reached) return true;
            const auto now = Clock::now();
            if (!until) until = now + std::min<std::chrono::nanoseconds>(limit, kDrivesFor);
            if (now >= *until) break;
        }
        is_driven_.store(false, std::memory_order_relaxed);
        wake();
        return false;
    }

    // ---- the worker ----

    // Does turns until is_over(). turn(has_slept) says whether it found something to do; may_sleep(), between two
    // turns, whether the descriptors tell all that can happen next; has_requests(), at any time, whether something was
    // put.
    template <class IsOver, class MaySleep, class HasRequests>
    void work(std::function<bool(bool)> turn,
              IsOver is_over,
              MaySleep may_sleep,
              HasRequests has_requests,
              const std::vector<int>& descriptors) {
        set_turn(std::move(turn));
        std::chrono::microseconds rest_for = kLeastRest;
        bool has_slept = false;
        for (uint32_t idle_turns = 0;;) {
            bool is_busy = false;
            {
                const std::lock_guard lock(turn_mutex_);
                is_busy = turn_(std::exchange(has_slept, false));
                if (is_over()) break;
            }
            idle_turns = is_busy ? 0 : idle_turns + 1;
            if (is_driven_.exchange(false, std::memory_order_relaxed)) {
                sleep(Sleep::resting, rest_for, {}, has_requests);
                has_slept = true;
                rest_for = std::min(2 * rest_for, kMostRest);
                continue;
            }
            rest_for = kLeastRest;
            if (idle_turns > 2 * kSpins) {
                nap(idle_turns - 2 * kSpins, may_sleep, has_requests, descriptors);
                has_slept = true;
            } else if (idle_turns > kSpins) {
                sched_yield();
            }
        }
        set_turn({});
    }

private:
    static constexpr auto kDrivesFor = std::chrono::microseconds(500);
    static constexpr uint32_t kTurnsInARow = 16;
    static constexpr uint32_t kSpins = 2000;
    // While another thread does the turns: each look takes the core from it. What comes after its last one waits as
    // long.
    static constexpr auto kLeastRest = std::chrono::microseconds(100), kMostRest = std::chrono::microseconds(1000);
    // Where nothing tells that something has come; the longer nothing has, the longer, up to kMostRest.
    static constexpr auto kNap = std::chrono::microseconds(50);
    static constexpr uint32_t kNapsUntilLonger = 64;
    static constexpr auto kSleep = std::chrono::milliseconds(10);

    void set_turn(std::function<bool(bool)> turn) {
        const std::lock_guard lock(turn_mutex_);
        turn_ = std::move(turn);
    }

    template <class MaySleep, class HasRequests>
    void nap(uint32_t naps, MaySleep may_sleep, HasRequests has_requests, const std::vector<int>& descriptors) {
        if (descriptors.empty()) {
            const auto longer = kNap * (1 + naps / kNapsUntilLonger);
            return sleep(Sleep::asleep, std::min<std::chrono::microseconds>(longer, kMostRest), {}, has_requests);
        }
        {
            const std::lock_guard lock(turn_mutex_);
            if (!may_sleep()) return;
        }
        sleep(Sleep::asleep, kSleep, descriptors, has_requests);
    }

    // Until a descriptor or wake() says so, at most so long.
    template <class HasRequests>
    void sleep(Sleep how,
               std::chrono::nanoseconds limit,
               const std::vector<int>& descriptors,
               HasRequests has_requests) {
        sleep_.store(how, std::memory_order_seq_cst);  // see wake()
        if (has_requests()) return sleep_.store(Sleep::awake, std::memory_order_relaxed);
        polled_.assign(1, {wakes_, POLLIN, 0});
        for (const int descriptor : descriptors) polled_.push_back({descriptor, POLLIN, 0});
        const timespec time{0, limit.count()};
        ppoll(polled_.data(), polled_.size(), &time, nullptr);
        sleep_.store(Sleep::awake, std::memory_order_relaxed);
        uint64_t count = 0;
        if (polled_[0].revents) [[maybe_unused]]
            const auto taken = read(wakes_, &count, sizeof(count));
    }

    const int wakes_;
    rule::Mutex turn_mutex_;
    std::function<bool(bool)> turn_;  // none: the worker has ended, or has not begun
    std::atomic<Sleep> sleep_ = Sleep::awake;
    // By another thread, since the worker last looked. Relaxed: it only says to the worker that it may rest. What turns
    // do is ordered by turn_mutex_.
    std::atomic<bool> is_driven_ = false;
    std::vector<pollfd> polled_;  // the worker's
};

}  // namespace tracekern
