// Counts of immediates: how a receiver learns that writes have arrived, in whatever order they did.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "fabric/trace.hpp"
#include "fabric/turns.hpp"

namespace tracekern {

// Counts one immediate for as long as it lives: early arrivals are kept, and what is more than was waited for stays for
// the next wait.
class ImmCounter {
public:
    ImmCounter(uint32_t imm, uint64_t early, std::shared_ptr<Turns> turns, std::shared_ptr<WaitTrace> trace)
        : imm_(imm), count_(early), num_arrived_(early), turns_(std::move(turns)), trace_(std::move(trace)) {}

    uint32_t imm() const { return imm_; }
    uint64_t count() const { return count_.load(std::memory_order_relaxed); }

    // Waits until `count` more have arrived than earlier waits took, and takes them; false: not within the limit. Does
    // the worker's turns for a while, then blocks.
    bool wait(uint64_t count, std::chrono::nanoseconds limit) {
        // Exact where one thread at a time waits for an immediate.
        const RecordedSpan span = trace_->begin(imm_, num_taken_.load(std::memory_order_relaxed) + count);
        if (turns_->wait([&] { return take(count); }, limit)) {
            trace_->end(span);
            return true;
        }
        std::unique_lock lock(mutex_);
        // Sequentially consistent, as in add_one(): of the load of count_ there and this store, or of the add there and
        // the look at count_ here, one comes first. Either that sees who blocks, or this sees the arrival.
        num_blocked_.fetch_add(1, std::memory_order_seq_cst);
        const bool has_come = arrived_.wait_for(lock, limit, [&] { return take(count); });
        num_blocked_.fetch_sub(1, std::memory_order_relaxed);
        if (has_come) trace_->end(span);
        return has_come;
    }

    // Returns how many have arrived, with this one. One thread at a time.
    uint64_t add_one() {
        count_.fetch_add(1, std::memory_order_seq_cst);
        ++num_arrived_;
        if (num_blocked_.load(std::memory_order_seq_cst) == 0) return num_arrived_;
        {
            const std::lock_guard lock(mutex_);
        }  // who is about to block has
        arrived_.notify_all();
        return num_arrived_;
    }

private:
    // Who takes the arrivals sees what the thread saw that counted them; sequentially consistent for wait() and
    // add_one().
    bool take(uint64_t count) {
        uint64_t here = count_.load(std::memory_order_seq_cst);
        while (here >= count) {
            if (!count_.compare_exchange_weak(here, here - count, std::memory_order_seq_cst)) continue;
            num_taken_.fetch_add(count, std::memory_order_relaxed);
            return true;
        }
        return false;
    }

    const uint32_t imm_;
    std::atomic<uint64_t> count_;  // that no wait has taken
    uint64_t num_arrived_;         // of add_one() alone
    std::atomic<uint64_t> num_taken_ = 0;
    const std::shared_ptr<Turns> turns_;
    const std::shared_ptr<WaitTrace> trace_;
    std::atomic<uint32_t> num_blocked_ = 0;
    std::mutex mutex_;
    std::condition_variable arrived_;
};

// Those of an engine. An immediate has one user at a time: an expectation, which is released when it is reached, or a
// counter. What arrives before its user came is kept for it; what nobody ever uses goes to the callback for all others
// where there is one.
class ImmCounters {
public:
    using Reached = std::function<void()>;

    // turns: what a thread may do while it waits.
    explicit ImmCounters(std::shared_ptr<Turns> turns) : turns_(std::move(turns)) {}

    // Calls reached() once, as soon as `count` have arrived, early ones included. Throws std::invalid_argument if the
    // immediate has a user.
    std::optional<Reached> expect(uint32_t imm, uint64_t count, Reached reached) {
        const std::lock_guard lock(mutex_);
        Entry& entry = claim(imm);
        if (entry.early >= count) {
            entry.early -= count;
            forget_if_empty(imm);
            return reached;
        }
        entry.wanted = count - std::exchange(entry.early, 0);
        entry.reached = std::move(reached);
        return std::nullopt;
    }

    std::shared_ptr<ImmCounter> make_counter(uint32_t imm) {
        const std::lock_guard lock(mutex_);
        Entry& entry = claim(imm);
        entry.counter = std::make_shared<ImmCounter>(imm, std::exchange(entry.early, 0), turns_, trace_);
        return entry.counter;
    }

    // Ends the use of an immediate. Returns what had arrived and was not used; of an expectation what it still lacked.
    std::pair<uint64_t, uint64_t> remove(uint32_t imm) {
        const std::lock_guard lock(mutex_);
        const auto found = entries_.find(imm);
        if (found == entries_.end()) return {0, 0};
        const Entry entry = std::move(found->second);
        entries_.erase(found);
        return {entry.counter ? entry.counter->count() : entry.early, entry.wanted};
    }

    // From now on called with immediates that have no user.
    void set_callback(std::function<void(uint32_t)> callback) {
        const std::lock_guard lock(mutex_);
        callback_ = std::move(callback);
    }

    WaitTrace& trace() { return *trace_; }

    // (how many have come for its user, what has to be called now that one has arrived: nothing most of the time)
    std::pair<uint64_t, Reached> add(uint32_t imm) {
        const std::lock_guard lock(mutex_);
        const auto found = entries_.find(imm);
        if (found == entries_.end() && callback_) return {0, [callback = callback_, imm] { callback(imm); }};
        Entry& entry = found == entries_.end() ? entries_[imm] : found->second;
        if (entry.counter) return {entry.counter->add_one(), {}};
        const uint64_t number = ++entry.arrived;
        if (!entry.reached) {
            ++entry.early;
        } else if (--entry.wanted == 0) {
            Reached reached = std::move(entry.reached);
            entries_.erase(imm);
            return {number, std::move(reached)};
        }
        return {number, {}};
    }

private:
    struct Entry {
        uint64_t arrived = 0, early = 0;
        uint64_t wanted = 0;
        Reached reached;
        std::shared_ptr<ImmCounter> counter;
    };

    Entry& claim(uint32_t imm) {
        Entry& entry = entries_[imm];
        if (entry.reached || entry.counter) {
            throw std::invalid_argument("immediate " + std::to_string(imm) +
                                        " is counted already; remove_imm_count() first");
        }
        return entry;
    }
    void forget_if_empty(uint32_t imm) {
        if (entries_[imm].early == 0) entries_.erase(imm);
    }

    const std::shared_ptr<Turns> turns_;
    const std::shared_ptr<WaitTrace> trace_ = std::make_shared<WaitTrace>();
    std::mutex mutex_;
    std::map<uint32_t, Entry> entries_;
    std::function<void(uint32_t)> callback_;
};

}  // namespace tracekern
