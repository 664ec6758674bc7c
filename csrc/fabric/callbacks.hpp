// The one thread that calls back: what it calls may take its time, and no transfer waits for it.
#pragma once

#include <atomic>
#include <functional>
#include <semaphore>
#include <thread>
#include <utility>

#include "fabric/queue.hpp"

namespace tracekern {

class CallbackThread {
public:
    CallbackThread() : thread_([this] { run(); }) {}
    CallbackThread(const CallbackThread&) = delete;
    ~CallbackThread() { end(); }

    // Calls all that was put before. One thread.
    void end() {
        if (!thread_.joinable()) return;
        is_ending_.store(true, std::memory_order_release);
        pending_.release();
        thread_.join();
    }

    // Any thread. Callbacks are called in the order of one caller; once this has ended, here and now.
    void put(std::function<void()> callback) {
        if (!queue_.put(std::move(callback))) return callback();
        pending_.release();
    }

    bool is_here() const { return id_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

private:
    void run() {
        id_.store(std::this_thread::get_id(), std::memory_order_relaxed);
        while (true) {
            pending_.acquire();
            const bool is_ending = is_ending_.load(std::memory_order_acquire);
            while (const auto callback = queue_.take()) (*callback)();
            if (is_ending && queue_.try_close()) break;
        }
        id_.store({}, std::memory_order_relaxed);
    }

    Queue<std::function<void()>> queue_;
    std::counting_semaphore<> pending_{0};
    std::atomic<bool> is_ending_ = false;
    std::atomic<std::thread::id> id_;  // while it runs: later ones may have the same
    std::thread thread_;               // last: it uses all the others
};

}  // namespace tracekern
