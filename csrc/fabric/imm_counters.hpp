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
    ImmCounter(uint32_t imm, uint64_t early, std::shared_ptr<WaitTrace> trace, std::shared_ptr<Turns> turns)
        : imm_(imm), trace_(std::move(trace)), turns_(std::move(turns)), arrived_(early) {}

    uint32_t imm() const { return imm_; }
    // Arrivals that no wait has taken. Those taken are read first: they are never more.
    uint64_t count() const {
        const uint64_t taken = taken_.load(std::memory_order_acquire);
        return arrived_.load(std::memory_order_acquire) - taken;
    }

    // Waits until `count` more have arrived than earlier waits took, and takes them; false: not within the limit. Does
    // the worker's turns for a while, then blocks.
    bool wait(uint64_t count, std::chrono::nanoseconds limit) {
        const RecordedSpan span = trace_->begin(imm_, taken_.load(std::memory_order_relaxed) + count);
        if (!turns_->wait([&] { return try_take(count); }, limit) && !block(count, limit)) return false;
        trace_->end(span);
        return true;
    }

    // Returns how many have arrived, with this one.
    uint64_t add_one() {
        const uint64_t number = arrived_.fetch_add(1, std::memory_order_seq_cst) + 1;
        if (number >= wakes_at_.load(std::memory_order_seq_cst)) {
            const std::lock_guard lock(mutex_);
            wakes_at_.store(kNever, std::memory_order_relaxed);  // until who has not enough says so again
            changed_.notify_all();
        }
        return number;
    }

private:
    static constexpr uint64_t kNever = ~uint64_t{0};

    // Is told when there may be enough, not of each arrival: that would be a change of threads for each.
    bool block(uint64_t count, std::chrono::nanoseconds limit) {
        std::unique_lock lock(mutex_);
        return changed_.wait_for(lock, limit, [&] {
            // Sequentially consistent, as in add_one(): of this store and the load there, or of the add there and the
            // look at arrived_ here, one comes first. Either that sees who blocks, or this sees the arrival.
            const uint64_t enough = taken_.load(std::memory_order_relaxed) + count;
            if (enough < wakes_at_.load(std::memory_order_relaxed)) {
                wakes_at_.store(enough, std::memory_order_seq_cst);
            }
            return try_take(count);
        });
    }
    // Who takes arrivals sees what the thread saw that counted them; sequentially consistent for block().
    bool try_take(uint64_t count) {
        uint64_t taken = taken_.load(std::memory_order_acquire);
        while (arrived_.load(std::memory_order_seq_cst) - taken >= count) {
            if (taken_.compare_exchange_weak(taken, taken + count, std::memory_order_acq_rel)) return true;
        }
        return false;
    }

    const uint32_t imm_;
    const std::shared_ptr<WaitTrace> trace_;
    const std::shared_ptr<Turns> turns_;
    std::atomic<uint64_t> arrived_, taken_ = 0;  // taken by waits
    std::atomic<uint64_t> wakes_at_ = kNever;    // arrivals that are enough for a wait that blocks
    std::mutex mutex_;
    std::condition_variable changed_;
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
        entry.counter = std::make_shared<ImmCounter>(imm, std::exchange(entry.early, 0), trace_, turns_);
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

    const std::shared_ptr<WaitTrace> trace_ = std::make_shared<WaitTrace>();
    const std::shared_ptr<Turns> turns_;
    std::mutex mutex_;
    std::map<uint32_t, Entry> entries_;
    std::function<void(uint32_t)> callback_;
};

}  // namespace tracekern
