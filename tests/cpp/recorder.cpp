// A kernel that does nothing but record, for test_recorder.py: writes the raw buffers to stdout.
//
//   recorder describe                          the event table as JSON
//   recorder SCENARIO RECORDS [NAME=VALUE...]  headers and records, a guard of 0xa5 behind both
//
// 4 blocks of 2 warps; the role of a warp is its number, more by first_role=N. The other NAMEs are those of the launch
// descriptor: event_mask, block_first, block_stop, block_step, role_mask, generation, num_blocks and warps_per_block
// (what the host was told); cycles=1 takes the body that counts cycles of the core, in_graph=1 the way of a graph to
// its descriptor, records_at=ADDRESS puts the records there; whole=1 offers the bodies for whole launches, too, and
// says "whole" and its level on stderr where one was taken; choice=N is what TraceChoice wants added to a descriptor;
// count=N is for `marks`.
//   all    every macro and payload width once       many   20 spans within each other, then 20 side by side
//   cross  spans while the low half of the clock wraps     hang   ends in the middle of a wait
//   left   work and a wait that never end           marks  N marks in the first track
//   ring   a sequence whose waits and signals have ends of their own    needed  waits, of which half are needed
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator_cpu.hpp"

#define TK_TEST_EVENTS(EVENT)                                                 \
    EVENT(plain, work, completion, "", "", "")                                \
    EVENT(fits, work, issue, "", "a:23", "")                                  \
    EVENT(straddles, work, issue, "", "a:24", "b:31")                         \
    EVENT(wait_full, wait, completion, "data data a", "a:23", "c:32")         \
    EVENT(signal_some, signal, completion, "data data a", "a:23 b:31", "c:1") \
    EVENT(note, work, completion, "", "n:30", "")                             \
    EVENT(step, work, completion, "", "n:55", "", 2)                          \
    EVENT(wait_block, wait, completion, "", "", "", 2)
TK_DEFINE_EVENTS(TestEvent, TK_TEST_EVENTS)

using namespace tracekern;

namespace {

constexpr uint32_t kNumBlocks = 4;
constexpr uint32_t kNumWarps = 2;
constexpr uint64_t kBoundary = uint64_t{7} << 32;

struct Buffers {
    std::vector<TrackHeader> headers;
    std::span<WideRecord> records;

