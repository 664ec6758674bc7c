// Counts of immediates: how a receiver learns that writes have arrived, in whatever order they did.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "fabric/forks.hpp"
#include "fabric/rule.hpp"
#include "fabric/senders.hpp"
#include "fabric/shared_loop.hpp"
#include "fabric/trace.hpp"

namespace tracekern {

// When a thread last found that it has waited in vain for a while. Read and written without an order: it only says that
// senders are worth a look.
class LongWaits {
public:
    static constexpr auto kWhile = std::chrono::milliseconds(100);

    void note() { last_.store(now(), std::memory_order_relaxed); }
    bool is_any() const {
        return now() - last_.load(std::memory_order_relaxed) < 3 * kWhile / std::chrono::nanoseconds(1);
    }

private:
    static int64_t now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
    std::atomic<int64_t> last_ = 0;
};

// Counts one immediate for as long as it lives: early arrivals are kept, and what is more than was waited for stays for
// the next wait.
class ImmCounter {
public:
    ImmCounter(uint32_t imm,
               uint64_t early,
               std::shared_ptr<WaitTrace> trace,
               std::shared_ptr<SharedLoop> loop,
               std::shared_ptr<LongWaits> long_waits)
        : imm_(imm),
          trace_(std::move(trace)),
          loop_(std::move(loop)),
          long_waits_(std::move(long_waits)),
          arrived_(early) {}

    uint32_t imm() const { return imm_; }
    // Arrivals that no wait has taken. Those taken are read first: they are never more.
    uint64_t count() const {
        const uint64_t taken = taken_.load(std::memory_order_acquire);
        return arrived_.load(std::memory_order_acquire) - taken;
    }

    // Waits until `count` more have arrived than earlier waits took, and takes them; false: not within the limit. Does
    // the worker's turns for a while, then blocks. Throws std::runtime_error where it need not go on, see interrupt().
    bool wait(uint64_t count, std::chrono::nanoseconds limit) {
        process_.require("the counter");
        WaitTrace::Wait wait(*trace_, imm_, taken_.load(std::memory_order_relaxed) + count);
        if (!loop_->wait([&] { return try_take(count); }, limit) && !block(count, limit)) return false;
        wait.end();
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

    // Ends the waits that have not enough, or else the next of them; for_good: all later ones, too.
    void interrupt(const std::string& why, bool for_good) {
        {
            const std::lock_guard lock(mutex_);
            ++num_interrupts_;
            why_ = why;
            is_over_ |= for_good;
        }
        changed_.notify_all();
    }

private:
    static constexpr uint64_t kNever = ~uint64_t{0};

    // Is told when there may be enough, not of each arrival: that would be a change of threads for each.
    bool block(uint64_t count, std::chrono::nanoseconds limit) {
        std::unique_lock lock(mutex_);
        const uint64_t known = num_known_;
        const auto until = std::chrono::steady_clock::now() + limit;
        bool is_taken = false;
        const auto is_over = [&] {
            // Sequentially consistent, as in add_one(): of this store and the load there, or of the add there and the
            // look at arrived_ here, one comes first. Either that sees who blocks, or this sees the arrival.
            const uint64_t enough = taken_.load(std::memory_order_relaxed) + count;
            if (enough < wakes_at_.load(std::memory_order_relaxed)) {
                wakes_at_.store(enough, std::memory_order_seq_cst);
            }
            is_taken = try_take(count);
            return is_taken || is_over_ || num_interrupts_ != known;
        };
        while (!changed_.wait_until(
            lock, std::min(until, std::chrono::steady_clock::now() + LongWaits::kWhile), is_over)) {
            long_waits_->note();
            if (std::chrono::steady_clock::now() >= until) break;
        }
        if (is_taken) return true;
        if (!is_over_ && num_interrupts_ == known) return false;
        num_known_ = num_interrupts_;
        throw std::runtime_error(why_);
    }
    // Who takes arrivals sees what the thread saw that counted them; sequentially consistent for block().
    bool try_take(uint64_t count) {
        uint64_t taken = taken_.load(std::memory_order_acquire);
        while (arrived_.load(std::memory_order_seq_cst) - taken >= count) {
            if (taken_.compare_exchange_weak(taken, taken + count, std::memory_order_acq_rel)) return true;
        }
        return false;
    }

    const Process process_;
    const uint32_t imm_;
    const std::shared_ptr<WaitTrace> trace_;
    const std::shared_ptr<SharedLoop> loop_;
    const std::shared_ptr<LongWaits> long_waits_;
    std::atomic<uint64_t> arrived_, taken_ = 0;  // taken by waits
    std::atomic<uint64_t> wakes_at_ = kNever;    // arrivals that are enough for a wait that blocks
    rule::Mutex mutex_;
    rule::Condition changed_;
    uint64_t num_interrupts_ = 0, num_known_ = 0;  // known: waits have ended with
    std::string why_;                              // of the last one
    bool is_over_ = false;
};

// Those of an engine. An immediate has one user at a time: an expectation, which is released when it is reached, or a
// counter. What arrives before its user came is kept for it; what nobody ever uses goes to the callback for all others
// where there is one.
class ImmCounters {
public:
    using Reached = std::function<void()>;

