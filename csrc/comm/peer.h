// How a kernel reaches another rank: its heap is mapped here, or a network lies between. Which of the two a rank is may
// differ from rank to rank; the types that a kernel has to choose from are known when it is compiled.
//
//   MappedPeer   stores arrive as the kernel made them
//   FarPeer      is asked for writes, each with an immediate that tells of its own bytes and of nothing else: see
//                comm/proxy_peer.h
//
// with_peer(comm, rank, use) calls use(peer) with the right one. Places at a peer are offsets in its heap.
#pragma once

#include "comm/heap.h"

namespace tracekern {

class MappedPeer {
public:
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

// The control word of a peer that this rank writes.
TK_DEVICE uint64_t* control_word(const MappedPeer& peer, ControlWord which, uint64_t epoch = 0) {
    return peer.at<HeapControl>(0)->word(which, peer.own_rank(), epoch);
}

// The control word of this rank that `source` writes.
template <class Comm>
TK_DEVICE const uint64_t* own_word(const Comm& comm, ControlWord which, uint32_t source, uint64_t epoch = 0) {
    return comm.template written_by<HeapControl>(source, comm.rank, 0)->word(which, source, epoch);
}

template <class Use>
TK_DEVICE void with_peer(const CommArgs& comm, uint32_t rank, Use use) {
    use(MappedPeer(comm, rank));
}

}  // namespace tracekern