    Buffers(size_t num_tracks, size_t num_records, uint64_t records_at) : headers(num_tracks + 1) {
        const size_t bytes = (num_records + 1) * sizeof(WideRecord);
        const int fixed = records_at ? MAP_FIXED_NOREPLACE : 0;
        // Whole pages: from the one that the address is in.
        void* const wanted = reinterpret_cast<void*>(records_at & ~uint64_t{4095});
        char* const page = static_cast<char*>(
            mmap(wanted, bytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | fixed, -1, 0));
        if (page == MAP_FAILED) std::abort();
        records = {reinterpret_cast<WideRecord*>(page + records_at % 4096), num_records + 1};
        memset(&headers.back(), 0xa5, sizeof(TrackHeader));
        memset(&records.back(), 0xa5, sizeof(WideRecord));
    }
    [[noreturn]] void write() const {
        std::fwrite(headers.data(), sizeof(TrackHeader), headers.size(), stdout);
        std::fwrite(records.data(), sizeof(WideRecord), records.size(), stdout);
        std::fflush(stdout);
        std::_Exit(0);
    }
};

template <class Rec>
void record_all(Rec& recorder) {
    TK_RANGE(recorder, TestEvent::fits, 0x7fffffu);
    {
        TK_RANGE(recorder, TestEvent::straddles, 0xffffffu);
        {
            TK_WAIT(recorder, TestEvent::wait_full, 0x400001u);
            {
                TK_RANGE(recorder, TestEvent::plain);
            }
            TK_END(0xfffffffeu);
        }
        TK_END(0x40000001u);
    }
    {
        TK_SEQUENCE(recorder);
        TK_NEXT(TestEvent::plain);
        TK_NEXT(TestEvent::step, uint64_t{1} << 54 | 5);
        TK_MARK(recorder, TestEvent::note, 0x3fffffffu);
        TK_NEXT(TestEvent::fits, 3);
    }
    {
        TK_SIGNAL(recorder, TestEvent::signal_some, 1, 0x7ffffffeu);
        TK_END(3);  // wider than its field: the high bit is lost
    }
}

template <class Rec>
void record_nested(Rec& recorder, uint32_t depth) {
    TK_RANGE(recorder, TestEvent::straddles, depth);
    if (depth) record_nested(recorder, depth - 1);
    TK_END(depth);
}

template <class Rec>
void record_many(Rec& recorder) {
    record_nested(recorder, 19);
    TK_SEQUENCE(recorder);
    for (uint32_t i = 0; i < 20; ++i) {
        TK_NEXT(TestEvent::step, i);
        TK_RANGE(recorder, TestEvent::fits, i);
        TK_MARK(recorder, TestEvent::note, i);
    }
}

template <class Rec>
void record_across_the_boundary(Rec& recorder) {
    TK_RANGE(recorder, TestEvent::plain);
    for (uint32_t before = 0; before < 3; ++before) TK_MARK(recorder, TestEvent::note, before);
    while (read_clock() < kBoundary) {
    }
    for (uint32_t after = 10; after < 13; ++after) TK_MARK(recorder, TestEvent::note, after);
}

template <class Rec>
void leave_open(Rec& recorder) {
    TK_RANGE(recorder, TestEvent::fits, 9);
    {
        TK_WAIT(recorder, TestEvent::wait_full, 5);
        TK_END_IF(false, 6);
    }
    TK_END_IF(false);
}

// Until the clock has gone on, so that two readings of it differ.
void let_time_pass() {
    for (const uint64_t start = read_clock(); read_clock() == start;) {
    }
}

template <class Rec>
void record_ring(Rec& recorder) {
    TK_SEQUENCE(recorder);
    for (uint32_t slot = 0; slot < 3; ++slot) {
        let_time_pass();
        {
            TK_WAIT(tk_sequence, TestEvent::wait_full, slot);
            let_time_pass();
            TK_END_AFTER(slot, slot + 5);
        }
        let_time_pass();
        TK_NEXT(TestEvent::fits, slot);
        let_time_pass();
        {
            TK_SIGNAL(tk_sequence, TestEvent::signal_some, slot, slot);
            TK_END(1);
        }
    }
}

template <class Rec>
void record_what_is_needed(Rec& recorder, Warp& warp) {
    uint32_t asked = 0;
    for (uint32_t i = 0; i < 4; ++i) {
        TK_WAIT_IF(recorder, ++asked % 2 == 0, TestEvent::wait_full, i);
        TK_END_IF(i != 3, i);
    }
    TK_WAIT_IF(recorder, warp.warp == 0, TestEvent::wait_block);
    TK_END_AFTER_BARRIER(warp);
    TK_MARK(recorder, TestEvent::note, asked);
}

template <class Rec>
void hang(Rec& recorder, const Buffers& buffers) {
    TK_RANGE(recorder, TestEvent::fits, 9);
    TK_MARK(recorder, TestEvent::note, 1);
    {
        TK_WAIT(recorder, TestEvent::wait_full, 5);
        buffers.write();
    }
}

struct Body {
    bool cycles = false;
    bool whole = false;
    uint64_t choice = 0;
    uint64_t count = 0;
    uint32_t first_role = 0;
};

void run(const std::string& scenario, const LaunchDescriptor& launch, const Body& body, const Buffers& buffers) {
    // A second before the low half of the clock wraps, or long before the next time it does.
    const int64_t from_boundary_ns = scenario == "cross" ? -1'000'000'000 : 100'000'000;
    SimulatedClock clock = SimulatedClock::draw(0, 0, 0);
    clock.offset_ns =
        static_cast<double>(static_cast<int64_t>(kBoundary) + from_boundary_ns - SimulatedClock::host_now_ns());
    const auto record = [&]<class Rec>(typename Rec::Args args) {
        if constexpr (Rec::kTraced) {
            if (Rec::kIsWhole) std::fprintf(stderr, "whole %u", Rec::kLevel);
        }
        launch_cpu({kNumBlocks, kNumWarps, 0, CpuExecutor::fibers, &clock}, [&](Warp& warp) {
            Rec recorder(args, warp, body.first_role + warp.warp, 77);
            if (scenario == "all") record_all(recorder);
            if (scenario == "where") TK_MARK(recorder, TestEvent::note, 16 * warp.block + warp.warp);
            if (scenario == "many") record_many(recorder);
            if (scenario == "cross") record_across_the_boundary(recorder);
            if (scenario == "left") leave_open(recorder);
            if (scenario == "ring") record_ring(recorder);
            if (scenario == "needed") record_what_is_needed(recorder, warp);
            if (scenario == "hang") hang(recorder, buffers);
            const uint64_t count = scenario == "marks" && warp.block + warp.warp == 0 ? body.count : 0;
            for (uint64_t i = 0; i < count; ++i) TK_MARK(recorder, TestEvent::note, i);
        });
    };
    using Cycles = Recorder<true, RecordFormat::cycles>;
    if (body.cycles) {
        record.operator()<Cycles>(Cycles::Args{launch});
    } else if (body.whole) {
        with_recorder<Recorder<true>, WholeRecorder, WholeRecorderOfPeers>(
            reinterpret_cast<uint64_t>(&launch) | body.choice, record);
    } else {
        with_recorder({&launch, RecordFormat::span}, record);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && std::string(argv[1]) == "describe") return std::puts(describe_events<TestEvent>().c_str()) < 0;
    const auto records = static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10));
    LaunchDescriptor launch{};
    launch.event_mask = ~uint64_t{0};
    launch.records_per_track = records;
    launch.warps_per_block = kNumWarps;
    launch.num_blocks = launch.block_stop = kNumBlocks;
    launch.block_step = 1;
    launch.role_mask = ~0u;
    Body body;
    bool in_graph = false;
    uint64_t records_at = 0;
    for (int i = 3; i < argc; ++i) {
        const std::string given = argv[i];
        const std::string name = given.substr(0, given.find('='));
        const uint64_t value = std::stoull(given.substr(name.size() + 1), nullptr, 0);
        if (name == "event_mask") launch.event_mask = value;
        if (name == "block_first") launch.block_first = static_cast<uint32_t>(value);
        if (name == "block_stop") launch.block_stop = static_cast<uint32_t>(value);
        if (name == "block_step") launch.block_step = static_cast<uint32_t>(value);
        if (name == "count") body.count = value;
        if (name == "cycles") body.cycles = value;
        if (name == "whole") body.whole = value;
        if (name == "choice") body.choice = value;
        if (name == "first_role") body.first_role = static_cast<uint32_t>(value);
        if (name == "generation") launch.generation = static_cast<uint16_t>(value);
        if (name == "in_graph") in_graph = value;
        if (name == "records_at") records_at = value;
        if (name == "num_blocks") launch.num_blocks = static_cast<uint32_t>(value);
        if (name == "warps_per_block") launch.warps_per_block = static_cast<uint16_t>(value);
        if (name == "role_mask") launch.role_mask = static_cast<uint32_t>(value);
    }
    constexpr size_t kTracks = size_t{kNumBlocks} * kNumWarps;
    Buffers buffers(kTracks, kTracks * records, records_at);
    launch.region.headers = buffers.headers.data();
    launch.region.records = buffers.records.data();
    const ReplayRegion region{
        reinterpret_cast<uint64_t>(launch.region.headers) | uint64_t{launch.generation} << ReplayRegion::kAddressBits,
        launch.region.records};
    if (in_graph) {
        launch.region = {};
        launch.generation = 0;
        launch.block_step |= kInGraph;
        launch.of_replay = &region;
    }
    run(argv[1], launch, body, buffers);
    buffers.write();
}
