// A transfer: what was asked for, cut into the writes that are posted, and what has become of them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fabric/address.hpp"
#include "fabric/domain.hpp"
#include "fabric/on_done.hpp"

namespace tracekern {

// Memory that this engine registered.
struct MemoryRegion {
    char* at = nullptr;
    uint64_t bytes = 0;
    std::vector<DomainMemory> ways;  // one a domain
};

// Memory that the writes of a transfer go to: that of one peer, or of each of a group.
struct Targets {
    std::vector<MemoryRegionDescriptor> memory;

    // What all writes to one target through one domain have in common.
    struct Way {
        fi_addr_t peer;
        uint32_t number;  // of the peer, in a recording
        uint64_t base, key;
    };
    // The worker's, who looks them up once, and again when peers have changed since.
    std::vector<Way> ways;  // target by target, those of all domains
    uint64_t looked_up = 0;
};

struct TransferPiece {
    uint32_t target, domain;
    uint64_t src, dst;  // offsets in the regions
    uint64_t bytes;
};

struct Transfer {
    std::shared_ptr<MemoryRegion> src;  // none where nothing is read
    std::shared_ptr<Targets> targets;
    std::vector<TransferPiece> pieces;
    std::optional<uint32_t> imm;  // with each piece
    OnDone on_done;

    uint64_t submitted = 0;  // HostTrack::now() where it is recorded

    // The worker's.
    uint64_t num_posted = 0, num_ended = 0;
    std::string error;  // the first
    uint64_t number = 0;
    RecordedSpan whole, queued;

    // Posting it takes no longer than handing it to another thread.
    bool is_short() const { return pieces.size() == 1 && pieces[0].bytes <= 4096; }
    bool is_over() const { return num_ended == num_posted && (num_posted == pieces.size() || !error.empty()); }
};

}  // namespace tracekern
