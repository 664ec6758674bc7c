// What immediates of ranks of other hosts mean to the two-hop kernels: which flag of this rank each raises. For the
// proxy's thread.
#pragma once

#include <set>
#include <vector>

#include "comm/proxy_side.hpp"
#include "moe/two_hop/layout.h"

namespace tracekern {

// A head lets kernels write anew what was sent from the outgoing part of a ring. So it is passed on when the writes of
// that are complete, too: a peer may tell that it has read a chunk before this rank's network says so.
class TwoHopInbox {
public:
    explicit TwoHopInbox(const TwoHopArgs<FarArgs>& args)
        : args_(args),
          latest_(args.nodes.num_nodes, kNeverEpoch),
          rings_(size_t{2} * args.nodes.num_nodes * args.num_channels) {}

    // False: no rank that keeps to the protocol sends this.
    bool take(uint32_t source, const Immediate& imm) {
        const uint32_t node = args_.nodes.node_of(source), channel = imm.which;
        if (source != args_.rank_in(node) || channel >= args_.num_channels) return false;
        const uint64_t epoch = take_epoch(latest_[node], imm);
        if (epoch == kNeverEpoch) return false;
        switch (imm.kind) {
            case PutKind::count:
                take_counts(node, epoch, imm.n != 0);
                return true;
            case PutKind::message:
                raise<TwoHopChannel::meta>(node, args_.meta_flag(channel, node), make_flag(epoch, 0));
                return true;
            case PutKind::chunk:
                if (imm.n == 0) return false;
                raise<TwoHopChannel::tail>(node, args_.tail_flag(channel, node, imm.n - 1), make_flag(epoch, imm.n));
                return true;
            case PutKind::head: {
                Ring& ring = ring_of(node, channel, epoch);
                ring.head = keep_largest<TwoHopChannel::head>(ring.head, imm.n);
                pass_head(node, channel, ring);
                return true;
            }
            default:
                return false;
        }
    }

    void complete(uint32_t peer, const Immediate& imm) {
        if (imm.kind != PutKind::chunk) return;
        const uint32_t node = args_.nodes.node_of(peer), chunk = args_.rings.rdma_chunk;
        Ring& ring = ring_of(node, imm.which, nearest_epoch(latest_[node], imm.epoch));
        ring.complete_chunks.insert(imm.n);
        // The first that is not complete ends with its chunk, or is the last and shorter.
        for (auto next = ring.complete_chunks.begin();
             next != ring.complete_chunks.end() && (*next - 1) / chunk * chunk == ring.complete;
             next = ring.complete_chunks.erase(next)) {
            ring.complete = *next;
        }
        pass_head(node, imm.which, ring);
    }

private:
    // What this rank sends to a node through a channel, in a call.
    struct Ring {
        uint64_t epoch = kNeverEpoch;
        uint32_t head = 0;                   // positions that the peer has read
        uint32_t complete = 0;               // positions before which all writes are complete
        std::set<uint32_t> complete_chunks;  // behind it, by their ends
    };

    Ring& ring_of(uint32_t node, uint32_t channel, uint64_t epoch) {
        const uint64_t place = (epoch % 2 * args_.nodes.num_nodes + node) * args_.num_channels + channel;
        if (rings_[place].epoch != epoch) rings_[place] = {epoch, 0, 0, {}};
        return rings_[place];
    }
    void pass_head(uint32_t node, uint32_t channel, const Ring& ring) {
        const uint32_t head = std::min(ring.head, ring.complete);
        if (head == 0) return;
        raise<TwoHopChannel::head>(node, args_.head_flag(channel, node), make_flag(ring.epoch, head));
    }
    // Without counts the write brings what is told in their place.
    void take_counts(uint32_t node, uint64_t epoch, bool is_told) {
        const uint32_t parity = static_cast<uint32_t>(epoch % 2);
        const uint64_t told = is_told ? *args_.from_node<uint64_t>(node, args_.counts_at(parity, node)) : 0;
        const uint64_t flag = args_.counts_flag(parity, node);
        raise<TwoHopChannel::counts>(node, flag, make_flag(epoch, static_cast<uint32_t>(told)));
    }
    template <TwoHopChannel kChannel>
    void raise(uint32_t node, uint64_t flag, uint64_t value) {
        raise_flag<kChannel>(args_.from_node<uint64_t>(node, flag), value);
    }

    const TwoHopArgs<FarArgs> args_;  // its call is nobody's
    std::vector<uint64_t> latest_;    // [node] epoch
    std::vector<Ring> rings_;         // [epoch parity][node][channel]
};

}  // namespace tracekern
