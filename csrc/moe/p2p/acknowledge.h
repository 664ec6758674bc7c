// The acknowledgement of a call's receive buffers: raised by their owner once it has read them, waited for by every
// writer before its next call writes them anew.
#pragma once

#include "moe/p2p/events.h"
#include "moe/p2p/layout.h"

namespace tracekern {

// What `peer` sent was read: it may send anew. Relaxed: the flag orders nothing, see its callers.
template <class Rec>
TK_DEVICE void acknowledge(P2PContext<Rec>& context, uint32_t peer) {
    TK_SIGNAL(context.recorder, P2PEvent::signal_ack, peer);
    signal_relaxed(context.warp, context.args.ack_flag(peer, context.comm.rank), context.epoch, 0);
}

// My peers may overwrite their part of my receive buffer and of my counts. The first block. Relaxed is enough: both
// were read in an earlier kernel, the peer writes in a later one, and its results, which are released, order every row.
template <class Rec>
TK_DEVICE void acknowledge_all(P2PContext<Rec>& context) {
    for_peers_of_warp(context, [&](uint32_t peer) { acknowledge(context, peer); });
}

// Everybody has read what I sent: the next call may overwrite it. All warps of one block.
template <class Rec>
TK_DEVICE void wait_acknowledged(P2PContext<Rec>& context) {
    for_peers_of_warp(context, [&](uint32_t peer) {
        const uint64_t* flag = context.args.ack_flag(context.comm.rank, peer);
        traced_wait<P2PChannel::ack, P2PEvent::wait_ack>(context, flag, peer);
    });
}

}  // namespace tracekern
