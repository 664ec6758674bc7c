// A rank's proxy in a thread of its own, and what it shares with the rank's kernels.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "fabric/forks.hpp"
#include "fabric/proxy.hpp"
#include "platform/cpu_executor.hpp"

namespace tracekern {

struct RankProxyOptions {
    uint64_t far_bytes;            // of far_heap()
    uint32_t num_commands = 1024;  // that the ring has room for; a power of 2
    uint32_t window = 0;           // see Proxy
};

class RankProxy {
public:
    // comm: of the rank, stays where it is.
    RankProxy(std::shared_ptr<const FabricLibrary> library,
              const Net& net,
              const CommArgs& comm,
              const RankProxyOptions& options)
        : library_(std::move(library)),
          comm_(comm),
          num_bytes_(whole_lines(options.far_bytes) + sizeof(Counts) + options.num_commands * sizeof(Command)),
          memory_(map(num_bytes_), Unmap{num_bytes_}),
          counts_(reinterpret_cast<Counts*>(memory_.get() + whole_lines(options.far_bytes))),
          ring_{reinterpret_cast<Command*>(counts_ + 1),
                options.num_commands,
                &num_claimed_,
                &num_seen_,
                &counts_->num_taken,
                counts_->num_completed},
          proxy_(std::make_unique<Proxy>(
              *library_, net, comm, ring_, Proxy::Memory{far_heap(), options.far_bytes}, options.window)) {}
    RankProxy(const RankProxy&) = delete;
    ~RankProxy() {
        leave();
        if (process_.is_this()) return;
        // The thread and the provider's locks are the parent's.
        if (thread_.joinable()) thread_.detach();
        [[maybe_unused]] const auto* left = proxy_.release();
    }
    // Writes out what is left, and says farewell. There are no turns any more.
    void leave() {
        if (!process_.is_this()) return;
        stop();
        drain(true);
    }

    // Laid out like the rank's heap, and as much again for what is staged.
    char* far_heap() const { return memory_.get(); }
    // Of all that the proxy and kernels share, which begins with far_heap().
    uint64_t num_bytes() const { return num_bytes_; }
    CommandRing& ring() { return ring_; }
    Proxy& proxy() { return *proxy_; }

    // Whether immediates come from whom the provider says. Collective, when all have met and before start().
    bool knows_peers() {
        const auto until = std::chrono::steady_clock::now() + kMeetingLimit;
        while (!proxy_->say_hello() || !proxy_->knows_all()) {
            if (proxy_->is_mistaken() || std::chrono::steady_clock::now() > until) return false;
            proxy_->turn();
        }
        return !proxy_->is_mistaken();
    }
    void start() {
        thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
    }
    void stop() { thread_ = {}; }
    // A pause before each turn from now on, to see how others wait.
    void set_late(std::chrono::microseconds pause) { late_us_.store(pause.count(), std::memory_order_relaxed); }
    // Records from then on into a region with the tracks of ProxyTrack, until stop_trace().
    void start_trace(const LaunchDescriptor& launch) {
        between_turns([&] { proxy_->start_trace(launch); });
    }
    void stop_trace() {
        between_turns([&] { proxy_->stop_trace(); });
    }
    // The state before the first command, with all ranks' kernels finished. inbox: for what comes from then on.
    // Collective: no rank sends before all have done it.
    void reset(Inbox inbox) {
        stop();
        drain();
        has_error_.store(false, std::memory_order_relaxed);
        std::fill(ring_.commands, ring_.commands + ring_.capacity, Command{});
        num_claimed_ = num_seen_ = 0;
        *counts_ = {};
        proxy_->reset(std::move(inbox));
        start();
    }
    // Why the thread has ended; "" while it has not.
    std::string error() const { return has_error_.load(std::memory_order_acquire) ? error_ : ""; }

private:
    // Behind the far heap, and before the commands.
    struct Counts {
        alignas(kLineBytes) uint64_t num_taken;
        alignas(kLineBytes) uint64_t num_completed[kNumTags];
    };
    struct Unmap {
        uint64_t bytes;
        void operator()(char* at) const { munmap(at, bytes); }
    };
    static char* map(uint64_t bytes) {
        void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) throw std::bad_alloc();
        return static_cast<char*>(at);
    }

    void between_turns(const std::function<void()>& run) {
        if (!process_.is_this()) return;
        const bool has_turns = thread_.joinable();
        stop();
        run();
        if (has_turns && error().empty()) start();
    }

    // A rank may end, or begin anew, before others have what it sent last.
    void drain(bool leaves = false) {
        constexpr auto kLimit = std::chrono::seconds(2);
        const auto until = std::chrono::steady_clock::now() + kLimit;
        const bool is_usable = !has_error_.load(std::memory_order_acquire) && !has_fault(*comm_.fault);
        for (uint32_t idle = 0; is_usable && idle < 2 && std::chrono::steady_clock::now() < until;) {
            try {
                const bool is_busy = proxy_->turn() || !proxy_->is_drained() || (leaves && !proxy_->say_farewell());
                idle = is_busy ? 0 : idle + 1;
            } catch (const std::exception&) {
                return;  // a peer is gone, which nobody waits for any more
            }
        }
    }

    void run(const std::stop_token& stop) {
        try {
            for (uint32_t spins = 0; !stop.stop_requested();) {
                if (const int64_t us = late_us_.load(std::memory_order_relaxed)) {
                    std::this_thread::sleep_for(std::chrono::microseconds(us));
                }
                if (proxy_->turn()) {
                    spins = 0;
                } else if (spins < kSpinsUntilIdle) {
                    relax_thread(spins);
                } else {
                    std::this_thread::sleep_for(kIdleSleep);
                }
            }
        } catch (const std::exception& error) {
            error_ = error.what();
            has_error_.store(true, std::memory_order_release);
            abort_rank(proxy_->control(), uint64_t{comm_.rank} + 1);
        }
    }

    // After some 30 ms without anything to do a thread leaves its core to others.
    static constexpr uint32_t kSpinsUntilIdle = 1024;
    static constexpr auto kMeetingLimit = std::chrono::seconds(10);
    static constexpr auto kIdleSleep = std::chrono::microseconds(500);

    const Process process_;
    const std::shared_ptr<const FabricLibrary> library_;
    const CommArgs& comm_;
    const uint64_t num_bytes_;
    const std::unique_ptr<char, Unmap> memory_;
    Counts* const counts_;
    uint64_t num_claimed_ = 0, num_seen_ = 0;  // a GPU has its own: comm/proxy_memory_cuda.hpp
    CommandRing ring_;
    std::unique_ptr<Proxy> proxy_;
    std::string error_;
    std::atomic<bool> has_error_ = false;
    std::atomic<int64_t> late_us_ = 0;
    std::jthread thread_;  // ends first
};

}  // namespace tracekern
