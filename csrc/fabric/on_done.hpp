// How whoever submitted a transfer learns that it has ended: a callback, a flag, or two counters. The worker waits for
// none of them; who waits for a flag does its work meanwhile.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

#include "fabric/callbacks.hpp"
#include "fabric/forks.hpp"
#include "fabric/rule.hpp"
#include "fabric/shared_loop.hpp"

namespace tracekern {

// failed: an error came back. stalled: nothing came back in time; the writes may still arrive, and their source may
// still be read.
enum class Outcome { done, failed, stalled, cancelled };

struct Result {
    Outcome outcome = Outcome::done;
    std::string why{};  // not done

    bool is_ok() const { return outcome == Outcome::done; }
};

// Is set once, when one transfer has ended.
class DoneFlag {
public:
    bool is_done() const { return is_done_.load(std::memory_order_acquire); }
    // Until it is done as if all went well.
    Result result() const { return is_done() ? result_ : Result(); }

    // False: not done within the limit. Does turns of the transfer's engine for a while, then blocks.
    bool wait(std::chrono::nanoseconds limit) {
        process_.require("the flag");
        std::unique_lock lock(mutex_);
        if (const auto loop = loop_) {
            lock.unlock();  // a turn may set the flag
            if (loop->wait([&] { return is_done(); }, limit)) return true;
            lock.lock();
        }
        return ended_.wait_for(lock, limit, [&] { return is_done(); });
    }

    void claim(const std::shared_ptr<SharedLoop>& loop) {
        const std::lock_guard lock(mutex_);
        if (loop_) throw std::invalid_argument("this DoneFlag has a transfer; make one for each");
        loop_ = loop;
    }
    void set(const Result& result) {
        {
            const std::lock_guard lock(mutex_);
            result_ = result;
            is_done_.store(true, std::memory_order_release);
        }
        ended_.notify_all();
    }

private:
    const Process process_;
    rule::Mutex mutex_;
    rule::Condition ended_;
    std::shared_ptr<SharedLoop> loop_;  // of the engine of its transfer
    Result result_;                     // stays as it is once is_done_
    std::atomic<bool> is_done_ = false;
};

// Counts the transfers that have ended, for as many as are given it.
class DoneCounter {
public:
    uint64_t done() const { return done_.load(std::memory_order_acquire); }
    uint64_t errors() const { return errors_.load(std::memory_order_acquire); }
    // As if all went well while there is none.
    Result first_error() const {
        const std::lock_guard lock(mutex_);
        return first_error_;
    }

    // Until so many have ended, well or not; false: not within the limit.
    bool wait(uint64_t count, std::chrono::nanoseconds limit) {
        process_.require("the counter");
        std::unique_lock lock(mutex_);
        return ended_.wait_for(lock, limit, [&] { return done() + errors() >= count; });
    }

    void add(const Result& result) {
        {
            const std::lock_guard lock(mutex_);
            if (!result.is_ok() && errors() == 0) first_error_ = result;
            (result.is_ok() ? done_ : errors_).fetch_add(1, std::memory_order_release);
        }
        ended_.notify_all();
    }

private:
    const Process process_;
    mutable rule::Mutex mutex_;
    rule::Condition ended_;
    Result first_error_;
    std::atomic<uint64_t> done_ = 0, errors_ = 0;
};

class OnDone {
public:
    // Called on the callback thread.
    using Callback = std::function<void(const Result&)>;

    OnDone() = default;  // nobody wants to know
    OnDone(Callback callback) : to_(std::move(callback)) {}
    OnDone(std::shared_ptr<DoneFlag> flag) : to_(std::move(flag)) {}
    OnDone(std::shared_ptr<DoneCounter> counter) : to_(std::move(counter)) {}

    // Before its transfer begins. Throws std::invalid_argument for a flag that has another one.
    void claim(const std::shared_ptr<SharedLoop>& loop) const {
        if (const auto* flag = std::get_if<std::shared_ptr<DoneFlag>>(&to_)) (*flag)->claim(loop);
    }

    // Tells it once, and lets go of whom it told.
    void tell(const Result& result, CallbackThread& callbacks) {
        const auto to = std::exchange(to_, {});
        if (const auto* flag = std::get_if<std::shared_ptr<DoneFlag>>(&to)) {
            (*flag)->set(result);
        } else if (const auto* counter = std::get_if<std::shared_ptr<DoneCounter>>(&to)) {
            (*counter)->add(result);
        } else if (const auto* callback = std::get_if<Callback>(&to)) {
            callbacks.put([callback = *callback, result] { callback(result); });
        }
    }

private:
    std::variant<std::monostate, Callback, std::shared_ptr<DoneFlag>, std::shared_ptr<DoneCounter>> to_;
};

}  // namespace tracekern
