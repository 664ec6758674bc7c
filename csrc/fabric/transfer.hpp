// A transfer: what was asked for, cut into the writes that are posted, and what has become of them.
#pragma once

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

struct TransferPiece {
    uint32_t domain;
    uint64_t src, dst;  // offsets in the regions
    uint64_t bytes;
};

struct Transfer {
    std::shared_ptr<MemoryRegion> src;  // none where nothing is read
    MemoryRegionDescriptor dst;
    std::vector<TransferPiece> pieces;
    std::optional<uint32_t> imm;  // with each piece
    OnDone on_done;
    uint64_t number = 0;     // of the engine, counted from 1
    TimePoint until;         // then it is stalled
    uint64_t submitted = 0;  // HostTrack::now() where it is recorded

    // The worker's, once it was submitted.
    Peer* peer = nullptr;  // from when it starts
    size_t place = 0;      // among those that have started
    uint64_t num_posted = 0, num_ended = 0, num_arrived = 0;
    Result result;             // the first thing that went wrong: then no more is posted
    bool is_reported = false;  // on_done was called: what still comes is counted, nothing else
    RecordedSpan whole, queued;

    // Posting it takes no longer than handing it to another thread.
    bool is_short() const { return pieces.size() == 1 && pieces[0].bytes <= 4096; }
    bool has_more() const { return num_posted < pieces.size() && result.outcome == Outcome::done; }
    bool is_over() const { return num_ended == num_posted && !has_more(); }
    std::string progress() const {
        return std::to_string(num_posted) + " of " + std::to_string(pieces.size()) + " writes were posted, " +
               std::to_string(num_arrived) + " confirmed";
    }
};

// The part of `bytes` that shard `shard` of so many has, [begin, end): in whole lines of 64 bytes but the last. Later
// ones may have none.
inline std::pair<uint64_t, uint64_t> shard_range(uint64_t bytes, uint32_t shard, uint32_t num_shards) {
    constexpr uint64_t kLine = 64;
    const uint64_t lines = (bytes + kLine - 1) / kLine;
    const uint64_t share = (lines + num_shards - 1) / num_shards * kLine;
    const uint64_t begin = std::min(shard * share, bytes);
    return {begin, std::min(begin + share, bytes)};
}

// A write of `bytes` in shards, one a domain, beginning with first_domain. A shard without bytes goes to offset 0: its
// immediate counts as well.
inline std::vector<TransferPiece> cut_write(
    uint64_t src, uint64_t dst, uint64_t bytes, uint32_t num_shards, uint32_t num_domains, uint32_t first_domain) {
    std::vector<TransferPiece> pieces;
    for (uint32_t shard = 0; shard < num_shards; ++shard) {
        const auto [begin, end] = shard_range(bytes, shard, num_shards);
        const uint32_t domain = (first_domain + shard) % num_domains;
        const bool is_empty = begin == end;
        pieces.push_back({domain, is_empty ? 0 : src + begin, is_empty ? 0 : dst + begin, end - begin});
    }
    return pieces;
}

// Pages of memory: page i is `page_bytes` at offset + indices[i] * stride.
struct PageList {
    std::vector<uint64_t> indices;
    uint64_t stride = 0;
    uint64_t offset = 0;
};

// A write a page, domain by domain.
inline std::vector<TransferPiece> cut_pages(
    const PageList& src, const PageList& dst, uint64_t page_bytes, uint32_t num_domains, uint32_t first_domain) {
    std::vector<TransferPiece> pieces;
    pieces.reserve(src.indices.size());
    for (size_t i = 0; i < src.indices.size(); ++i) {
        pieces.push_back({static_cast<uint32_t>((first_domain + i) % num_domains),
                          src.offset + src.indices[i] * src.stride,
                          dst.offset + dst.indices[i] * dst.stride,
                          page_bytes});
    }
    return pieces;
}

}  // namespace tracekern
