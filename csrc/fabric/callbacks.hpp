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
    // Calls all that was put before.
    ~CallbackThread() {
        is_ending_.store(true, std::memory_order_release);
        pending_.release();
        thread_.join();
    }

    // Any thread. Callbacks are called in the order of one caller.
    void put(std::function<void()> callback) {
        queue_.put(std::move(callback));
        pending_.release();
    }

    bool is_here() const { return thread_.get_id() == std::this_thread::get_id(); }

private:
    void run() {
        while (true) {
            pending_.acquire();
            const bool is_ending = is_ending_.load(std::memory_order_acquire);
            while (const auto callback = queue_.take()) (*callback)();
            if (is_ending) return;
        }
    }

    Queue<std::function<void()>> queue_;
    std::counting_semaphore<> pending_{0};
    std::atomic<bool> is_ending_ = false;
    std::thread thread_;  // last: it uses all the others
};

}  // namespace tracekern
