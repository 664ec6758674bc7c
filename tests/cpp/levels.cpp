// A kernel whose events have levels, for test_levels.py.
//
//   levels FORMAT LEVEL   which body with_recorder() picks of three, what that evaluates, and what it records of a
//   launch
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "platform/cpu_executor.hpp"
#include "tracekern.h"

#define LEVEL_EVENTS(EVENT)                                  \
    EVENT(wait_row, wait, completion, "", "row:10", "")      \
    EVENT(copy_row, work, issue, "", "row:10", "")           \
    EVENT(load_word, work, completion, "", "word:10", "", 2) \
    EVENT(add_word, work, completion, "", "word:10", "sum:10", 3)
TK_DEFINE_EVENTS(LevelEvent, LEVEL_EVENTS)

// Names that the header keeps out of the way.
struct Warp {};
struct Half {};
struct Span {};
struct Sequence {};
struct Region {};
struct Track {};
enum class EventClass { mine };
constexpr int kLanes = 64, kMaxEvents = 1;
int copy_row(Half, Span, Sequence, Region, Track) {
    return kLanes + kMaxEvents + static_cast<int>(EventClass::mine);
}
using namespace tracekern::api;

namespace {

uint32_t evaluated = 0;
uint32_t note(uint32_t value) {
    ++evaluated;
    return value;
}

template <class Rec>
void run(tracekern::Warp& warp, typename Rec::Args trace) {
    Rec recorder(trace, warp);
    {
        TK_RANGE(recorder, LevelEvent::add_word, note(1));
        TK_END(note(2));
    }
    TK_MARK(recorder, LevelEvent::load_word, note(3));
    TK_SEQUENCE(recorder);
    TK_NEXT(LevelEvent::copy_row, note(4));
    {
        TK_RANGE(tk_sequence, LevelEvent::add_word, note(5));
        TK_END(note(6));
    }
    TK_NEXT(LevelEvent::copy_row, note(7));
    {
        TK_WAIT(tk_sequence, LevelEvent::wait_row, note(8));
    }
}

}  // namespace

int main(int argc, char** argv) {
    const auto format = static_cast<RecordFormat>(std::atoi(argv[1]));
    const uint64_t level = std::strtoull(argv[2], nullptr, 10);
    tracekern::TrackHeader header{};
    std::vector<tracekern::SpanRecord> records(64);
    tracekern::LaunchDescriptor launch{};
    launch.region = {&header, reinterpret_cast<tracekern::WideRecord*>(records.data())};
    launch.event_mask = ~uint64_t{0};
    launch.records_per_track = 64;
    launch.warps_per_block = launch.num_blocks = launch.block_stop = launch.block_step = 1;
    launch.role_mask = ~0u;
    const TraceChoice choice((reinterpret_cast<uint64_t>(&launch) + level * 4 + static_cast<uint64_t>(format)) |
                             (argc > 3 ? uint64_t{1} << 62 : 0));
    try {
        with_recorder<Recorder<true>, Recorder<true, RecordFormat::span, 1>, Recorder<true, RecordFormat::ring, 2>>(
            choice, [&]<class Rec>(auto trace) {
                std::printf("%u", Rec::kLevel);
                tracekern::launch_cpu({}, [&](tracekern::Warp& warp) { run<Rec>(warp, trace); });
            });
    } catch (const std::invalid_argument& error) {
        std::puts(error.what());
        return 2;
    }
    std::printf(" %u", evaluated);
    for (uint32_t i = 0; i < header.written && format == RecordFormat::span; ++i) {
        const uint32_t event = records[i].word >> 3 & 63;
        std::printf(" %s:%u", tracekern::EventTable<LevelEvent>::kEvents[event].name, records[i].word >> 9 & 1023);
    }
    if (launch.replay) std::printf(" told %x", launch.replay);
    std::puts("");
    return copy_row({}, {}, {}, {}, {}) == 65 ? 0 : 1;
}
