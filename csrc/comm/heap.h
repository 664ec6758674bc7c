// The symmetric heap: the same offset means the same thing on every rank. Each rank's part starts with HeapControl.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "comm/fault.h"
#include "comm/flag.h"
#include "platform/device.h"

namespace tracekern {

constexpr uint32_t kMaxRanks = 64;  // ranks that share a heap

// In the fault record of what the communicator itself does; smaller numbers are the kernels'.
constexpr uint32_t kRankBarrierStage = ~0u;

// Lines of the cache, on which rows start and words stand alone.
constexpr uint64_t kLineBytes = 128;

// Stores that straddle lines are more messages on the link.
TK_HOST_DEVICE constexpr uint64_t whole_lines(uint64_t bytes) {
    return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
}

// A word that others spin on or write beside: on a line of its own, so that nobody else's traffic delays it.
struct LineWord {
    uint64_t word;
    uint64_t rest[kLineBytes / sizeof(uint64_t) - 1];
};

// Words of HeapControl that ranks write at each other.
enum class ControlWord : uint32_t { barrier, ping_request, ping_reply, aborted_by };
constexpr uint32_t kNumControlWords = 4;

struct alignas(4096) HeapControl {
    uint32_t abort;       // not 0: a wait of some rank ran out of time; every wait gives up
    uint64_t aborted_by;  // refusal << 32 | aborted_by, both as in FaultRecord: one word, so that they belong together
    alignas(64) uint64_t barrier_flags[2 * kMaxRanks];               // [epoch parity][peer], written by that peer
    alignas(64) uint64_t ping_flags[2 * kMaxRanks];                  // clock ping-pong, see comm/clock_ping_pong.h
    alignas(64) uint64_t inbox[(kNumControlWords - 1) * kMaxRanks];  // of a proxy alone: see inbox_place()

    // The one that `source` writes; of barriers there are two sets in turns.
    TK_HOST_DEVICE uint64_t* word(ControlWord which, uint32_t source, uint64_t epoch = 0) {
        switch (which) {
            case ControlWord::barrier:
                return &barrier_flags[epoch % 2 * kMaxRanks + source];
            case ControlWord::ping_request:
                return &ping_flags[source];
            case ControlWord::ping_reply:
                return &ping_flags[kMaxRanks + source];
            default:
                return &aborted_by;
        }
    }
};

// Sets the words of a rank back to what they are before the first call. For the host.
inline void lower_words(HeapControl& control) {
    memset(&control, 0, sizeof(control));
    for (uint64_t& flag : control.barrier_flags) flag = make_flag(kNeverEpoch, 0);
}

struct CommArgs {
    uint32_t rank;
    uint32_t num_ranks;
    uint64_t timeout_ticks;
    FaultRecord* fault;
    OnTimeout on_timeout;
    uint32_t first_stage;   // of the kernels that get this, in the communicator's count of all; for fault records
    char* heap[kMaxRanks];  // each rank's heap as this rank sees it; nullptr: a network lies between

    // All ranks in turn, for i from 0. Each rank begins with itself, so that not all go for the same peer at once.
    TK_DEVICE uint32_t nth_peer(uint32_t i) const { return (rank + i) % num_ranks; }

    template <class T>
    TK_DEVICE T* at(uint32_t peer, uint64_t offset) const {
        return reinterpret_cast<T*>(heap[peer] + offset);
    }
    TK_DEVICE HeapControl& control(uint32_t peer) const { return *at<HeapControl>(peer, 0); }

    // What only `writer` writes at rank `at_rank`. Arguments of kernels that a proxy serves hide this and the next one:
    // see comm/proxy_peer.h.
    template <class T>
    TK_DEVICE T* written_by(uint32_t, uint32_t at_rank, uint64_t offset) const {
        return at<T>(at_rank, offset);
    }
    // Where this rank's proxy says that a rank gave up; nullptr: there is no proxy.
    TK_DEVICE static constexpr HeapControl* far_control() { return nullptr; }
};

// What a communicator of any backend begins with, before it writes to the table of heaps.
inline CommArgs args_of_rank(uint64_t rank, uint64_t num_ranks) {
    if (num_ranks == 0 || num_ranks > kMaxRanks) {
        throw std::invalid_argument("symmetric heap: " + std::to_string(num_ranks) + " ranks, wanted 1 to " +
                                    std::to_string(kMaxRanks));
    }
    if (rank >= num_ranks) {
        throw std::invalid_argument("symmetric heap: rank " + std::to_string(rank) + ", wanted one of the " +
                                    std::to_string(num_ranks) + " that share it");
    }
    CommArgs args{};
    args.rank = static_cast<uint32_t>(rank);
    args.num_ranks = static_cast<uint32_t>(num_ranks);
    return args;
}

}  // namespace tracekern
