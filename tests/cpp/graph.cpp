// What a traced graph has besides its kernels, on the CPU backend: which replay gets which regions, and what is counted
// where none is ready. The host's side is played by hand: first in step with the replays, then beside them.
#include "trace/graph.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
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
struct Arena {
    LaunchDescriptor descriptor{};
    TrackHeader headers[kNumTracks]{};
    WideRecord records[kNumTracks * kRecordsPerTrack]{};
};

// Of the launch that has a region for the round-th time, counted from 0.
uint64_t generation_of(uint64_t round) {
    return round % (1 << 14) << kGenerationShift;
}

struct Host {
    GraphControl control{};
    ReplayRegion ring[kNumSlots * kNumLaunches]{};
    ReplayRegion next[kNumLaunches]{}, current[kNumLaunches]{};
    TrackHeader counters[kNumLaunches * kNumTracks]{};
    ReplayRegion spare[kNumLaunches] = {{reinterpret_cast<uint64_t>(counters), nullptr},
                                        {reinterpret_cast<uint64_t>(counters + kNumTracks), nullptr}};
    GraphTrace graph{};
    std::vector<std::unique_ptr<Arena>> regions;
    uint64_t most_sets = ~uint64_t{0};  // then the oldest is used again, once its replay is through

    Host() {
        graph.control = &control;
        graph.ring = ring;
        graph.next = next;
        graph.current = current;
        graph.spare = spare;
        graph.counters = counters;
        graph.num_counters = kNumLaunches * kNumTracks;
        graph.num_slots = kNumSlots;
        graph.num_launches = kNumLaunches;
    }
    bool is_reused() const { return most_sets != ~uint64_t{0}; }
    bool place() {
        if (control.placed - load_acquire_system(&control.fetched) == kNumSlots) return false;
        const uint64_t round = control.placed / most_sets, set = control.placed % most_sets;
        if (round > 0 && control.placed - most_sets + 1 >= load_acquire_system(&control.used)) return false;
        for (uint32_t i = 0; i < kNumLaunches; ++i) {
            if (round == 0) regions.push_back(std::make_unique<Arena>());
            Arena& region = *regions[set * kNumLaunches + i];
            region.descriptor.replay = 0;
            ring[control.placed % kNumSlots * kNumLaunches + i] = {
                reinterpret_cast<uint64_t>(region.headers) | generation_of(round) << ReplayRegion::kAddressBits,
                region.records};
        }
        store_release_system(&control.placed, control.placed + 1);
        return true;
    }
    void prepare(bool is_last) {
        launch_cpu(CpuLaunch{}, [&](Warp& warp) { prepare_replay(warp, graph, is_last); });
    }
    // One replay of the traced instance: every track of both launches records `num_spans` spans.
    void replay(uint32_t num_spans) {
        launch_cpu(CpuLaunch{}, [&](Warp& warp) { begin_replay(warp, graph); });
        std::thread beside([&] { prepare(false); });
        float sink[kNumTracks];
        const ProbeArgs args{sink, num_spans, kProbeUnroll, 0.5f};
        LaunchDescriptor argument{};
        argument.event_mask = ~uint64_t{0};
        argument.records_per_track = kRecordsPerTrack;
        argument.warps_per_block = 1;
        argument.block_stop = kNumTracks;
        argument.block_step = 1 | kInGraph;
        argument.role_mask = ~0u;
        for (const ReplayRegion& region : current) {
            argument.of_replay = &region;
            launch_cpu(CpuLaunch{.num_blocks = kNumTracks}, [&](Warp& warp) {
                if (is_reused()) {
                    probe_spans<Recorder<true, RecordFormat::ring>>(warp, args, {argument});
                } else {
                    probe_spans<Recorder<true>>(warp, args, {argument});
                }
            });
        }
        beside.join();
    }
};

void expect_region(const Arena& region, uint32_t replay, uint32_t num_records) {
    require(region.descriptor.replay == replay, "a region was taken by another replay");
    for (const TrackHeader& header : region.headers) {
        require((header.end_ticks != 0) == (replay != 0),
                "a track of a taken region did not finish, or one of a free one ran");
        require(header.attempted == num_records, "a track holds the records of another replay");
    }
}

