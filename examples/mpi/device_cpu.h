// The CPU backend: heaps are shared memory, the clock is the host's, and a launch returns when it has ended.
#pragma once

#include <cstring>
#include <vector>

#include "../ring/ring.h"
#include "ranks.h"
#include "tracekern_host.h"

class Device {
public:
    Device(Board& board, Place place, size_t) : own_(board.heap(place.rank)) {
        for (uint32_t peer = 0; peer < place.num_ranks; ++peer) comm.heap[peer] = board.heap(peer);
    }
    void describe(tk_host_options&) const {}
    void attach(tk_host*) {}
    void detach() {}
    void sample_clocks(tk_host*, uint32_t) {}
    void synchronize() const {}
    void write(uint64_t offset, const void* data, size_t bytes) { std::memcpy(own_ + offset, data, bytes); }
    // Memory that host and kernels use.
    uint32_t* allocate(size_t words) { return buffers_.emplace_back(words).data(); }

    CommArgs comm{};

private:
    char* own_;
    std::vector<std::vector<uint32_t>> buffers_;
};
