// Threads that run what is a user's: it may take its time, never return, or let go of the engine that the thread is of.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "fabric/rule.hpp"

namespace tracekern {

// One thread, which its owner ends. Another thread that waits for it waits no longer than it says; the thread itself
// does not wait, and goes on.
class UserThread {
public:
    // run: keeps all that it uses, also when the owner is gone, and returns once it is told to.
    template <class Run>
    void start(Run run) {
        thread_ = std::thread([state = state_, run = std::move(run), running = Running()]() mutable {
            state->id.store(std::this_thread::get_id(), std::memory_order_relaxed);
            run();
            // Later threads may have the same.
            state->id.store({}, std::memory_order_relaxed);
            {
                const std::lock_guard lock(state->mutex);
                state->has_ended = true;
            }
            state->ended.notify_all();
        });
    }
    UserThread() = default;
    UserThread(const UserThread&) = delete;
    ~UserThread() {
        if (thread_.joinable()) thread_.detach();
    }

    // After run() was told to return. False: it has not within the limit. One thread at a time.
    bool join(std::chrono::nanoseconds limit) {
        if (!thread_.joinable() || is_here()) return true;
        std::unique_lock lock(state_->mutex);
        if (!state_->ended.wait_for(lock, limit, [&] { return state_->has_ended; })) return false;
        lock.unlock();
        thread_.join();
        return true;
    }
    bool is_here() const { return state_->id.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

    // Whether none of this process is left, of whatever engine; waits for it for so long.
    static bool have_all_ended(std::chrono::nanoseconds limit) {
        const auto until = std::chrono::steady_clock::now() + limit;
        while (num_running.load(std::memory_order_acquire) != 0) {
            if (std::chrono::steady_clock::now() > until) return false;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        return true;
    }

private:
    struct State {
        std::atomic<std::thread::id> id;
        rule::Mutex mutex;
        rule::Condition ended;
        bool has_ended = false;
    };

    // Counts a thread, from before its start.
    class Running {
    public:
        Running() {
            static const int is_reset = pthread_atfork(nullptr, nullptr, [] { num_running = 0; });  // a child has none
            (void)is_reset;
            num_running.fetch_add(1, std::memory_order_relaxed);
        }
        Running(Running&& other) noexcept : is_counted_(std::exchange(other.is_counted_, false)) {}
        ~Running() {
            if (is_counted_) num_running.fetch_sub(1, std::memory_order_release);
        }

    private:
        bool is_counted_ = true;
    };

    inline static std::atomic<uint32_t> num_running = 0;
    const std::shared_ptr<State> state_ = std::make_shared<State>();
    std::thread thread_;
};

}  // namespace tracekern
