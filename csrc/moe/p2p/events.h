// What the P2P kernels record. `slot` is the token's place in the receive buffer of its (source, destination) pair on
// the way out, and its flat index (token * topk + choice) at the source on the way back. Experts are numbered over all
// ranks. A row (deduplicated variants) goes once to a rank for all its `experts` there; a partial result is their sum,
// its slot the token's index at the source. A wait for a row takes the first that comes: it begins with the rank that
// it would take one from next and ends with the one that it took.
#pragma once

#include "comm/mutation.h"
#include "trace/events.h"

// clang-format off
#define TK_P2P_EVENTS(EVENT)                                                                                        \
    EVENT(count_tokens,   work,   completion, "",                  "tokens:32",                  "")                \
    EVENT(signal_counts,  signal, completion, "counts data",       "peer:10",                    "")                \
    EVENT(wait_counts,    wait,   completion, "counts data",       "peer:10",                    "tokens:32")       \
    EVENT(copy_token,     work,   issue,      "",                  "peer:10 slot:22 expert:16",  "")                \
    EVENT(signal_token,   signal, completion, "token data slot",   "peer:10 slot:22 expert:16",  "")                \
    EVENT(wait_token,     wait,   completion, "token data slot",   "peer:10 slot:22",            "expert:16")       \
    EVENT(signal_rank,    signal, completion, "rank data",         "peer:10 tokens:32",          "")                \
    EVENT(wait_rank,      wait,   completion, "rank data",         "peer:10",                    "tokens:32")       \
    EVENT(receive_token,  work,   issue,      "",                  "peer:10 slot:22 expert:16",  "")                \
    EVENT(copy_row,       work,   issue,      "",                  "peer:10 slot:22 experts:5", "")                \
    EVENT(signal_row,     signal, completion, "row data slot",     "peer:10 slot:22 experts:5", "")                \
    EVENT(wait_row,       wait,   completion, "row data slot",     "peer:10",                    "peer:10 slot:22") \
    EVENT(expand_row,     work,   issue,      "",                  "peer:10 slot:22 experts:5", "")                \
    EVENT(signal_layout,  signal, completion, "layout data",       "",                           "")                \
    EVENT(wait_layout,    wait,   completion, "layout data",       "",                           "")                \
    EVENT(scale_token,    work,   issue,      "",                  "expert:16 row:32",           "")                \
    EVENT(signal_ack,     signal, completion, "ack data",          "peer:10",                    "")                \
    EVENT(wait_ack,       wait,   completion, "ack data",          "peer:10",                    "")                \
    EVENT(send_result,    work,   issue,      "",                  "peer:10 slot:22 expert:16",  "")                \
    EVENT(signal_result,  signal, completion, "result data slot",  "peer:10 slot:22 expert:16",  "")                \
    EVENT(wait_result,    wait,   completion, "result data slot",  "peer:10 slot:22 expert:16",  "")                \
    EVENT(send_partial,   work,   issue,      "",                  "peer:10 slot:22 experts:5", "")                \
    EVENT(signal_partial, signal, completion, "partial data slot", "peer:10 slot:22",            "")                \
    EVENT(wait_partial,   wait,   completion, "partial data slot", "peer:10 slot:22",            "")                \
    EVENT(signal_results, signal, completion, "results data",      "peer:10",                    "")                \
    EVENT(wait_results,   wait,   completion, "results data",      "peer:10",                    "")                \
    EVENT(reduce_token,   work,   issue,      "",                  "token:32",                   "")                \
    EVENT(wait_block,     wait,   completion, "",                  "",                           "", 2)             \
    EVENT(wait_grid,      wait,   completion, "",                  "",                           "", 2)
// clang-format on
TK_DEFINE_EVENTS(P2PEvent, TK_P2P_EVENTS)

namespace tracekern {

// The pipelined variant has two roles besides `count`: the token's side sends rows and adds up what comes back, the
// expert's side receives rows and sends results.
enum class P2PRole : uint32_t { count, send, receive, scale, reduce, token, expert };
inline constexpr const char* kP2PRoleNames[] = {"count", "send", "receive", "scale", "reduce", "token", "expert"};

enum class P2PChannel : uint32_t { counts = kFirstOwnChannel, token, rank, result, results, ack, row, partial, layout };
inline constexpr const char* kP2PChannelNames[] = {
    "counts", "token", "rank", "result", "results", "ack", "row", "partial", "layout"};

// The kernels of all variants; kernels.h has those of a call in their order. A fault names one.
enum class P2PStage : uint32_t {
    dispatch_send,
    dispatch_recv,
    scale_experts,
    combine_send,
    combine_recv,
    dispatch,
    combine,
    dispatch_combine,
};
inline constexpr const char* kP2PStageNames[] = {"dispatch_send",
                                                 "dispatch_recv",
                                                 "scale_experts",
                                                 "combine_send",
                                                 "combine_recv",
                                                 "dispatch",
                                                 "combine",
                                                 "dispatch_combine"};

}  // namespace tracekern
