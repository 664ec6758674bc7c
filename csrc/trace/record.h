// The contents of a profile buffer, bit by bit. tracekern/dump/format.py mirrors this file; tests/core/test_format.py
// compares them.
//
// A launch owns one region: `num_tracks` headers, then `num_tracks` runs of `records_per_track` records of 16 bytes.
// The region is zero before the launch, so a record whose kind is `empty` was never stored. Only a flight recorder uses
// a region again, as the launch before left it: headers tell whose they are by their generation, records by their time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "platform/qualifiers.h"

namespace tracekern {

enum class RecordFormat : uint32_t {
    span = 0,    // SpanRecord: one a span; a track keeps its first
    ring = 1,    // WideRecord: two a span; a track keeps its last, and each record tells its lap, see below
    cycles = 2,  // WideRecord in cycles of the core clock; a track keeps its first
};
inline constexpr const char* kRecordFormatNames[] = {"span", "ring", "cycles"};
constexpr uint32_t records_per_span(RecordFormat format) {
    return format == RecordFormat::span ? 1 : 2;
}

enum class RecordKind : uint32_t {
    empty = 0,
    begin = 1,
    end = 2,   // its event repeats the begin's: a decoder can tell a torn buffer from a deep one
    mark = 3,  // an instant
    span = 4,  // a SpanRecord of a span; of an instant it is `mark`
};

// The last word of every record: kind | event | low payload bits.
constexpr uint32_t kKindBits = 3;
constexpr uint32_t kEventBits = 6;
constexpr uint32_t kPayloadLowBits = 32 - kKindBits - kEventBits;  // 23
constexpr uint32_t kPayloadBits = 32 + kPayloadLowBits;            // 55
constexpr uint32_t kMaxEvents = 1u << kEventBits;
constexpr uint32_t kPayloadLowMask = (1u << kPayloadLowBits) - 1;

TK_HOST_DEVICE constexpr uint32_t record_word(RecordKind kind, uint32_t event, uint64_t payload) {
    return static_cast<uint32_t>(kind) | event << kKindBits |
           (static_cast<uint32_t>(payload) & kPayloadLowMask) << (kKindBits + kEventBits);
}

// A whole span, or an instant. It takes its place in the track when it begins, so records stand in the order of their
// begins. Work, signals and waits for warps of the block are stored when they end. Other waits and syncs are stored
// when they begin, with an end that is one less than the begin, and their first 8 bytes again when they end: what a
// hung kernel waited for is on record.
//
// Begin fields are in the lowest bits of the payload, end fields in the highest. Times are the low words of the clock
// in units of 2^kClockShift ticks (platform/device.h), which a dump tells; the 64-bit times of the track make them
// whole.
struct alignas(16) SpanRecord {
    uint32_t end;  // begin - 1: open
    uint32_t payload_high;
    uint32_t begin;
    uint32_t word;
};
static_assert(sizeof(SpanRecord) == 16 && offsetof(SpanRecord, begin) == 8 && offsetof(SpanRecord, word) == 12,
              "SpanRecord is a file format, and the recorder stores its first half alone");

struct alignas(16) WideRecord {
    uint64_t ticks;  // of the realtime clock; in a track of cycles: cycles since the track began
    uint32_t payload_high;
    uint32_t word;
};
static_assert(sizeof(WideRecord) == 16 && offsetof(WideRecord, word) == 12, "WideRecord is a file format");

// A ring has a power of two of slots, the largest that fits records_per_track. The lap of its writer is in the
// upper 16 bits of the ticks: a reader of a ring that is still written, or was torn when its writer died, knows the
// slots of this lap from those of the lap before and from any that are older. 48 bits of ns are 78 hours, for one
// launch.
constexpr uint32_t kLapShift = 48;

// Identity and loss of one track. The kernel stores 16 bytes when the track starts and 16 when it finishes, each as one
// message over the bus, and counts the start; what the host knows by the place of the header alone, a dump adds.
struct alignas(64) TrackHeader {
    uint64_t start_ticks;
    uint32_t sm;       // physical unit the block ran on
    uint16_t started;  // kStarted: spans; kStartedRing where the records are those of a ring, kStartedCycles of cycles
    uint16_t role;
    uint64_t end_ticks;  // 0: the track hung, was killed, or never ran (`started` is 0 too)
    // Records stored, and records that the kernel made; the difference was lost. A ring stores the launch's generation
    // in `written`, above kGenerationShift bits; in a dump these are the records that are left, and the difference was
    // overwritten. A track of spans stops counting in front of a multiple of 4 GiB, after 2^28 spans at most.
    uint32_t written;
    uint32_t attempted;
    // Stored at the end by tracks of cycles, and in graphs.
    uint64_t elapsed_cycles;  // of a track of cycles: from start_ticks to end_ticks; 0: not measured
    uint32_t epoch;           // of a launch in a graph, whose epoch the host does not know
    // In a dump: records that should be there and never arrived. Of a ring: torn. Of a track of spans that never
    // finished: held by what had begun and is stored when it ends.
    uint32_t missing;
    // In a dump. In the first header of a region: how many blocks ran and the generation of that launch, stored by the
    // first block beyond those stated to capture.launch(); 0: none.
    uint32_t block;
    uint32_t launch_idx;
    // Which recorders started the track, by one relaxed atomic each at the scope of the device: all starts of a word
    // are in one order, whether launches follow each other or run at the same time, and nothing is ordered by them. In
    // a track that keeps its first records: how many did, counted, since nothing has to come back for that. In a ring,
    // whose region is used again without being cleared: the generation of the last, with kStartedOnce. Each takes out
    // what was there, and looks at it when it ends, because until then it would wait for memory; if that was of its
    // own generation, it leaves kStartedAgain. In a dump: `warp`, and above 16 bits `finished`.
    uint32_t starts;
    // Stored in a block's first track by warps beyond those stated to capture.launch(), which record nothing: how many
    // warps the block has, in a region with the generation above 16 bits. 0: as stated.
    uint32_t warps_run;
};
constexpr uint32_t kStarted = 1;
constexpr uint32_t kStartedRing = 2;
constexpr uint32_t kStartedCycles = 3;
// Above it is, in a region, the generation of the launch; in a dump nothing.
constexpr uint32_t kGenerationShift = 2;
// Below the generation in `starts` of a ring.
constexpr uint32_t kStartedOnce = 1;
constexpr uint32_t kStartedAgain = 3;
// At both ends of a track of cycles its two clocks are read together: the counter, the realtime clock, and the counter
// again, this many cycles later at most. What comes between the readings is tried again, kAnchorTries times in all.
constexpr uint32_t kMaxAnchorCycles = 256;
constexpr uint32_t kAnchorTries = 8;
static_assert(sizeof(TrackHeader) == 64 && offsetof(TrackHeader, end_ticks) == 16 &&
                  offsetof(TrackHeader, elapsed_cycles) == 32,
              "TrackHeader is a file format, and the recorder stores it 16 bytes at a time");

// Where a launch records.
struct alignas(16) Region {
    TrackHeader* headers;
    WideRecord* records;  // null: count only. In a track of spans SpanRecords
};

// The same of a graph's launch in one replay, and under which generation: above the address, of which x86-64 and Arm
// give processes no more than 48 bits.
struct alignas(16) ReplayRegion {
    uint64_t headers;
    WideRecord* records;

