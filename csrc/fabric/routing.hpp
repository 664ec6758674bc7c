// Cuts what was asked for into writes, and spreads them over the domains of an engine.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "fabric/transfer.hpp"

namespace tracekern {

// Through which domains the writes to one peer go.
struct DomainGroupRouting {
    uint32_t num_shards = 0;         // over so many domains, in turn; 0: all
    std::optional<uint32_t> pinned;  // through this one alone
};

// Through which domains the writes to the peers of a group go.
struct GroupTransferRouting {
    enum class Kind : uint32_t {
        shard_peers,  // all of a peer's through one, another for the next peer
        shard_bytes,  // a part of each peer's through each
        single,       // all through one
    };
    Kind kind = Kind::shard_peers;
    uint32_t domain = 0;  // single
};

// A request's domains: `count` of `num_domains`, beginning with `first`.
struct Spread {
    uint32_t first, count, num_domains;

    uint32_t domain(uint64_t turn) const {
        return num_domains == 1 ? 0 : static_cast<uint32_t>((first + turn % count) % num_domains);
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

// A write of `bytes` in shards, one a domain. A shard without bytes goes to offset 0: its immediate counts as well.
inline void cut_write(
    uint64_t src, uint64_t dst, uint64_t bytes, uint32_t target, Spread spread, std::vector<TransferPiece>& pieces) {
    for (uint32_t shard = 0; shard < spread.count; ++shard) {
        const auto [begin, end] = shard_range(bytes, shard, spread.count);
        const bool is_empty = begin == end;
        pieces.push_back(
            {target, spread.domain(shard), is_empty ? 0 : src + begin, is_empty ? 0 : dst + begin, end - begin});
    }
}

// Pages of memory: page i is `page_bytes` at offset + indices[i] * stride.
struct PageList {
    std::vector<uint64_t> indices;
    uint64_t stride = 0;
    uint64_t offset = 0;
};

// A write a page, domain by domain.
inline std::vector<TransferPiece> cut_pages(const PageList& src,
                                            const PageList& dst,
                                            uint64_t page_bytes,
                                            Spread spread) {
    std::vector<TransferPiece> pieces;
    pieces.reserve(src.indices.size());
    for (size_t i = 0; i < src.indices.size(); ++i) {
        pieces.push_back({0,
                          spread.domain(i),
                          src.offset + src.indices[i] * src.stride,
                          dst.offset + dst.indices[i] * dst.stride,
                          page_bytes});
    }
    return pieces;
}

// What one peer of a group gets.
struct ScatterSlice {
    uint64_t bytes, src, dst;
};

// A write a peer, or one a peer and domain. first_domain: where spreading begins.
inline std::vector<TransferPiece> cut_scatter(const std::vector<ScatterSlice>& slices,
                                              GroupTransferRouting routing,
                                              uint32_t num_domains,
                                              uint32_t first_domain) {
    using Kind = GroupTransferRouting::Kind;
    std::vector<TransferPiece> pieces;
    for (uint32_t target = 0; target < slices.size(); ++target) {
        Spread spread{routing.domain, 1, num_domains};
        if (routing.kind == Kind::shard_peers) spread.first = (first_domain + target) % num_domains;
        if (routing.kind == Kind::shard_bytes) spread = {first_domain, num_domains, num_domains};
        cut_write(slices[target].src, slices[target].dst, slices[target].bytes, target, spread, pieces);
    }
    return pieces;
}

// Cuts writes that are longer than `most`. Returns how many of the pieces are to arrive first: with an immediate the
// last part of each write, which has it, comes after all others.
inline size_t cut_to(uint64_t most, bool has_imm, std::vector<TransferPiece>& pieces) {
    const auto is_long = [most](const TransferPiece& piece) { return piece.bytes > most; };
    if (std::none_of(pieces.begin(), pieces.end(), is_long)) return 0;
    std::vector<TransferPiece> first, last;
    for (TransferPiece piece : pieces) {
        for (; is_long(piece); piece.src += most, piece.dst += most, piece.bytes -= most) {
            first.push_back(piece);
            first.back().bytes = most;
        }
        last.push_back(piece);
    }
    pieces = std::move(first);
    const size_t num_first = pieces.size();
    pieces.insert(pieces.end(), last.begin(), last.end());
    return has_imm ? num_first : 0;
}

}  // namespace tracekern
