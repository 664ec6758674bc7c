// A rank that a network reaches: its proxy writes there what kernels ask for in a ring of commands.
#pragma once

#include "comm/command.h"
#include "comm/peer.h"

namespace tracekern {

// A word of the peer's HeapControl.
struct ProxyWord {
    const RoutedArgs<CommandRing>& comm;
    uint32_t rank;
    ControlWord which;

    // One lane's.
    TK_DEVICE void send(Warp& warp, const Command& command) const {
        post(warp, comm, *comm.transport, command, kRankBarrierStage);
    }
};

template <>
class TransportPeer<CommandRing> {
public:
    static constexpr bool kIsMapped = false;
    TK_DEVICE TransportPeer(const RoutedArgs<CommandRing>& comm, uint32_t rank) : comm_(comm), rank_(rank) {}

    TK_DEVICE ProxyWord word(ControlWord which) const { return {comm_, rank_, which}; }

private:
    const RoutedArgs<CommandRing>& comm_;
    const uint32_t rank_;
};

TK_DEVICE ProxyWord control_word(const TransportPeer<CommandRing>& peer, ControlWord which, uint64_t = 0) {
    return peer.word(which);
}

// The proxy tells them: it sees this rank's fault.
TK_DEVICE void tell_abort(const TransportPeer<CommandRing>&, uint64_t) {}

template <auto kChannel>
TK_DEVICE void signal(Warp& warp, const ProxyWord& flag, uint64_t epoch, uint32_t value) {
    perturb(warp);
    // leader() orders what all lanes wrote before it.
    warp.leader([&] { flag.send(warp, flag_command(flag.rank, flag.which, epoch, value)); });
}
TK_DEVICE void store_word(Warp& warp, const ProxyWord& at, uint64_t word) {
    at.send(warp, word_command(at.comm.rank, at.rank, at.which, word));
}

}  // namespace tracekern
