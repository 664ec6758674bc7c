// The recorder of a capture that keeps the first records of each track, whatever of a launch is recorded.
//
// A kernel of 1024 threads a block has 64 registers a thread, and what a recorder keeps in them is taken from the loads
// that are under way at a time. So this one keeps five words. All else is in the kernel's arguments, which are
// constants, and is worked out again where a track ends.
#pragma once

#include "trace/span_writer.h"

namespace tracekern {

template <uint32_t kMostLevel>
class Recorder<true, RecordFormat::span, kMostLevel>
    : public SpanWriter<Recorder<true, RecordFormat::span, kMostLevel>> {
public:
    static constexpr bool kTraced = true;
    static constexpr RecordFormat kFormat = RecordFormat::span;
    static constexpr uint32_t kLevel = kMostLevel;
    static constexpr bool kIsWhole = false;
    struct Args {
        using Rec = Recorder;
        LaunchDescriptor launch;

        static Args of(const LaunchDescriptor& launch) { return {launch}; }
    };

    // `role` names the track; one that the descriptor does not select records nothing, one beyond the 32 that there can
    // be is selected by its last 5 bits: a reader tells of it. `epoch` is asked for in a graph; elsewhere
    // capture.launch() stated it.
    TK_DEVICE Recorder(const Args& args, const Warp& warp, uint32_t role = 0, uint32_t epoch = 0)
        : launch_(args.launch), block_(warp.block), warp_(warp.warp), epoch_(epoch) {
        detail::find_and_start(
            launch_, warp, role, [&](const detail::Track& track, uint32_t sm) { start(track, warp, sm, role); });
    }
    Recorder(const Recorder&) = delete;
    TK_DEVICE void set_epoch(uint32_t epoch) { epoch_ = epoch; }

    TK_DEVICE ~Recorder() {
        if (limit_ == 0) return;
        const detail::Track track = detail::own_track(launch_, block_, warp_);
        auto* first = reinterpret_cast<SpanRecord*>(track.records);
        const uint32_t room = usable_places(first, room_of(track));
        const uint32_t attempted = num_appended(first, next_);
        detail::store_quarter(track.header, 1, true, read_clock(), attempted < room ? attempted : room, attempted);
        detail::store_quarter(track.header, 2, track.state & detail::kTellsEpoch, 0, epoch_, 0);
    }

private:
    friend SpanWriter<Recorder>;

    template <auto kEvent>
    TK_DEVICE PlaceInTrack take_place() {
        constexpr uint32_t kNumber = static_cast<uint32_t>(kEvent);
        const auto wanted = static_cast<uint32_t>(event_mask_ >> kNumber / 32 * 32);
        const bool is_free = tracekern::take_place<kNumber % 32>(wanted, next_, limit_);
        return {next_, is_free};
    }

    // Low words of times cannot tell what an earlier launch left in a region: there, this body only counts.
    TK_DEVICE static uint32_t room_of(const detail::Track& track) {
        return track.generation == 0 ? track.num_records : 0;
    }

    // Few instructions and no branch: all warps of a kernel begin with them, one after the other on their scheduler.
    TK_DEVICE void start(const detail::Track& track, const Warp& warp, uint32_t sm, uint32_t role) {
        const bool is_writer = track.state && warp.is_leader();
        detail::store_quarter(track.header, 0, is_writer, read_clock(), sm, kStarted | role << 16 | track.generation);
        count_if(is_writer, &track.header->starts);
        next_ = reinterpret_cast<SpanRecord*>(track.records);
        const uint32_t room = usable_places(next_, room_of(track));
        limit_ = is_writer ? limit_of(next_, room) : 0;
        event_mask_ = is_writer ? track.event_mask : 0;
    }

    const LaunchDescriptor launch_;  // the kernel's argument
    const uint32_t block_, warp_;    // the kernel's own
    uint32_t epoch_;                 // on record at the end: it often comes from memory, and no track waits for it
    uint32_t limit_ = 0;             // of take_place(); 0: not recorded, or not the leader
    SpanRecord* next_ = nullptr;
    uint64_t event_mask_ = 0;  // to load it for each span would take longer than all the rest of its begin
};

}  // namespace tracekern
