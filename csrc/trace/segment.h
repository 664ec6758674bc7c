// The parts of a segment that the host writes: what Python does, and csrc/tracekern_host.cpp for hosts without it.
// tracekern/dump/format.py mirrors these tables and says what each field means; core/test_format.py compares them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tracekern {

template <size_t kBytes>
using Chars = char[kBytes];

#define TK_SEGMENT_HEADER(FIELD)       \
    FIELD(Chars<8>, magic)             \
    FIELD(uint32_t, state)             \
    FIELD(uint32_t, pid)               \
    FIELD(uint64_t, total_bytes)       \
    FIELD(uint64_t, metadata_offset)   \
    FIELD(uint64_t, metadata_bytes)    \
    FIELD(uint64_t, launches_offset)   \
    FIELD(uint64_t, launches_capacity) \
    FIELD(uint64_t, num_launches)      \
    FIELD(uint64_t, samples_offset)    \
    FIELD(uint64_t, samples_capacity)  \
    FIELD(uint64_t, num_samples)       \
    FIELD(uint64_t, samples_lost)      \
    FIELD(uint64_t, host_offset)       \
    FIELD(uint64_t, host_capacity)     \
    FIELD(uint64_t, num_host_spans)    \
    FIELD(uint64_t, host_spans_lost)   \
    FIELD(uint64_t, arena_offset)      \
    FIELD(uint64_t, arena_bytes)       \
    FIELD(uint64_t, arena_cursor)      \
    FIELD(uint64_t, launches_refused)  \
    FIELD(uint64_t, refused_bytes)     \
    FIELD(uint64_t, ready_launch)      \
    FIELD(uint64_t, decision)          \
    FIELD(uint64_t, due_ns)            \
    FIELD(uint64_t, fault_offset)      \
    FIELD(uint64_t, leaving)           \
    FIELD(uint64_t, collected)         \
    FIELD(uint64_t, saved)             \
    FIELD(uint64_t, died_ns)           \
    FIELD(uint64_t, failed)            \
    FIELD(uint64_t, fault_bytes)       \
    FIELD(Chars<8>, reserved)

#define TK_LAUNCH_ENTRY(FIELD)         \
    FIELD(Chars<96>, name)             \
    FIELD(uint32_t, launch_idx)        \
    FIELD(uint32_t, sequence)          \
    FIELD(int64_t, stream)             \
    FIELD(uint32_t, epoch)             \
    FIELD(uint32_t, num_blocks)        \
    FIELD(uint32_t, warps_per_block)   \
    FIELD(uint32_t, block_first)       \
    FIELD(uint32_t, block_stop)        \
    FIELD(uint32_t, block_step)        \
    FIELD(uint32_t, num_tracks)        \
    FIELD(uint32_t, records_per_track) \
    FIELD(uint32_t, role_mask)         \
    FIELD(uint32_t, flags)             \
    FIELD(uint64_t, event_mask)        \
    FIELD(uint64_t, headers_offset)    \
    FIELD(uint64_t, records_offset)    \
    FIELD(uint64_t, events_offset)     \
    FIELD(uint64_t, roles_offset)      \
    FIELD(uint32_t, events_bytes)      \
    FIELD(uint32_t, roles_bytes)       \
    FIELD(uint32_t, generation)        \
    FIELD(uint32_t, order)             \
    FIELD(uint64_t, host_ns)           \
    FIELD(uint32_t, waited_ns)         \
    FIELD(Chars<36>, reserved)         \
    FIELD(Chars<96>, key)

#define TK_CLOCK_SAMPLE(FIELD) \
    FIELD(uint32_t, kind)      \
    FIELD(uint32_t, round_idx) \
    FIELD(int32_t, initiator)  \
    FIELD(int32_t, responder)  \
    FIELD(int64_t, t0)         \
    FIELD(int64_t, t1)         \
    FIELD(int64_t, t2)         \
    FIELD(int64_t, t3)

#define TK_HOST_SPAN(FIELD)  \
    FIELD(int64_t, start_ns) \
    FIELD(int64_t, end_ns)   \
    FIELD(int64_t, thread)   \
    FIELD(int64_t, reserved) \
    FIELD(Chars<96>, name)

#define TK_FIELD(type, name) type name;
struct SegmentHeader {
    TK_SEGMENT_HEADER(TK_FIELD)
};
struct LaunchEntry {
    TK_LAUNCH_ENTRY(TK_FIELD)
};
struct ClockSample {
    TK_CLOCK_SAMPLE(TK_FIELD)
};
struct HostSpan {
    TK_HOST_SPAN(TK_FIELD)
};
#undef TK_FIELD

inline constexpr char kSegmentMagic[] = "TKSEGMT1";
// In LaunchEntry::flags: no launch has the region yet, or one that is being written.
inline constexpr uint32_t kEntryReserved = 2;
enum class SegmentState : uint32_t { open = 1, closed = 2 };
enum class SampleKind : uint32_t { ping_pong = 1, host_bracket = 2, wall_clock = 3 };
// Of regions, and of what stands between them in the arena.
constexpr uint64_t kSegmentAlignment = 64;
// Of a multiple of 4 GiB no region takes the bytes in front: the count of a full track stays there.
constexpr uint64_t kCarryBytes = uint64_t{1} << 32;

}  // namespace tracekern
