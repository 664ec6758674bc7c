// What the kernels of int4 experts record. A tile is a token tile, counted over all experts, and an output tile. Its
// preload has the tile's first row instead, of all experts', and how many of its 8 tokens are not padding. All events
// of a tile are on the track of each of the block's warps. With rings `multiply_tile` takes the place of `sweep`, and
// the producer has one span for all its stages. From `stage` on they are steps of a sweep, and from `wait_slot` on of a
// ring's tile, inside its span: of the tiles alone that a call wants in detail. A stage of a ring is decoded and
// multiplied in half a microsecond, so each consumer records it whole, and one of its decodings as a sample of all.
#pragma once

#include "trace/events.h"

// clang-format off
#define TK_GEMM_EVENTS(EVENT)                                                                                \
    EVENT(rank_choices,    work, issue,      "", "expert:13",                                  "rows:22")    \
    EVENT(lay_out_tiles,   work, completion, "", "",                                           "")           \
    EVENT(permute_token,   work, issue,      "", "token:18 row:22",                            "")           \
    EVENT(preload,         work, completion, "", "expert:13 first_row:24 output_tile:14 rows:4", "")         \
    EVENT(sweep,           work, completion, "", "expert:13 token_tile:20 output_tile:14 phase:1", "")       \
    EVENT(epilogue,        work, issue,      "", "expert:13 token_tile:20 output_tile:14 phase:1", "")       \
    EVENT(produce_stages,  work, completion, "", "slots:4",                                    "stages:32")  \
    EVENT(multiply_tile,   work, completion, "", "width:7 token_tile:20 output_tile:14",       "expert:13")  \
    EVENT(unpermute_token, work, issue,      "", "token:18",                                   "")           \
    EVENT(stage,           work, issue,      "", "group:10",                                   "")           \
    EVENT(park,            work, completion, "", "group:10 half:1",                            "")           \
    EVENT(load_b,          work, completion, "", "group:10 half:1",                            "")           \
    EVENT(decode,          work, completion, "", "group:10 half:1 path:1",                     "")           \
    EVENT(multiply,        work, completion, "", "group:10 half:1 path:1",                     "")           \
    EVENT(wait_slot,       wait, completion, "", "stage:24",                                   "")           \
    EVENT(issue_copy,      work, issue,      "", "stage:24",                                   "")           \
    EVENT(wait_stage,      wait, completion, "", "stage:24",                                   "")           \
    EVENT(multiply_stage,  work, completion, "", "stage:24",                                   "")           \
    EVENT(decode_sample,   work, completion, "", "stage:24 decodes:8",                         "")
// clang-format on
TK_DEFINE_EVENTS(GemmEvent, TK_GEMM_EVENTS)

namespace tracekern {

enum class GemmRole : uint32_t { layout, permute, k2, k4, unpermute, producer, consumer };
inline constexpr const char* kGemmRoleNames[] = {"layout", "permute", "k2", "k4", "unpermute", "producer", "consumer"};

// `layout` ranks the choices of tokens and lays out tiles; `tiles` does the latter alone, for rows that are there. With
// rings each product has two launches: `many` for experts with many rows, the other one for the rest.
enum class GemmStage : uint32_t { layout, tiles, permute, k2, k4, unpermute, k2_many, k4_many };
inline constexpr const char* kGemmStageNames[] = {
    "layout", "tiles", "permute", "k2", "k4", "unpermute", "k2_many", "k4_many"};

// How weights come from memory to the multiplication. The results are the same bits. `direct` and `pinned` take the
// contract's words, the others take prepared weights.
enum class GemmStaging : uint32_t { direct, pinned, wide, ring, reg };
inline constexpr const char* kGemmStagingNames[] = {"direct", "pinned", "wide", "ring", "reg"};

// What a traced kernel records of a tile: its parts, or of some tiles each step too, which is a body of its own.
enum class GemmDetail : uint32_t { parts, steps };

}  // namespace tracekern
