// What an engine records of its transfers: docs/fabric.md reads one of them.
//
// A transfer lasts from the call that submitted it to the last completion. Meanwhile it is queued until its first write
// is posted; each write lasts from its posting to its completion. Transfers overlap, and so do writes. `peer` is the
// number under which a `peer` mark introduced the other engine; the timeline puts its rank there. `nothing` stands
// where a track was quiet for so long that its next record could not say when it begins.
#pragma once

#include "trace/events.h"

// clang-format off
#define TK_TRANSFER_EVENTS(EVENT)                                                                                      \
    EVENT(engine,    sync,   completion, "",                        "engine:45",                      "")              \
    EVENT(peer,      sync,   completion, "",                        "peer:10 engine:45",              "")              \
    EVENT(transfer,  work,   completion, "",                        "transfer:13 bytes:42",           "")              \
    EVENT(queued,    work,   completion, "",                        "transfer:13 writes:21 ahead:21", "")              \
    EVENT(write,     work,   completion, "",                        "transfer:13 peer:10 bytes:32",   "")              \
    EVENT(write_imm, signal, completion, "immediates immediate imm", "transfer:13 peer:10 imm:32",    "")              \
    EVENT(failed,    sync,   completion, "",                        "transfer:13",                    "")              \
    EVENT(arrival,   sync,   completion, "immediates immediate imm", "peer:10 imm:32 number:11",      "")              \
    EVENT(reached,   sync,   completion, "",                        "imm:32 count:23",                "")              \
    EVENT(round_trip, work,  completion, "",                        "peer:10 ahead:45",               "")              \
    EVENT(wait_imm,  wait,   completion, "immediates immediate imm", "imm:32 wanted:23",              "")              \
    EVENT(nothing,   sync,   completion, "",                        "",                               "")              \
    EVENT(put_word,     sync, completion, "", "peer:10 which:8 n:16 epoch_bits:3 bytes:18",           "")                   \
    EVENT(put_credit,   sync, completion, "", "peer:10 is_last:8 writes:16 epoch_bits:3 bytes:18",    "")                   \
    EVENT(put_message,  sync, completion, "", "peer:10 local_expert:8 slot:16 epoch_bits:3 bytes:18",   "")                 \
    EVENT(put_count,    sync, completion, "", "peer:10 local_expert:8 tokens:16 epoch_bits:3 bytes:18", "")                 \
    EVENT(put_row,      sync, completion, "", "peer:10 local_expert:8 token:16 epoch_bits:3 bytes:18",  "")                 \
    EVENT(put_results,  sync, completion, "", "peer:10 local_expert:8 tokens:16 epoch_bits:3 bytes:18", "")                 \
    EVENT(put_chunk,    sync, completion, "", "peer:10 channel:8 tail:16 epoch_bits:3 bytes:18",   "")                 \
    EVENT(put_head,     sync, completion, "", "peer:10 channel:8 head:16 epoch_bits:3 bytes:18",   "")                 \
    EVENT(command,      sync, completion, "", "peer:10 ahead:45",                                "")                   \
    EVENT(word_came,    sync, completion, "", "peer:10 which:8 n:16 epoch_bits:3",                    "")                   \
    EVENT(credit_came,  sync, completion, "", "peer:10 is_last:8 writes:16 epoch_bits:3",             "")                   \
    EVENT(message_came, sync, completion, "", "peer:10 local_expert:8 slot:16 epoch_bits:3",          "")                   \
    EVENT(count_came,   sync, completion, "", "peer:10 local_expert:8 tokens:16 epoch_bits:3",        "")                   \
    EVENT(row_came,     sync, completion, "", "peer:10 local_expert:8 token:16 epoch_bits:3",         "")                   \
    EVENT(chunk_came,   sync, completion, "", "peer:10 channel:8 tail:16 epoch_bits:3",          "")                   \
    EVENT(head_came,    sync, completion, "", "peer:10 channel:8 head:16 epoch_bits:3",          "")                   \
    EVENT(results_came, sync, completion, "", "peer:10 local_expert:8 tokens:16 epoch_bits:3",        "")
// clang-format on
TK_DEFINE_EVENTS(TransferEvent, TK_TRANSFER_EVENTS)

namespace tracekern {

// The tracks of an engine, each with the one that writes it. Behind these: one a domain.
enum class EngineTrack : uint32_t {
    transfers,  // the worker
    arrivals,   // the worker
    waits,      // threads that wait, one at a time
    clocks,     // the worker
    first_domain,
};

}  // namespace tracekern
