// How a rank reaches the rank of its place in another node: it stores there, or, where that is on another host, it asks
// its proxy for a write (comm/proxy_peer.h). Which flag an immediate raises there: see inbox.hpp.
//
// What a rank put in call e - 1 has arrived before it tells anybody that this call is over. So what is under way from a
// rank is of two calls at most, and no epoch is taken for another.
#pragma once

#include "moe/two_hop/layout.h"

namespace tracekern {

// What comes with a flag, to a place at the other rank: a copy of outgoing bytes of this one, or src itself, which is
// told in the flag where no network lies between.
struct OutgoingBytes {
    uint64_t src = 0, dst = 0;
    uint32_t bytes = 0;
    bool carries_value = false;
};

// Raises a flag at the rank in `node` behind the bytes. Released. imm: kind, which and n, for a rank of another host.
// False: gave up.
template <auto kChannel, class Rec, class Comm>
TK_DEVICE bool put_to_node(TwoHopContext<Rec, Comm>& context,
                           uint32_t node,
                           const Immediate& imm,
                           uint64_t flag,
                           uint32_t value,
                           const OutgoingBytes& from = {}) {
    Warp& warp = context.warp;
    const TwoHopArgs<Comm>& args = context.args;
    const uint32_t rank = args.rank_in(node);
    if (!is_far(context, rank)) {
        const Scope scope = rank == args.comm.rank ? Scope::device : Scope::ranks;
        if (!from.carries_value) {
            copy_row(warp, args.comm.template at<char>(rank, from.dst), args.template own<char>(from.src), from.bytes);
        }
        signal<kChannel>(warp, args.comm.template at<uint64_t>(rank, flag), context.epoch, value, scope);
        return true;
    }
    if constexpr (kIsFar<Comm>) {
        warp.leader([&] { add_relaxed_device(&args.state->num_posted.word, uint64_t{1}); });
        Command command{};
        command.imm = pack_immediate({imm.kind, 0, static_cast<uint32_t>(context.epoch), imm.which, imm.n});
        command.bytes = from.bytes;
        command.peer = static_cast<uint16_t>(rank);
        command.tag = kPutTag;
        command.carries_value = from.carries_value;
        command.src = from.src;
        command.dst = from.dst;
        return post<TwoHopEvent::wait_command_room>(context, command, rank);
    } else {
        return true;
    }
}

// Waits until all that this rank put before has arrived. False: gave up.
template <class Rec, class Comm>
TK_DEVICE bool wait_puts(TwoHopContext<Rec, Comm>& context) {
    if constexpr (kIsFar<Comm>) {
        return wait_sent<TwoHopEvent::wait_puts>(context, kPutTag, &context.args.state->num_posted.word);
    } else {
        return true;
    }
}

}  // namespace tracekern
