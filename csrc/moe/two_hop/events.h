// What the two-hop kernels record, and what they call their roles, flags, rings and stages in records and faults.
#pragma once

#include "comm/mutation.h"
#include "trace/events.h"

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

// What the two-hop kernels record, channel by channel of docs/two_hop.md. `channel` is the channel of a dispatch, and
// `node` the other end of a first-hop ring. Positions are tokens since the call began. Of heads the fields `value` and
// `wanted` are positions that there is room for: the head and the slots of the ring.
// clang-format off
#define TK_TWO_HOP_EVENTS(EVENT)                                                                                                                                                        \
    EVENT(count_channels,       work,   completion, "",                                                 "node:5",                                        "")                            \
    EVENT(signal_counts,        signal, completion, "counts data",                                      "peer:6",                                        "")                            \
    EVENT(wait_counts,          wait,   completion, "counts data",                                      "peer:6",                                        "tokens:24")                   \
    EVENT(signal_peer_counts,   signal, completion, "peer_counts data",                                 "peer:6",                                        "")                            \
    EVENT(wait_peer_counts,     wait,   completion, "peer_counts data",                                 "peer:6",                                        "")                            \
    EVENT(notify,               work,   completion, "",                                                 "",                                              "tokens:24")                   \
    EVENT(signal_meta,          signal, completion, "meta data channel",                                "peer:6 channel:6",                              "")                            \
    EVENT(wait_meta,            wait,   completion, "meta data channel",                                "peer:6 channel:6",                              "")                            \
    EVENT(wait_sequential_lock, wait,   completion, "lock count channel",                               "channel:6 wanted:20",                           "")                            \
    EVENT(pass_sequential_lock, signal, completion, "lock count channel",                               "channel:6 value:20",                            "")                            \
    EVENT(wait_ring_space,      wait,   completion, "head credit tail=tail channel",                    "peer:6 channel:6 wanted:20",                    "head:20")                     \
    EVENT(copy_to_ring,         work,   issue,      "",                                                 "token:20",                                      "nodes:6")                     \
    EVENT(signal_ready,         signal, completion, "ready count channel node",                         "channel:6 node:5 value:20",                     "")                            \
    EVENT(wait_chunk,           wait,   completion, "ready count channel node",                         "channel:6",                                     "node:5 wanted:20")            \
    EVENT(issue_put,            work,   issue,      "",                                                 "node:5 tokens:14",                              "")                            \
    EVENT(signal_tail,          signal, completion, "tail count channel",                               "peer:6 channel:6 value:20 tokens:14",           "")                            \
    EVENT(wait_tail,            wait,   completion, "tail count channel",                               "peer:6 channel:6",                              "peer:6 wanted:20")            \
    EVENT(signal_prefix,        signal, completion, "prefix data channel node",                         "peer:6 channel:6 node:5",                       "")                            \
    EVENT(wait_prefix,          wait,   completion, "prefix data channel node",                         "peer:6 channel:6 node:5",                       "")                            \
    EVENT(wait_peer_ring,       wait,   completion, "peer_head credit tail=peer_tail channel node",     "peer:6 channel:6 node:5 wanted:20",             "")                            \
    EVENT(forward_token,        work,   issue,      "",                                                 "src_node:5 token:20",                           "peers:4")                     \
    EVENT(send_token,           work,   issue,      "",                                                 "peer:6 token:20 slot:14",                       "")                            \
    EVENT(signal_forwarded,     signal, completion, "forwarded count channel node forwarder",           "channel:6 node:5 forwarder:5 value:20",         "")                            \
    EVENT(wait_forwarded,       wait,   completion, "forwarded count channel node forwarder",           "channel:6 node:5 forwarder:5 wanted:20",        "")                            \
    EVENT(return_credit,        signal, completion, "head credit tail=tail channel",                    "peer:6 channel:6 value:20",                     "")                            \
    EVENT(signal_peer_tail,     signal, completion, "peer_tail count channel node",                     "peer:6 channel:6 node:5 value:20",              "")                            \
    EVENT(wait_peer_tail,       wait,   completion, "peer_tail count channel node",                     "peer:6 channel:6",                              "node:5 wanted:20")            \
    EVENT(receive_token,        work,   issue,      "",                                                 "src_rank:6 slot:14",                            "row:24")                      \
    EVENT(return_peer_credit,   signal, completion, "peer_head credit tail=peer_tail channel node",     "peer:6 channel:6 node:5 value:20",              "")                            \
    EVENT(wait_return_ring,     wait,   completion, "return_head credit tail=return_tail channel node", "peer:6 channel:6",                              "node:5 wanted:20")            \
    EVENT(send_row,             work,   issue,      "",                                                 "peer:6 node:5 slot:14",                         "row:24")                      \
    EVENT(signal_return_tail,   signal, completion, "return_tail count channel node",                   "peer:6 channel:6 node:5 value:20",              "")                            \
    EVENT(wait_return_tail,     wait,   completion, "return_tail count channel node",                   "peer:6 channel:6 node:5",                       "peer:6 wanted:20")            \
    EVENT(sum_in_node,          work,   issue,      "",                                                 "node:5 token:20",                               "peers:4")                     \
    EVENT(signal_summed,        signal, completion, "summed count channel node summer",                 "channel:6 node:5 summer:5 value:20",            "")                            \
    EVENT(wait_summed,          wait,   completion, "summed count channel node summer",                 "channel:6 node:5 summer:5 wanted:20",           "")                            \
    EVENT(return_row_credit,    signal, completion, "return_head credit tail=return_tail channel node", "peer:6 channel:6 node:5 value:20",              "")                            \
    EVENT(reduce_token,         work,   issue,      "",                                                 "token:20",                                      "nodes:6")                     \
    EVENT(signal_reduced,       signal, completion, "reduced count channel receiver",                   "channel:6 receiver:3 value:20",                 "")                            \
    EVENT(wait_reduced,         wait,   completion, "reduced count channel receiver",                   "channel:6 receiver:3 wanted:20",                "")                            \
    EVENT(signal_sent,          signal, completion, "sent count channel target sender",                 "channel:6 target:3 sender:5 value:20",          "")                            \
    EVENT(wait_sent,            wait,   completion, "sent count channel target sender",                 "channel:6 target:3 sender:5 wanted:20",         "")                            \
    EVENT(signal_received,      signal, completion, "received count channel source receiver node",      "channel:6 source:3 receiver:5 node:5 value:20", "")                            \
    EVENT(wait_received,        wait,   completion, "received count channel source receiver node",      "channel:6 source:3",                            "node:5 receiver:5 wanted:20") \
    EVENT(signal_returned,      signal, completion, "returned count channel target sender node",        "channel:6 target:3 sender:5 node:5 value:20",   "")                            \
    EVENT(wait_returned,        wait,   completion, "returned count channel target sender node",        "channel:6 target:3",                            "node:5 sender:5 wanted:20")   \
    EVENT(wait_puts,            wait,   completion, "",                                                 "",                                              "")                            \
    EVENT(wait_command_room,    wait,   completion, "",                                                 "peer:6",                                        "")
// clang-format on
TK_DEFINE_EVENTS(TwoHopEvent, TK_TWO_HOP_EVENTS)
