// A token as it travels, and how the buffers of channels lie in memory.
#pragma once

#include <cstdint>

#include "platform/qualifiers.h"

namespace tracekern {

// Behind the hidden values of each row: whence it came, and which peers of the node that it goes to want it, a bit
// each.
struct alignas(8) SourceMeta {
    uint32_t src_node;
    uint32_t peers;
};

// hidden values | SourceMeta | places | scales | topk_idx | topk_weights. What follows the values are words of 32 bits.
//
// Between nodes a place for each peer: which one of its node's rows the token is in the ring to that peer, -1: none. It
// is there that send_nvl_head comes from.
struct RowLayout {
    uint32_t hidden_bytes;
    uint32_t num_places;
    uint32_t num_scales;
    uint32_t topk;
    uint32_t bytes;

    static constexpr uint32_t kMetaWords = sizeof(SourceMeta) / sizeof(uint32_t);

    TK_HOST_DEVICE static constexpr RowLayout of(uint32_t hidden_bytes,
                                                 uint32_t num_places,
                                                 uint32_t num_scales,
                                                 uint32_t topk) {
        const uint32_t words = kMetaWords + num_places + num_scales + 2 * topk;
        return {hidden_bytes, num_places, num_scales, topk, (hidden_bytes + 4 * words + 15) / 16 * 16};
    }
    TK_HOST_DEVICE uint32_t num_words() const { return first_weight() + topk; }
    // Of the words behind the values.
    TK_HOST_DEVICE uint32_t first_place() const { return kMetaWords; }
    TK_HOST_DEVICE uint32_t first_scale() const { return first_place() + num_places; }
    TK_HOST_DEVICE uint32_t first_idx() const { return first_scale() + num_scales; }
    TK_HOST_DEVICE uint32_t first_weight() const { return first_idx() + topk; }

    TK_DEVICE uint32_t* words(char* row) const { return reinterpret_cast<uint32_t*>(row + hidden_bytes); }
};

// What a rank sends to each node and receives from each: one part a node in every channel. First all channels' send
// buffers, then all their receive buffers.
struct SymBuffer {
    uint64_t part_bytes;
    uint32_t num_nodes, num_channels;

    TK_HOST_DEVICE uint64_t send(uint32_t channel, uint32_t node) const {
        return (uint64_t{channel} * num_nodes + node) * part_bytes;
    }
    TK_HOST_DEVICE uint64_t recv(uint32_t channel, uint32_t node) const { return send(num_channels + channel, node); }
    TK_HOST_DEVICE uint64_t bytes() const { return send(2 * num_channels, 0); }
};

// What a rank receives from each peer of its node, who writes to it there: one part a peer in every channel.
struct AsymBuffer {
    uint64_t part_bytes;
    uint32_t num_peers, num_channels;

    TK_HOST_DEVICE uint64_t at(uint32_t channel, uint32_t peer) const {
        return (uint64_t{channel} * num_peers + peer) * part_bytes;
    }
    TK_HOST_DEVICE uint64_t bytes() const { return at(num_channels, 0); }
};

}  // namespace tracekern
