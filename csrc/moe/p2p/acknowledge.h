// The acknowledgement of a call's receive buffers: raised by their owner once it has read them, waited for by every
// writer before its next call writes them anew.
#pragma once

#include "comm/signal.h"
#include "moe/p2p/events.h"
#include "moe/p2p/layout.h"
#include "trace/recorder.h"

namespace tracekern {

// What `peer` sent was read: it may send anew. Relaxed: the flag orders nothing, see its callers.
template <class Rec>
TK_DEVICE void acknowledge(Warp& warp, const P2PArgs& args, Rec& recorder, uint32_t epoch, uint32_t peer) {
    TK_SIGNAL(recorder, P2PEvent::signal_ack, peer);
    signal_relaxed(warp, args.ack_flag(peer, args.comm.rank), epoch, 0);
}

// My peers may overwrite their part of my receive buffer and of my counts. The first block. Relaxed is enough: both
// were read in an earlier kernel, the peer writes in a later one, and its results, which are released, order every row.
template <class Rec>
TK_DEVICE void acknowledge_all(Warp& warp, const P2PArgs& args, Rec& recorder, uint32_t epoch) {
    for (uint32_t i = warp.warp; i < args.shape.num_ranks; i += warp.num_warps) {
        acknowledge(warp, args, recorder, epoch, args.comm.nth_peer(i));
    }
}

// Everybody has read what I sent: the next call may overwrite it. All warps of one block.
template <class Rec>
TK_DEVICE void wait_acknowledged(Warp& warp, const P2PArgs& args, Rec& recorder, uint32_t epoch, P2PStage stage) {
    for (uint32_t i = warp.warp; i < args.shape.num_ranks; i += warp.num_warps) {
        const uint32_t peer = args.comm.nth_peer(i);
        TK_WAIT(recorder, P2PEvent::wait_ack, peer);
        const WaitFor wait_for{static_cast<uint32_t>(stage), peer, 0};
        const uint64_t* flag = args.ack_flag(args.comm.rank, peer);
        [[maybe_unused]] const bool arrived = wait<P2PChannel::ack>(warp, args.comm, flag, epoch, wait_for).ok;
        TK_END_IF(arrived);
    }
}

}  // namespace tracekern
