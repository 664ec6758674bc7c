// How a kernel reaches another rank: its heap is mapped here, or a transport moves bytes there. Which of the two a rank
// is may differ from rank to rank; the types that a kernel has to choose from are known when it is compiled.
//
//   MappedPeer              stores arrive as the kernel made them
//   TransportPeer           takes puts: bytes for the peer's heap, then a word there. The word is visible only after
//                           its own put's bytes; nothing is said about other puts. One of a CommandRing is reached
//                           over a network: see comm/proxy_peer.h
//
// with_peer(comm, rank, use) calls use(peer) with the right one. Places at a peer are offsets in its heap.
#pragma once

#include "comm/heap.h"

namespace tracekern {

class MappedPeer {
public:
    static constexpr bool kIsMapped = true;
    TK_DEVICE MappedPeer(const CommArgs& comm, uint32_t rank) : comm_(comm), rank_(rank) {}

    template <class T>
    TK_DEVICE T* at(uint64_t offset) const {
        return comm_.at<T>(rank_, offset);
    }
    TK_DEVICE uint32_t own_rank() const { return comm_.rank; }

private:
    const CommArgs& comm_;
    const uint32_t rank_;
};

// Without a payload where nothing is said of one.
struct Put {
    uint32_t peer = 0;          // TransportPeer::put() fills it in
    uint32_t bytes = 0;         // of the payload
    const void* src = nullptr;  // as it is until the peer has told that it read what came
    uint64_t dst = 0;
    uint64_t word_at;
    uint64_t word;
    uint32_t word_bytes = sizeof(uint64_t);  // or of 32 bits
    bool keeps_ahead = false;                // the word there stays where it is ahead, see is_ahead()
    bool releases = false;                   // the word comes after the payload, and after what this rank did before
};

// What kernels get where ranks of one node map each other's heaps, and a transport reaches the others.
template <class Transport>
struct RoutedArgs : CommArgs {
    Transport* transport;

    TK_DEVICE bool is_mapped(uint32_t peer) const { return heap[peer] != nullptr; }
};

template <class Transport>
class TransportPeer {
public:
    static constexpr bool kIsMapped = false;
    TK_DEVICE TransportPeer(const RoutedArgs<Transport>& comm, uint32_t rank) : comm_(comm), rank_(rank) {}

    // One lane's.
    TK_DEVICE void put(Put put) const {
        put.peer = rank_;
        comm_.transport->post(put);
    }
    // Where a word of this rank's own heap is in every rank's.
    TK_DEVICE uint64_t place_of(const void* own) const {
        return static_cast<uint64_t>(static_cast<const char*>(own) - comm_.heap[comm_.rank]);
    }
    TK_DEVICE HeapControl& own_control() const { return comm_.control(comm_.rank); }
    TK_DEVICE uint32_t own_rank() const { return comm_.rank; }

private:
    const RoutedArgs<Transport>& comm_;
    const uint32_t rank_;
};

// A word of a peer that a transport reaches.
template <class Transport>
struct FarWord {
    TransportPeer<Transport> peer;
    uint64_t place;
};

// The control word of a peer that this rank writes.
TK_DEVICE uint64_t* control_word(const MappedPeer& peer, ControlWord which, uint64_t epoch = 0) {
    return peer.at<HeapControl>(0)->word(which, peer.own_rank(), epoch);
}
template <class Transport>
TK_DEVICE FarWord<Transport> control_word(const TransportPeer<Transport>& peer, ControlWord which, uint64_t epoch = 0) {
    return {peer, peer.place_of(peer.own_control().word(which, peer.own_rank(), epoch))};
}

template <class Use>
TK_DEVICE void with_peer(const CommArgs& comm, uint32_t rank, Use use) {
    use(MappedPeer(comm, rank));
}
template <class Transport, class Use>
TK_DEVICE void with_peer(const RoutedArgs<Transport>& comm, uint32_t rank, Use use) {
    if (comm.is_mapped(rank)) {
        use(MappedPeer(comm, rank));
    } else {
        use(TransportPeer<Transport>(comm, rank));
    }
}

}  // namespace tracekern
