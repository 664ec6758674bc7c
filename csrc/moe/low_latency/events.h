// What the low latency kernels record. An expert of a message is numbered over all ranks; `local_expert` is its number
// on its own rank. `token` is always the token's index at the rank that it came from, and `slot` its place in the
// receive buffer of its (local expert, source rank) pair. At `wait_group` sub-warps meet for the rows that the second
// one has claimed, `begin` is the first; where they, or the warps of a token, share work it is `wait_sub_warps`. A
// `wait_results` is for all results of a token: it begins with the first of them and ends with the one that came last.
// A `send_result` is of a row or a part of it, as many vectors of 16 bytes. `wait_rank` waits for the results of a
// rank's first expert, also where no token needs them. `combine` is 1 for the first combine of a handle; a `signal_ack`
// names the one that is over, 0 if the handle was dropped without one.
#pragma once

#include "comm/mutation.h"
#include "trace/events.h"

// clang-format off
#define TK_LOW_LATENCY_EVENTS(EVENT)                                                                                                                   \
    EVENT(cast_token,       work,   issue,      "",                                  "token:16",                            "")                        \
    EVENT(send_message,     work,   issue,      "",                                  "peer:10 expert:13 slot:16",           "token:16")                \
    EVENT(signal_message,   signal, completion, "message data local_expert slot",    "peer:10 local_expert:13 slot:16",     "")                        \
    EVENT(signal_count,     signal, completion, "count data local_expert",           "peer:10 local_expert:13",             "tokens:16")               \
    EVENT(wait_count,       wait,   completion, "count data local_expert",           "peer:10 local_expert:13",             "tokens:16")               \
    EVENT(wait_group,       wait,   completion, "rows group src_rank local_expert",  "src_rank:10 local_expert:13",         "begin:22", 2)             \
    EVENT(wait_sub_warps,   wait,   completion, "sub_warps group barrier",           "barrier:4",                           "", 2)                     \
    EVENT(wait_message,     wait,   completion, "message data local_expert slot",    "peer:10 local_expert:13 slot:16",     "")                        \
    EVENT(copy_token,       work,   issue,      "",                                  "src_rank:10 local_expert:13 slot:16", "token:16")                \
    EVENT(scale_token,      work,   issue,      "",                                  "local_expert:13 row:22",              "")                        \
    EVENT(dequantise_token, work,   issue,      "",                                  "local_expert:13 row:22",              "")                        \
    EVENT(send_result,      work,   issue,      "",                                  "peer:10 local_expert:13",             "token:16 vectors:14")     \
    EVENT(signal_results,   signal, completion, "results data local_expert combine", "peer:10 local_expert:13 combine:8",   "tokens:16")               \
    EVENT(wait_results,     wait,   completion, "results data local_expert combine", "peer:10 local_expert:13 combine:8",   "peer:10 local_expert:13") \
    EVENT(wait_rank,        wait,   completion, "results data local_expert combine", "peer:10 local_expert:13 combine:8",   "")                        \
    EVENT(reduce_token,     work,   issue,      "",                                  "token:16",                            "")                        \
    EVENT(stage_message,    work,   issue,      "",                                  "token:16",                            "")                        \
    EVENT(wait_sent,        wait,   completion, "",                                  "slot:1",                              "")                        \
    EVENT(wait_command_room, wait,  completion, "",                                  "peer:10",                             "")                        \
    EVENT(signal_ack,       signal, completion, "ack data combine",                  "peer:10 combine:8",                   "")                        \
    EVENT(wait_ack,         wait,   completion, "ack data combine",                  "peer:10 combine:8",                   "")
// clang-format on
TK_DEFINE_EVENTS(LowLatencyEvent, TK_LOW_LATENCY_EVENTS)

namespace tracekern {

constexpr uint32_t kCombineMask = 0xff;  // what events keep of a combine's number

// The last warp of a block that sends counts tokens, the others cast and send them; those of dispatch then receive.
enum class LowLatencyRole : uint32_t { count, dispatch, scale, dequantise, combine };
inline constexpr const char* kLowLatencyRoleNames[] = {"count", "dispatch", "scale", "dequantise", "combine"};

enum class LowLatencyChannel : uint32_t { message = kFirstOwnChannel, count, results, any_result, ack };
inline constexpr const char* kLowLatencyChannelNames[] = {"message", "count", "results", "any_result", "ack"};

enum class LowLatencyStage : uint32_t {
    dispatch,
    dispatch_send,
    dispatch_recv,
    scale_experts,
    dequantise,
    combine,
    combine_send,
    combine_recv,
};
inline constexpr const char* kLowLatencyStageNames[] = {"dispatch",
                                                        "dispatch_send",
                                                        "dispatch_recv",
                                                        "scale_experts",
                                                        "dequantise",
                                                        "combine",
                                                        "combine_send",
                                                        "combine_recv"};

}  // namespace tracekern
