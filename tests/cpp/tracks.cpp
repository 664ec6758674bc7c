// Warps that do nothing but record, a thread each, launch after launch into one region that nobody clears. Made for the
// race detector.
//
//   tracks FORMAT BLOCKS WARPS RECORDS LAUNCHES [PLANT]      FORMAT: span or ring; RECORDS: of a track
//
// PLANT lets the last block write where it should not: `track`: into the tracks of another block; `record`: one record
// in front of its own.
// Exit: 0 every track holds what its warp recorded, 1 one does not, 2 usage.
#include "stress_cpu.hpp"

#define TK_TRACKS_EVENTS(EVENT)                 \
    EVENT(unused, work, completion, "", "", "") \
    EVENT(note, work, completion, "", "launch:16 track:16 number:23", "")
TK_DEFINE_EVENTS(TracksEvent, TK_TRACKS_EVENTS)

using namespace tracekern;

namespace {

// Everybody records another number of marks each time: rings end in the middle, tracks run over or stay half empty.
uint32_t num_marks(uint32_t launch, uint32_t track, uint32_t room) {
    return (launch * 7 + track * 5) % (3 * room) + 1;
}

// Is this mark `number` of that track, of this launch? Record: of either format.
template <class Record>
bool is_mark(const Record& record, uint64_t launch, uint64_t track, uint64_t number) {
    const uint64_t payload = uint64_t{record.payload_high} << kPayloadLowBits | record.word >> (kKindBits + kEventBits);
    const uint32_t kind = record.word & ((1u << kKindBits) - 1);
    return kind == static_cast<uint32_t>(RecordKind::mark) && payload == (launch | track << 16 | number << 32);
}

struct Buffers {
    Buffers(bool is_ring, uint32_t num_blocks, uint32_t num_warps, uint32_t room)
        : is_ring(is_ring), headers(num_blocks * num_warps), records(headers.size() * room + 2) {
        memset(&records.front(), 0xa5, sizeof(WideRecord));
        memset(&records.back(), 0xa5, sizeof(WideRecord));
        descriptor.region.headers = headers.data();
        descriptor.region.records = records.data() + 1;
        descriptor.event_mask = ~uint64_t{0};
        descriptor.records_per_track = room;
        descriptor.warps_per_block = num_warps;
        descriptor.block_stop = num_blocks;
        descriptor.block_step = 1;
        descriptor.role_mask = ~0u;
    }

    bool holds(uint32_t launch) const {
        const uint32_t room = descriptor.records_per_track;
        for (uint32_t track = 0; track < headers.size(); ++track) {
            const uint32_t wanted = num_marks(launch, track, room);
            const uint32_t kept = std::min(wanted, room);
            if (!headers[track].end_ticks || headers[track].attempted != wanted) return false;
            for (uint32_t i = 0; i < kept; ++i) {
                const uint32_t number = is_ring ? wanted - kept + i : i;
                const WideRecord& record = records[1 + size_t{track} * room + (is_ring ? number % room : number)];
                const bool is_right = is_ring ? is_mark(record, launch, track, number)
                                              : is_mark(bits_as<SpanRecord>(record), launch, track, number);
                if (!is_right) return false;
            }
        }
        WideRecord guard;
        memset(&guard, 0xa5, sizeof(guard));
        return !memcmp(&records.front(), &guard, sizeof(guard)) && !memcmp(&records.back(), &guard, sizeof(guard));
    }

    const bool is_ring;
    std::vector<TrackHeader> headers;
    std::vector<WideRecord> records;  // with a guard in front and one behind
    LaunchDescriptor descriptor{};
};

template <class Rec>
void record(Warp& warp, typename Rec::Args args, uint32_t launch, const std::string& plant) {
    const uint32_t track = warp.block * args.launch.warps_per_block + warp.warp;
    const uint32_t count = num_marks(launch, track, args.launch.records_per_track);
    if (warp.block + 1 == warp.num_blocks) {
        if (plant == "track") ++args.launch.block_first;
        if (plant == "record") --args.launch.region.records;
    }
    Rec recorder(args, warp);
    for (uint32_t number = 0; number < count; ++number) {
        TK_MARK(recorder, TracksEvent::note, launch, track, number);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 6) return 2;
    const auto number = [&](int i) { return static_cast<uint32_t>(std::strtoul(argv[i], nullptr, 10)); };
    const bool is_ring = choose(argv[1], std::initializer_list<const char*>{"span", "ring"}) == 1;
    const std::string plant = argc > 6 ? argv[6] : "";
    const CpuLaunch launch{number(2), number(3), 0, CpuExecutor::threads};
    Buffers region(is_ring, number(2), number(3), number(4));
    for (uint32_t i = 0; i < number(5); ++i) {
        const auto run = [&]<class Rec>() {
            launch_cpu(launch, [&](Warp& warp) { record<Rec>(warp, {region.descriptor}, i, plant); });
        };
        if (is_ring) {
            run.operator()<Recorder<true, RecordFormat::ring>>();
        } else {
            run.operator()<Recorder<true>>();
        }
        if (!region.holds(i)) return 1;
    }
    std::puts("ok");
    return 0;
}
