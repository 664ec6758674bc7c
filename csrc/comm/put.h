// Signals to a peer, with a payload or without, whichever way it is reached. See comm/peer.h for what may be relied on.
#pragma once

#include "comm/signal.h"

namespace tracekern {

// Copies `bytes` from `src` to `dst` at the peer and raises the flag there.
template <auto kChannel>
TK_DEVICE void put_signal(Warp& warp,
                          const MappedPeer& to,
                          uint64_t dst,
                          const void* src,
                          uint32_t bytes,
                          uint64_t flag,
                          uint64_t epoch,
                          uint32_t value) {
    copy_row(warp, to.at<char>(dst), src, bytes);
    signal<kChannel>(warp, to.at<uint64_t>(flag), epoch, value);
}
template <auto kChannel, class Transport>
TK_DEVICE void put_signal(Warp& warp,
                          const TransportPeer<Transport>& to,
                          uint64_t dst,
                          const void* src,
                          uint32_t bytes,
                          uint64_t flag,
                          uint64_t epoch,
                          uint32_t value) {
    perturb(warp);
    const bool releases = !mutated(kChannel, Mutation::release);
    // leader() orders what all lanes wrote before it.
    warp.leader([&] {
        to.put({.bytes = bytes,
                .src = src,
                .dst = dst,
                .word_at = flag,
                .word = make_flag(epoch, value),
                .releases = releases});
    });
}

// Raises a flag. It may come after others of this rank that are raised later.
template <auto kChannel, class Transport>
TK_DEVICE void signal(Warp& warp, const FarWord<Transport>& flag, uint64_t epoch, uint32_t value) {
    put_signal<kChannel>(warp, flag.peer, 0, nullptr, 0, flag.place, epoch, value);
}

// Raises a flag that counts: what it says only grows within an epoch, and it stays where it is ahead already.
template <auto kChannel>
TK_DEVICE void signal_max(Warp& warp, const MappedPeer& to, uint64_t flag, uint64_t epoch, uint32_t value) {
    signal<kChannel>(warp, to.at<uint64_t>(flag), epoch, value);  // one writer: its stores to one word come in order
}
template <auto kChannel, class Transport>
TK_DEVICE void signal_max(
    Warp& warp, const TransportPeer<Transport>& to, uint64_t flag, uint64_t epoch, uint32_t value) {
    perturb(warp);
    const bool releases = !mutated(kChannel, Mutation::release);
    const bool keeps_ahead = !mutated(kChannel, Mutation::maximum);
    warp.leader([&] {
        to.put({.word_at = flag, .word = make_flag(epoch, value), .keeps_ahead = keeps_ahead, .releases = releases});
    });
}

// Stores a word that is no flag and orders nothing. One lane's.
TK_DEVICE void store_word(Warp&, uint64_t* at, uint64_t word) {
    store_relaxed_system(at, word);
}
template <class Transport>
TK_DEVICE void store_word(Warp&, const FarWord<Transport>& at, uint64_t word) {
    at.peer.put({.word_at = at.place, .word = word});
}

}  // namespace tracekern