    // loop: what a thread may do while it waits.
    explicit ImmCounters(std::shared_ptr<SharedLoop> loop) : loop_(std::move(loop)) {}

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

    // senders: main addresses of the engines that raise it. Without them an engine is a sender once it has raised it.
    std::shared_ptr<ImmCounter> make_counter(uint32_t imm, std::set<std::string> senders = {}) {
        const std::lock_guard lock(mutex_);
        Entry& entry = claim(imm);
        entry.senders = std::move(senders);
        entry.counter = std::make_shared<ImmCounter>(imm, std::exchange(entry.early, 0), trace_, loop_, long_waits_);
        if (!over_.empty()) entry.counter->interrupt(over_, true);
        if (const auto gone = senders_.who_has_left(entry.senders); !gone.empty()) {
            entry.counter->interrupt(gone + " has ended", false);
        }
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
    const LongWaits& long_waits() const { return *long_waits_; }

    // sender: the engine that raised it, 0 where that is not known. Returns how many have come for its user, and what
    // has to be called now that one has arrived: nothing most of the time.
    std::pair<uint64_t, Reached> add(uint32_t imm, uint64_t sender) {
        const std::lock_guard lock(mutex_);
        const auto found = entries_.find(imm);
        if (found == entries_.end() && callback_) return {0, [callback = callback_, imm] { callback(imm); }};
        Entry& entry = found == entries_.end() ? entries_[imm] : found->second;
        Senders::count(entry.from, sender);
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

    // ---- who sends, and what becomes of waits for one that does not any more ----

    // address: its main one.
    void meet(uint64_t engine, const std::string& address, const std::string& name) {
        const std::lock_guard lock(mutex_);
        senders_.meet(engine, address, name);
    }
    void leave(uint64_t engine) {
        const std::lock_guard lock(mutex_);
        senders_.leave(engine);
    }
    // One that has left without a word. Ends the waits for what it was said to raise, or else has raised before, and
    // all where nobody is left who could raise anything.
    void die(uint64_t engine, const std::string& why) {
        const std::lock_guard lock(mutex_);
        const bool is_last = !senders_.is_any_there();
        for (auto& [imm, entry] : entries_) {
            const bool is_sender = entry.senders.empty() ? Senders::has(entry.from, engine)
                                                         : entry.senders.contains(senders_.address_of(engine));
            if (entry.counter && (is_last || is_sender)) entry.counter->interrupt(why, false);
        }
    }
    // Ends all waits; for_good: those of later, too, and nothing is called any more.
    void interrupt(const std::string& why, bool for_good) {
        const std::lock_guard lock(mutex_);
        if (for_good) {
            over_ = why;
            callback_ = {};
        }
        for (auto& [imm, entry] : entries_) {
            if (for_good) entry.reached = {};
            if (entry.counter) entry.counter->interrupt(why, for_good);
        }
    }
    // Who has raised an immediate that has a user, and who has not.
    std::string describe_senders(uint32_t imm) {
        const std::lock_guard lock(mutex_);
        const auto found = entries_.find(imm);
        if (found == entries_.end()) return "";
        return senders_.describe(found->second.from, found->second.senders);
    }

private:
    struct Entry {
        uint64_t arrived = 0, early = 0;
        uint64_t wanted = 0;
        Reached reached;
        std::shared_ptr<ImmCounter> counter;
        std::set<std::string> senders;  // that were named
        Senders::Counts from;           // that have raised it
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
    const std::shared_ptr<SharedLoop> loop_;
    const std::shared_ptr<LongWaits> long_waits_ = std::make_shared<LongWaits>();
    rule::Mutex mutex_;
    std::map<uint32_t, Entry> entries_;
    std::function<void(uint32_t)> callback_;
    Senders senders_;
    std::string over_;  // why nothing comes any more
};

}  // namespace tracekern
