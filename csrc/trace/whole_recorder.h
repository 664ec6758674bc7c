// The recorder of launches that are recorded whole: every block, warp and role and all events of its level, outside
// graphs, in a region that no launch had before and that lies between two multiples of 4 GiB. The host chooses it
// (trace/trace_choice.h).
//
// Small calls feel each instruction that all warps of a block run: at the start and the end of a track, and in spans at
// its barriers. This recorder has the fewest. It asks nothing of what a launch selects, and keeps three words. Warps
// and blocks that the host did not know about are told, and record nothing.
#pragma once

#include "trace/span_writer.h"

namespace tracekern {

// What a kernel knows of such a launch.
struct alignas(16) WholeLaunch {
    TrackHeader* headers;
    char* records;
    uint32_t track_bytes;  // of records
    uint32_t warps_per_block;
    uint32_t num_blocks;

    // Whether the launch is one, but for its events.
    static bool is_fit(const LaunchDescriptor& launch) {
        const uint64_t first = reinterpret_cast<uint64_t>(launch.region.records);
        const uint64_t num_tracks = uint64_t{launch.num_blocks} * launch.warps_per_block;
        const uint64_t stop = first + num_tracks * launch.records_per_track * sizeof(SpanRecord);
        const bool has_low_stop = first >> 32 == stop >> 32 && static_cast<uint32_t>(stop) < kLastPlace;
        return launch.role_mask == ~uint32_t{0} && launch.of_replay == nullptr && launch.block_first == 0 &&
               launch.block_step == 1 && launch.block_stop == launch.num_blocks && launch.generation == 0 &&
               num_tracks != 0 && launch.records_per_track != 0 && has_low_stop;
    }
    static WholeLaunch of(const LaunchDescriptor& launch) {
        return {launch.region.headers,
                reinterpret_cast<char*>(launch.region.records),
                launch.records_per_track * static_cast<uint32_t>(sizeof(SpanRecord)),
                launch.warps_per_block,
                launch.num_blocks};
    }
};

template <uint32_t kMostLevel>
class Recorder<true, RecordFormat::span, kMostLevel, Extent::whole>
    : public SpanWriter<Recorder<true, RecordFormat::span, kMostLevel, Extent::whole>> {
public:
    static constexpr bool kTraced = true;
    static constexpr RecordFormat kFormat = RecordFormat::span;
    static constexpr uint32_t kLevel = kMostLevel;
    static constexpr bool kIsWhole = true;
    struct Args {
        using Rec = Recorder;
        WholeLaunch launch;

        static Args of(const LaunchDescriptor& launch) { return {WholeLaunch::of(launch)}; }
    };

    // As the recorder of any spans.
    TK_DEVICE Recorder(const Args& args, const Warp& warp, uint32_t role = 0, uint32_t = 0)
        : launch_(args.launch), block_(warp.block), warp_(warp.warp) {
        const uint32_t sm = sm_id();  // asked for first: it takes longest
        const bool is_known = (block_ < launch_.num_blocks) & (warp_ < launch_.warps_per_block);
        const bool is_writer = is_known & warp.is_leader();
        TrackHeader* const header = own_header();
        detail::store_quarter(header, 0, is_writer, read_clock(), sm, kStarted | role << 16);
        count_if(is_writer, &header->starts);
        next_ = first();
        limit_ = is_writer ? low_word(next_) + launch_.track_bytes : 0;
        if (!is_known) tell_surplus(launch_, block_, warp.num_blocks, warp_, warp.num_warps, warp.is_leader());
    }
    Recorder(const Recorder&) = delete;
    TK_DEVICE void set_epoch(uint32_t) {}

    TK_DEVICE ~Recorder() {
        if (limit_ == 0) return;
        const uint32_t attempted = (low_word(next_) - low_word(first())) / static_cast<uint32_t>(sizeof(SpanRecord));
        const uint32_t room = launch_.track_bytes / static_cast<uint32_t>(sizeof(SpanRecord));
        detail::store_quarter(own_header(), 1, true, read_clock(), attempted < room ? attempted : room, attempted);
    }

private:
    friend SpanWriter<Recorder>;

    template <auto kEvent>
    TK_DEVICE PlaceInTrack take_place() {
        const bool is_free = tracekern::take_place<0>(1, next_, limit_);
        return {next_, is_free};
    }

    TK_DEVICE uint32_t track() const { return block_ * launch_.warps_per_block + warp_; }
    // The sum of words, not of the low ones alone: a high word that all tracks share would be loaded for each span.
    TK_DEVICE SpanRecord* first() const {
        return reinterpret_cast<SpanRecord*>(launch_.records + uint64_t{track()} * launch_.track_bytes);
    }
    TK_DEVICE static uint32_t low_word(const SpanRecord* at) {
        return static_cast<uint32_t>(reinterpret_cast<uint64_t>(at));
    }
    TK_DEVICE TrackHeader* own_header() const { return launch_.headers + track(); }

    // What the host did not know about.
    TK_DEVICE_CALL static void tell_surplus(
        WholeLaunch launch, uint32_t block, uint32_t num_blocks, uint32_t warp, uint32_t num_warps, bool is_leader) {
        if (!is_leader) return;
        if (block < launch.num_blocks) {
            detail::tell_warps(launch.headers + block * launch.warps_per_block, num_warps, 0);
        } else if (block == launch.num_blocks && warp == 0) {
            detail::tell_blocks(launch.headers, num_blocks, 0);
        }
    }

    const WholeLaunch launch_;     // the kernel's argument
    const uint32_t block_, warp_;  // the kernel's own
    SpanRecord* next_;
    uint32_t limit_;  // of take_place(); 0: not recorded, or not the leader
};

}  // namespace tracekern
