// What a rank's proxy shares with the rank's kernels on a GPU.
#pragma once

#include <stdexcept>

#include "comm/command.h"
#include "platform/gpu_host.hpp"

namespace tracekern {

// The proxy's memory, which kernels reach as the proxy does, and a ring of its commands in memory of the GPU, where
// kernels count for themselves.
class CudaProxyMemory {
public:
    // ring: of the proxy. Its commands, and what the proxy counts, are in the `bytes` from `begin` on.
    CudaProxyMemory(CommandRing ring, uint64_t begin, uint64_t bytes) : begin_(begin), words_(sizeof(Words)) {
        if (register_host_memory(begin, bytes) != begin) {
            unregister_host_memory(begin);
            throw std::runtime_error("the GPU has another address for memory of the host");
        }
        Words* words = words_.as<Words>();
        ring.num_claimed = &words->num_claimed;
        ring.num_seen = &words->num_seen;
        copy_to_device(&words->ring, &ring, sizeof(ring));
    }
    ~CudaProxyMemory() {
        try {
            unregister_host_memory(begin_);
        } catch (const std::runtime_error&) {
            // After a trap the driver takes it back with the process.
        }
    }
    CudaProxyMemory(const CudaProxyMemory&) = delete;

    // For kernels.
    CommandRing* ring() const { return &words_.as<Words>()->ring; }
    // The state before the first command: with that of the proxy.
    void reset() { clear_device(&words_.as<Words>()->num_claimed, sizeof(Words) - offsetof(Words, num_claimed)); }

private:
    struct Words {
        CommandRing ring;
        alignas(kLineBytes) uint64_t num_claimed;
        alignas(kLineBytes) uint64_t num_seen;
    };

    const uint64_t begin_;
    const DeviceMemory words_;
};

}  // namespace tracekern
