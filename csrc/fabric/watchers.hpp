// The one thread that watches words in host memory, which kernels and other threads write to.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "fabric/rule.hpp"
#include "fabric/user_thread.hpp"

namespace tracekern {

class ScalarWatchers : public std::enable_shared_from_this<ScalarWatchers> {
public:
    // Gets the value before and now, and returns whether to go on.
    using OnChange = std::function<bool(uint64_t, uint64_t)>;

    // Calls no more. False: a call has not returned within the limit; it goes on, as it does where it calls this. One
    // thread at a time.
    bool end(std::chrono::nanoseconds limit) {
        {
            const std::lock_guard lock(mutex_);
            is_ending_ = true;
            watched_.clear();
        }
        changed_.notify_all();
        return thread_.join(limit);
    }

    // Calls with each change that it sees; several at once are one. The word stays until it is removed. Any thread.
    uint64_t add(uint64_t* word, OnChange on_change) {
        const std::lock_guard lock(mutex_);
        if (is_ending_) throw std::runtime_error("the engine was stopped");
        if (num_added_ == 0) thread_.start([all = shared_from_this()] { all->run(); });
        const uint64_t number = ++num_added_;
        watched_[number] = {word, load(word), std::move(on_change)};
        changed_.notify_all();
        return number;
    }
    // Afterwards it is not called any more, except for the call that this is called in.
    void remove(uint64_t number) {
        std::unique_lock lock(mutex_);
        watched_.erase(number);
        changed_.wait(lock, [&] { return thread_.is_here() || called_ != number; });
    }
    bool is_here() const { return thread_.is_here(); }

private:
    struct Watch {
        uint64_t* word;
        uint64_t seen;
        OnChange on_change;
    };

    static uint64_t load(uint64_t* word) { return std::atomic_ref(*word).load(std::memory_order_acquire); }

    void run() {
        uint32_t idle_turns = 0;
        std::unique_lock lock(mutex_);
        while (!is_ending_) {
            if (watched_.empty()) changed_.wait(lock, [&] { return is_ending_ || !watched_.empty(); });
            idle_turns = call_for_changes(lock) ? 0 : idle_turns + 1;
            lock.unlock();
            rest(idle_turns);
            lock.lock();
        }
    }

    bool call_for_changes(std::unique_lock<rule::Mutex>& lock) {
        bool is_busy = false;
        for (auto next = watched_.begin(); next != watched_.end() && !is_ending_;) {
            const uint64_t number = next->first;
            Watch& watch = next->second;
            const uint64_t value = load(watch.word);
            if (value != watch.seen) {
                is_busy = true;
                call(number, std::exchange(watch.seen, value), value, watch.on_change, lock);
            }
            next = watched_.upper_bound(number);  // others may have been removed meanwhile
        }
        return is_busy;
    }

    // on_change: a copy, since it may be removed meanwhile.
    void call(uint64_t number, uint64_t old, uint64_t now, OnChange on_change, std::unique_lock<rule::Mutex>& lock) {
        called_ = number;
        lock.unlock();
        rule::before_users();
        const bool goes_on = on_change(old, now);
        on_change = {};  // without the lock: it may be the last of an engine that was stopped
        lock.lock();
        called_ = 0;
        if (!goes_on) watched_.erase(number);
        changed_.notify_all();
    }

    // A kernel's step takes about as long as this thread spins.
    static void rest(uint32_t idle_turns) {
        constexpr uint32_t kSpins = 2000;
        if (idle_turns < kSpins) return;
        if (idle_turns < 2 * kSpins) return std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }

    rule::Mutex mutex_;
    rule::Condition changed_;
    std::map<uint64_t, Watch> watched_;
    uint64_t num_added_ = 0, called_ = 0;
    bool is_ending_ = false;
    UserThread thread_;
};

}  // namespace tracekern
