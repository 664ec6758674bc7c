// A transfer: what was asked for, cut into the writes that are posted, and what has become of them.
#pragma once

#include <algorithm>
#include <chrono>
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

using TimePoint = std::chrono::steady_clock::time_point;

struct Peer;

// Memory that this engine registered. Whoever shares it keeps the memory alive: a write that a provider has not given
// back may still be read from it.
struct MemoryRegion {
    uint64_t number = 0;  // of the engine
    char* at = nullptr;
    uint64_t bytes = 0;
    std::shared_ptr<void> owner;     // keeps the memory
    std::vector<DomainMemory> ways;  // one a domain
    bool is_revoked = false;         // the worker's: nobody is to use it any more
};

// Memory that the writes of a transfer go to: that of one peer, or of each of a group.
struct Targets {
    std::vector<MemoryRegionDescriptor> memory;

    // What all writes to one target through one domain have in common.
    struct Way {
        fi_addr_t at;
        uint64_t base, key;
    };
    // The worker's, who looks them up once, and again when peers have changed since.
    std::vector<Peer*> peers;  // one a target
    std::vector<Way> ways;     // target by target, those of all domains
    uint64_t looked_up = 0;

    bool has(const Peer& peer) const { return std::find(peers.begin(), peers.end(), &peer) != peers.end(); }
    bool has(const Peer& peer, uint64_t region) const {
        for (size_t i = 0; i < peers.size(); ++i) {
            if (peers[i] == &peer && memory[i].region == region) return true;
        }
        return false;
    }
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
    // With each piece but the first so many: those are of writes that were too long for a provider, and the pieces with
    // their immediates are posted once these have arrived. Nothing orders writes.
    std::optional<uint32_t> imm;
    size_t num_before_imms = 0;
    OnDone on_done;
    uint64_t number = 0;     // of the engine, counted from 1
    TimePoint until;         // then it is stalled
    uint64_t submitted = 0;  // HostTrack::now() where it is recorded

    // The worker's, once it was submitted.
    size_t place = 0;  // among those that have started
    uint64_t num_posted = 0, num_ended = 0, num_arrived = 0;
    Result result;             // the first thing that went wrong: then no more is posted
    bool is_reported = false;  // on_done was called: what still comes is counted, nothing else
    RecordedSpan whole, queued;

    // Posting it takes no longer than handing it to another thread.
    bool is_short() const { return pieces.size() == 1 && pieces[0].bytes <= 4096; }
    bool has_imm(size_t piece) const { return imm && piece >= num_before_imms; }
    // What it has to post next must wait for what it has posted.
    bool is_waiting() const { return num_posted == num_before_imms && num_arrived < num_before_imms; }
    bool has_more() const { return num_posted < pieces.size() && result.outcome == Outcome::done; }
    bool is_over() const { return num_ended == num_posted && !has_more(); }
    std::string progress() const {
        return std::to_string(num_posted) + " of " + std::to_string(pieces.size()) + " writes were posted, " +
               std::to_string(num_arrived) + " confirmed";
    }
};

}  // namespace tracekern
