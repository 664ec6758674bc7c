// A traced graph's first node on the CPU backend: which replay gets which regions, and what is counted where none is
// ready. The host's side is played by hand.
#include "trace/graph.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "platform/cpu_executor.hpp"
#include "trace/probe.h"

using namespace tracekern;

namespace {

constexpr uint32_t kNumSlots = 3, kNumLaunches = 2, kNumTracks = 4, kRecordsPerTrack = 8;

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

// Descriptor, headers and records of one launch, as they stand in an arena.
struct Region {
    LaunchDescriptor descriptor{};
    TrackHeader headers[kNumTracks]{};
    WideRecord records[kNumTracks * kRecordsPerTrack]{};

    explicit Region(uint32_t records_per_track) {
        descriptor.headers = headers;
        descriptor.records = records;
        descriptor.event_mask = ~uint64_t{0};
        descriptor.records_per_track = records_per_track;
        descriptor.warps_per_block = 1;
        descriptor.block_stop = kNumTracks;
        descriptor.block_step = 1;
        descriptor.role_mask = ~0u;
    }
    Region(const Region&) = delete;
};

struct Host {
    GraphControl control{};
    LaunchDescriptor ring[kNumSlots * kNumLaunches]{};
    LaunchDescriptor current[kNumLaunches]{};
    Region spare0{0}, spare1{0};
    LaunchDescriptor spare[kNumLaunches] = {spare0.descriptor, spare1.descriptor};
    GraphTrace graph{};
    std::vector<std::unique_ptr<Region>> regions;

    Host() {
        graph.control = &control;
        graph.ring = ring;
        graph.current = current;
        graph.spare = spare;
        graph.num_slots = kNumSlots;
        graph.num_launches = kNumLaunches;
    }
    void place() {
        for (uint32_t i = 0; i < kNumLaunches; ++i) {
            regions.push_back(std::make_unique<Region>(kRecordsPerTrack));
            ring[control.placed % kNumSlots * kNumLaunches + i] = regions.back()->descriptor;
        }
        ++control.placed;
    }
    void advance(bool begins_replay) {
        launch_cpu(CpuLaunch{}, [&](Warp& warp) { advance_graph(warp, graph, begins_replay); });
    }
    // One replay of the traced instance: every track of both launches records `num_spans` spans.
    void replay(uint32_t num_spans) {
        advance(true);
        float sink[kNumTracks];
        const ProbeArgs args{sink, num_spans, kProbeUnroll, 0.5f};
        for (const LaunchDescriptor& launch : current) {
            LaunchDescriptor argument{};
            argument.of_replay = &launch;
            launch_cpu(CpuLaunch{.num_blocks = kNumTracks},
                       [&](Warp& warp) { probe_spans<Recorder<true>>(warp, args, {argument}); });
        }
    }
};

void expect_region(const Region& region, uint32_t replay, uint32_t num_spans) {
    require(region.descriptor.replay == replay, "a region was taken by another replay");
    for (const TrackHeader& header : region.headers) {
        require((header.end_ticks != 0) == (replay != 0),
                "a track of a taken region did not finish, or one of a free one ran");
        require(header.written == 2 * num_spans, "a track holds the records of another replay");
    }
}

}  // namespace

int main() {
    Host host;
    for (int i = 0; i < 2; ++i) host.place();
    for (const uint32_t num_spans : {1u, 2u, 3u, 4u}) host.replay(num_spans);  // two of them find no set
    require(host.control.taken == 2 && host.control.replays == 4, "sets or replays were miscounted");
    require(host.control.lost_replays == 2, "lost replays were miscounted");
    require(host.control.lost_records == 3 * 2 * kNumLaunches * kNumTracks, "only replays through are counted");

    for (int i = 0; i < 3; ++i) host.place();  // over the end of the ring
    host.replay(2);
    host.replay(1);
    host.advance(false);
    host.advance(false);  // counts nothing twice
    const uint64_t per_span = 2 * kNumLaunches * kNumTracks;
    require(host.control.lost_records == (3 + 4) * per_span, "lost records were miscounted");
    require(host.control.taken == 4 && host.control.replays == 6 && host.control.lost_replays == 2,
            "miscounted at last");

    const uint32_t replays[] = {1, 2, 5, 6, 0}, spans[] = {1, 2, 2, 1, 0};
    for (uint32_t set = 0; set < 5; ++set) {
        for (uint32_t i = 0; i < kNumLaunches; ++i) {
            expect_region(*host.regions[set * kNumLaunches + i], replays[set], spans[set]);
        }
    }
    std::puts("ok");
}
