// CPU backend: a rank's link to ranks of other nodes, slower than memory. What the rank stores there leaves it one row
// after the other, at the link's rate; what comes in is not limited, and a store costs no latency.
//
// Stores go through as they are made. The warp that made them waits where a GPU's would drain them: wherever it orders
// its memory, which is before each release, and before it lets other warps run. Only rows count, which pass through
// store_once() and Warp::copy_vectors(), not flags and what else is stored word by word.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "platform/simulated_clock.h"

namespace tracekern {

class SlowLink {
public:
    // heaps: where ranks of other nodes have theirs, of heap_bytes each.
    SlowLink(std::vector<uint64_t> heaps, uint64_t heap_bytes, double gb_per_s)
        : heaps_(std::move(heaps)), heap_bytes_(heap_bytes), bytes_per_ns_(gb_per_s) {}
    SlowLink(const SlowLink&) = delete;

    bool leads_to(const void* place) const {
        const auto at = reinterpret_cast<uint64_t>(place);
        return std::any_of(heaps_.begin(), heaps_.end(), [&](uint64_t heap) { return at - heap < heap_bytes_; });
    }

    // Returns when `bytes` that were there at `since_ns` have left, behind all that were sent before them.
    int64_t send(uint64_t bytes, int64_t since_ns) {
        const auto takes_ns = static_cast<int64_t>(std::ceil(static_cast<double>(bytes) / bytes_per_ns_));
        int64_t free_at_ns = free_at_ns_.load(std::memory_order_relaxed), left_ns;
        do {
            left_ns = std::max(free_at_ns, since_ns) + takes_ns;
        } while (!free_at_ns_.compare_exchange_weak(free_at_ns, left_ns, std::memory_order_relaxed));
        return left_ns;
    }

private:
    const std::vector<uint64_t> heaps_;
    const uint64_t heap_bytes_;
    const double bytes_per_ns_;
    std::atomic<int64_t> free_at_ns_ = 0;  // of all warps
};

// What the warp that this thread runs has stored beyond the link and not waited for.
struct Outgoing {
    SlowLink* link = nullptr;  // the executor points every thread that runs warps at it, where there is one
    uint64_t bytes = 0;
    int64_t since_ns = 0;

    void add(const void* place, uint64_t num_bytes) {
        if (!link || !link->leads_to(place)) return;
        if (bytes == 0) since_ns = SimulatedClock::host_now_ns();
        bytes += num_bytes;
    }

    // Calls relax() until all of it has left.
    template <class Relax>
    void drain(Relax relax) {
        if (bytes == 0) return;
        const int64_t left_ns = link->send(bytes, since_ns);
        bytes = 0;  // now: relax() runs other warps
        while (SimulatedClock::host_now_ns() < left_ns) relax();
    }
};
inline thread_local Outgoing outgoing;
// Threads of this extension that have a link: where none has, stores are to cost no more than a look at a word.
inline std::atomic<uint32_t> num_linked_threads = 0;

inline void add_outgoing(const void* place, uint64_t num_bytes) {
    if (num_linked_threads.load(std::memory_order_relaxed) != 0) outgoing.add(place, num_bytes);
}
template <class Relax>
void drain_outgoing(Relax relax) {
    if (num_linked_threads.load(std::memory_order_relaxed) != 0) outgoing.drain(relax);
}

// Sends what this thread's warps store over a link, or over none; without one at the end of the scope.
class LinkScope {
public:
    explicit LinkScope(SlowLink* link) {
        outgoing = {link};
        if (link) num_linked_threads.fetch_add(1, std::memory_order_relaxed);
    }
    ~LinkScope() {
        if (outgoing.link) num_linked_threads.fetch_sub(1, std::memory_order_relaxed);
        outgoing = {};
    }
    LinkScope(const LinkScope&) = delete;
};

}  // namespace tracekern
