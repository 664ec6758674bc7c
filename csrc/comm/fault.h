// What a wait that ran out of time leaves behind: one record in memory of the host, written by the first warp that
// gives up. tracekern/dump/fault.py reads it, from the live process or from what a dead one left.
#pragma once

#include <cstdint>

namespace tracekern {

// peer_aborted: some rank gave up before; this one itself where its kernel refused a call.
enum class FaultCause : uint32_t { none = 0, timeout = 1, peer_aborted = 2 };

// What the warp that wrote the record does next: `raise` lets every warp leave its loops and reach its block barriers;
// `trap` stops the device at once, which keeps what other warps were doing, and ends its use by this process.
enum class OnTimeout : uint32_t { raise = 0, trap = 1 };
inline constexpr const char* kOnTimeoutNames[] = {"raise", "trap"};

// Beside the rank in aborted_by: it gave up because its process was interrupted, not because of a wait.
inline constexpr uint32_t kInterrupted = 1u << 31;

// Of the record's second half, which the host writes beforehand; 0: there is none, as before there were versions.
inline constexpr uint32_t kFaultVersion = 2;

struct alignas(64) FaultRecord {
    uint32_t claimed;  // set once by the warp that writes the record
    uint32_t cause;    // FaultCause, stored last: the record is whole
    uint32_t stage;    // kernel, an index into the names of all that use the communicator
    uint32_t channel;  // what was waited for, likewise
    uint32_t rank;
    uint32_t peer;
    uint32_t block;
    uint32_t warp;
    uint32_t slot;
    uint32_t wanted_epoch;
    uint32_t seen_epoch;
    uint32_t seen_value;
    uint64_t waited_ticks;
    uint32_t aborted_by;  // rank + 1 of the first that gave up, as far as this rank knows; perhaps with kInterrupted
    uint32_t on_timeout;  // OnTimeout
    // Of waits for a position in a ring; all else leaves zeros.
    uint32_t version;
    uint32_t wanted_value;
    uint32_t role;  // of the warp, and its ring: counted from 1, 0 is no ring
    uint32_t ring;
    uint32_t head, tail;  // of that ring, as far as the warp knows them
    uint32_t refusal;     // why `aborted_by` refused a call: reason << kFlagValueBits | number; 0: a wait gave up
    uint32_t unused[9];
};
static_assert(sizeof(FaultRecord) == 128, "FaultRecord is read by the host");

}  // namespace tracekern
