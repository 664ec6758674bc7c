// What the two-hop kernels call their roles, flags, rings and stages, in records and in faults.
#pragma once

#include "comm/mutation.h"

namespace tracekern {

// In a fault record, and as rows of a trace: one for each warp.
enum class TwoHopRole : uint32_t {
    notify,
    rdma_sender,
    sender_coordinator,
    nvl_receiver,
    forwarder,
    forwarder_coordinator,
    spare,
    nvl_sender,
    node_reducer,
    rdma_receiver,
    receiver_coordinator,
};
inline constexpr const char* kTwoHopRoleNames[] = {"notify",
                                                   "rdma_sender",
                                                   "sender_coordinator",
                                                   "nvl_receiver",
                                                   "forwarder",
                                                   "forwarder_coordinator",
                                                   "spare",
                                                   "nvl_sender",
                                                   "node_reducer",
                                                   "rdma_receiver",
                                                   "receiver_coordinator"};

// Flags between ranks: counts to return_head. In the shared memory of a block: lock to returned.
enum class TwoHopChannel : uint32_t {
    counts = kFirstOwnChannel,
    peer_counts,
    meta,
    tail,
    head,
    prefix,
    peer_tail,
    peer_head,
    return_tail,
    return_head,
    lock,
    ready,
    forwarded,
    summed,
    reduced,
    sent,
    received,
    returned,
    host_counts,
};
inline constexpr const char* kTwoHopChannelNames[] = {"counts",
                                                      "peer_counts",
                                                      "meta",
                                                      "tail",
                                                      "head",
                                                      "prefix",
                                                      "peer_tail",
                                                      "peer_head",
                                                      "return_tail",
                                                      "return_head",
                                                      "lock",
                                                      "ready",
                                                      "forwarded",
                                                      "summed",
                                                      "reduced",
                                                      "sent",
                                                      "received",
                                                      "returned",
                                                      "host_counts"};

// What a fault record calls a ring.
enum class TwoHopRing : uint32_t { rdma, nvl };
inline constexpr const char* kTwoHopRingNames[] = {"rdma", "nvl"};

// Why a kernel refuses a call; 0 is no reason. tracekern/moe/two_hop/settings.py has the texts.
enum class TwoHopRefusal : uint32_t { other_call = 1, overflow, out_of_bounds };
inline constexpr const char* kTwoHopRefusalNames[] = {"other_call", "overflow", "out_of_bounds"};

enum class TwoHopStage : uint32_t { notify_dispatch, dispatch, combine };
inline constexpr const char* kTwoHopStageNames[] = {"notify_dispatch", "dispatch", "combine"};

}  // namespace tracekern
