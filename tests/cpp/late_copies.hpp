// Bulk copies of the CPU backend that are made some time after their start and in an order of their own, as a GPU's may
// be, by a thread that none of the warps is.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace tracekern {

class LateCopies {
public:
    ~LateCopies() {
        {
            const std::lock_guard lock(mutex_);
            ends_ = true;
        }
        changed_.notify_one();
    }
    void add(std::function<void()> copy) {
        {
            const std::lock_guard lock(mutex_);
            started_.push_back(std::move(copy));
        }
        changed_.notify_one();
    }

private:
    void make_all() {
        std::mt19937 random(1);
        for (;;) {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [&] { return ends_ || !started_.empty(); });
            if (started_.empty()) return;
            std::swap(started_[random() % started_.size()], started_.back());
            const std::function<void()> copy = std::move(started_.back());
            started_.pop_back();
            lock.unlock();
            if (random() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 256));
            copy();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::function<void()>> started_;
    bool ends_ = false;
    std::jthread thread_{[this] { make_all(); }};
};

inline void copy_late(std::function<void()> copy) {
    static LateCopies copies;
    copies.add(std::move(copy));
}

}  // namespace tracekern
