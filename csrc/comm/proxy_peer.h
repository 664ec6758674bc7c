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

    // n: its value; of a flag. One lane's.
    TK_DEVICE bool tell(Warp& warp, uint64_t epoch, uint32_t n) const {
        return post_word(warp, {.epoch = static_cast<uint32_t>(epoch), .n = n}, 0, 0);
    }
    // The word itself, which is no flag.
    TK_DEVICE bool store(Warp& warp, uint64_t word) const { return post_word(warp, {}, sizeof(word), word); }

private:
    TK_DEVICE bool post_word(Warp& warp, Immediate imm, uint32_t bytes, uint64_t value) const {
        imm.kind = PutKind::word;
        imm.which = static_cast<uint32_t>(which);
        Command command{};
        command.imm = pack_immediate(imm);
        command.bytes = bytes;
        command.peer = static_cast<uint16_t>(rank);
        command.carries_value = bytes != 0;
        command.src = value;
        command.dst = (uint64_t{comm.rank} * kNumControlWords + imm.which) * sizeof(uint64_t);
        return post(warp, comm, *comm.transport, command, kRankBarrierStage);
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
    warp.leader([&] { flag.tell(warp, epoch, value); });
}
TK_DEVICE void store_word(Warp& warp, const ProxyWord& at, uint64_t word) {
    at.store(warp, word);
}

}  // namespace tracekern