void test_in_step() {
    Host host;
    for (int i = 0; i < 2; ++i) host.place();
    for (const uint32_t num_spans : {1u, 2u, 3u, 4u}) host.replay(num_spans);  // two of them find no set
    require(host.control.fetched == 2 && host.control.replays == 4, "sets or replays were miscounted");
    require(host.control.lost_replays == 2, "lost replays were miscounted");
    require(host.control.lost_records == 3 * kNumLaunches * kNumTracks, "only replays through are counted");

    for (int i = 0; i < 3; ++i) require(host.place(), "a slot is not free again");  // over the end of the ring
    require(!host.place(), "a slot is free twice");
    host.replay(2);
    host.replay(1);
    host.prepare(true);
    host.prepare(true);  // counts nothing twice
    const uint64_t per_span = kNumLaunches * kNumTracks;
    require(host.control.lost_records == (3 + 4) * per_span, "lost records were miscounted");
    require(host.control.fetched == 5 && host.control.replays == 6 && host.control.lost_replays == 2,
            "miscounted at last");

    const uint32_t replays[] = {1, 2, 5, 6, 0}, spans[] = {1, 2, 2, 1, 0};
    for (uint32_t set = 0; set < 5; ++set) {
        for (uint32_t i = 0; i < kNumLaunches; ++i) {
            expect_region(*host.regions[set * kNumLaunches + i], replays[set], spans[set]);
        }
    }
}

// The host lays ready what it can while replay follows replay, of 1 to 4 spans by turns.
void replay_beside_placer(Host& host, uint32_t num_replays) {
    std::atomic<bool> is_over = false;
    std::thread placer([&] {
        while (!is_over) {
            if (!host.place()) std::this_thread::yield();
        }
    });
    for (uint32_t i = 0; i < num_replays; ++i) {
        host.replay(1 + i % 4);
        if (i % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    is_over = true;
    placer.join();
    host.prepare(true);
}

// Each replay takes the oldest set, or none.
void test_beside() {
    constexpr uint32_t kNumReplays = 300;
    Host host;
    replay_beside_placer(host, kNumReplays);

    uint32_t last = 0;
    uint64_t num_recorded = 0, records = 0;
    for (size_t i = 0; i < host.regions.size(); i += kNumLaunches) {
        const uint32_t replay = host.regions[i]->descriptor.replay;
        for (uint32_t k = 0; k < kNumLaunches; ++k) {
            expect_region(*host.regions[i + k], replay, replay ? 1 + (replay - 1) % 4 : 0);
        }
        if (replay == 0) continue;
        require(replay > last, "a set overtook an older one");
        last = replay;
        ++num_recorded;
        records += (1 + (replay - 1) % 4) * kNumLaunches * kNumTracks;
    }
    require(num_recorded + host.control.lost_replays == kNumReplays, "a replay is neither recorded nor lost");
    const uint64_t of_all = kNumReplays / 4 * (1 + 2 + 3 + 4) * kNumLaunches * kNumTracks;
    require(records + host.control.lost_records == of_all, "a record is neither there nor counted");
}

// A flight recorder, whose few sets are used again and again: at the end the last replays that got one are there, each
// whole and under its generation.
void test_used_again() {
    constexpr uint32_t kNumReplays = 300, kNumSets = 5;
    Host host;
    host.most_sets = kNumSets;
    replay_beside_placer(host, kNumReplays);

    require(host.control.placed > 3 * kNumSets, "hardly a set was used again");
    require(host.control.used == kNumReplays - host.control.lost_replays, "sets or replays were miscounted");
    uint32_t last = 0;
    for (uint64_t place = host.control.placed - kNumSets; place < host.control.placed; ++place) {
        const uint32_t replay = host.regions[place % kNumSets * kNumLaunches]->descriptor.replay;
        require((replay != 0) == (place < host.control.used), "a set that was used is free, or a free one was");
        if (replay == 0) continue;
        require(replay > last, "a set overtook an older one");
        last = replay;
        for (uint32_t i = 0; i < kNumLaunches; ++i) {
            const Arena& region = *host.regions[place % kNumSets * kNumLaunches + i];
            expect_region(region, replay, 2 * (1 + (replay - 1) % 4));
            for (const TrackHeader& header : region.headers) {
                require(header.started == (kStartedRing | generation_of(place / kNumSets)),
                        "a track names another generation");
            }
        }
    }
    require(last != 0, "no replay is there");
}

}  // namespace

int main() {
    test_in_step();
    test_beside();
    test_used_again();
    std::puts("ok");
}
