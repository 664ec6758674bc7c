// What all recorders share: values packed into payloads, and the header of a track.
#pragma once

#include "platform/device.h"
#include "trace/events.h"
#include "trace/record.h"
#include "trace/track.h"

namespace tracekern {

// What of a launch a recorder can record: what the host selects, or all of it and nothing less.
enum class Extent { any, whole };

// kLevel: of the events that it records, those of higher levels are not there.
template <bool kTrace,
          RecordFormat kFormat = RecordFormat::span,
          uint32_t kLevel = kMaxLevel,
          Extent kExtent = Extent::any>
class Recorder;

namespace detail {

// Refuses a span without values: its fields would read 0, and a channel would join it to a wrong signal.
template <auto kEvent, class... Values>
TK_DEVICE constexpr void check_begin_fields() {
    static_assert(sizeof...(Values) == count_fields(event_info<kEvent>.begin_fields) ||
                      (sizeof...(Values) == 0 && *event_info<kEvent>.channel == '\0'),
                  "one value for each field at the event's begin, or none where the event has no channel");
}

// Packs values into the fields of a table entry, first field lowest; a value wider than its field loses its high bits.
template <auto kEvent, bool kEnd, class... Values>
TK_DEVICE uint64_t pack_fields(Values... values) {
    constexpr const char* kFields = kEnd ? event_info<kEvent>.end_fields : event_info<kEvent>.begin_fields;
    if constexpr (!kEnd) check_begin_fields<kEvent, Values...>();
    static_assert(sizeof...(Values) == 0 || sizeof...(Values) == count_fields(kFields),
                  "one value for each field of the event's table entry");
    if constexpr (sizeof...(Values) == 0) {
        return 0;
    } else {
        constexpr auto kWidths = field_widths<sizeof...(Values)>(kFields);
        uint64_t payload = 0;
        uint32_t shift = 0, index = 0;
        ((payload |= (static_cast<uint64_t>(values) & ((uint64_t{1} << kWidths.bits[index]) - 1)) << shift,
          shift += kWidths.bits[index++]),
         ...);
        return payload;
    }
}

// Calls start(track, sm) with the warp's track, if it has one.
template <class Start>
TK_DEVICE void find_and_start(const LaunchDescriptor& launch, const Warp& warp, uint32_t role, Start start) {
    const uint32_t sm = sm_id();  // asked for first: it takes longest
    const bool is_of_launch = is_selected(launch, warp.block, role);
    const uint32_t index = warp.block - launch.block_first;
    if (is_of_launch & (launch.block_step == 1) & (warp.warp < launch.warps_per_block)) {
        start(track_at(launch, launch.region, index, warp.warp), sm);
    } else if (is_of_launch & (launch.block_step == (1 | kInGraph)) & (warp.warp < launch.warps_per_block)) {
        start(track_of_replay(launch, index, warp.warp), sm);
    } else if (is_of_launch | (warp.block == launch.num_blocks)) {
        start(find_track(launch, role, warp.block, warp.num_blocks, warp.warp, warp.num_warps, warp.is_leader()), sm);
    }
}

// Stores 16 bytes of a header.
TK_DEVICE void store_quarter(
    TrackHeader* header, uint32_t quarter, bool enabled, uint64_t first, uint32_t second, uint32_t third) {
    const Vector16 value{static_cast<uint32_t>(first), static_cast<uint32_t>(first >> 32), second, third};
    put_if(enabled, reinterpret_cast<Vector16*>(header) + quarter, value);
}

}  // namespace detail
}  // namespace tracekern
