// The one thread that watches words in host memory, which kernels and other threads write to.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

namespace tracekern {

class ScalarWatchers {
public:
    // Gets the value before and now, and returns whether to go on.
    using OnChange = std::function<bool(uint64_t, uint64_t)>;

    ScalarWatchers() = default;
    ScalarWatchers(const ScalarWatchers&) = delete;
    ~ScalarWatchers() { end(); }

    // Calls no more. One thread.
    void end() {
        {
            const std::lock_guard lock(mutex_);
            is_ending_ = true;
        }
        changed_.notify_all();
        if (thread_.joinable()) thread_.join();
        std::unique_lock lock(mutex_);
        const auto ended = std::exchange(watched_, {});  // ends after the lock does, as in remove()
        lock.unlock();
    }

    // Calls with each change that it sees; several at once are one. The word stays until it is removed. Any thread.
    uint64_t add(uint64_t* word, OnChange on_change) {
        const std::lock_guard lock(mutex_);
        if (is_ending_) throw std::runtime_error("the engine was stopped");
        const uint64_t number = ++num_added_;
        watched_[number] = {word, load(word), std::move(on_change)};
        if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
        changed_.notify_all();
        return number;
    }
    // Afterwards it is not called any more, except for the call that this is called in.
    void remove(uint64_t number) {
        std::unique_lock lock(mutex_);
        const auto node = watched_.extract(number);  // ends after the lock does: what it keeps may want other locks
        const bool is_own = id_ == std::this_thread::get_id();
        changed_.wait(lock, [&] { return is_own || called_ != number; });
        lock.unlock();
    }
    bool is_here() const {
        const std::lock_guard lock(mutex_);
        return id_ == std::this_thread::get_id();
    }

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
        id_ = std::this_thread::get_id();
        while (!is_ending_) {
            if (watched_.empty()) changed_.wait(lock, [&] { return is_ending_ || !watched_.empty(); });
            idle_turns = call_for_changes(lock) ? 0 : idle_turns + 1;
            lock.unlock();
            rest(idle_turns);
            lock.lock();
        }
        id_ = {};
    }

    bool call_for_changes(std::unique_lock<std::mutex>& lock) {
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

    void call(uint64_t number, uint64_t old, uint64_t now, OnChange on_change, std::unique_lock<std::mutex>& lock) {
        called_ = number;
        lock.unlock();
        const bool goes_on = on_change(old, now);
        on_change = {};
        lock.lock();
        called_ = 0;
        auto ended = goes_on ? decltype(watched_)::node_type() : watched_.extract(number);
        lock.unlock();
        changed_.notify_all();
        ended = {};
        lock.lock();
    }

    // A kernel's step takes about as long as this thread spins.
    static void rest(uint32_t idle_turns) {
        constexpr uint32_t kSpins = 2000;
        if (idle_turns < kSpins) return;
        if (idle_turns < 2 * kSpins) return std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::map<uint64_t, Watch> watched_;
    uint64_t num_added_ = 0, called_ = 0;
    bool is_ending_ = false;
    std::thread thread_;
    std::thread::id id_;  // while it runs: later ones may have the same
};

}  // namespace tracekern