    TK_HOST_DEVICE Region region() const {
        return {reinterpret_cast<TrackHeader*>(headers & ((uint64_t{1} << kAddressBits) - 1)), records};
    }
    TK_HOST_DEVICE uint16_t generation() const { return static_cast<uint16_t>(headers >> kAddressBits); }

    static constexpr uint32_t kAddressBits = 48;
};

// Which tracks and events of a launch are recorded, and where to. The host fills it and the kernel gets it by value: a
// kernel that had to load it would begin every track with a trip to memory.
struct alignas(16) LaunchDescriptor {
    Region region;
    uint64_t event_mask;  // bit i: record event i
    // The arguments of a graph's kernels are frozen: device memory that holds the region of the replay under way.
    // Elsewhere null: `region` is the one. block_step tells it too: a kernel tests but one of them.
    const ReplayRegion* of_replay;
    uint32_t records_per_track;  // 0: count only; a ring does nothing
    uint16_t warps_per_block;
    // How many launches had the region before, at its place in `started`; 1 follows 2^14 - 1. In a graph of_replay
    // tells.
    uint16_t generation;
    uint32_t block_first;  // blocks first, first + step, ... below stop are recorded
    uint32_t block_stop;
    uint32_t block_step;  // in a graph's arguments plus kInGraph
    uint32_t role_mask;   // bit i: record role i
    uint32_t num_blocks;  // of the launch, as stated by the host; 0: it has no track that could say otherwise
    // In a graph: the replay that took this region, counted from 1; 0: none did. Elsewhere 0, or what with_recorder()
    // found where no body has all that was asked for: kLacksBody, the body's level, 0: no body, and above it the
    // format.
    uint32_t replay;
};
constexpr uint32_t kInGraph = 1u << 31;
constexpr uint32_t kLacksBody = 1u << 31;
constexpr uint32_t kLackedFormatShift = 8;
static_assert(sizeof(LaunchDescriptor) == 64, "LaunchDescriptor is shared between host and device");

}  // namespace tracekern
