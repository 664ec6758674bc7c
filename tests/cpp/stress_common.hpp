// What the attacking programs share: options, heaps of ranks in one process, trace regions with guard words, fault
// lines.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "comm/communicator_cpu.hpp"

namespace tracekern {

// The index of `given` in `names`; ends the program when there is no such name.
template <class Names>
uint32_t choose(const std::string& given, const Names& names) {
    uint32_t index = 0;
    for (const char* name : names) {
        if (given == name) return index;
        ++index;
    }
    std::fprintf(stderr, "what is %s?\n", given.c_str());
    std::exit(2);
}

// By number: the communicator's, then those of the kernels that the program attacks.
#ifndef TK_OWN_CHANNEL_NAMES
    #define TK_OWN_CHANNEL_NAMES \
        std::initializer_list<const char*> {}
#endif
inline std::vector<const char*> channel_names() {
    std::vector<const char*> names(std::begin(kCommChannelNames), std::end(kCommChannelNames));
    for (const char* name : TK_OWN_CHANNEL_NAMES) names.push_back(name);
    return names;
}

struct StressOptions {
    uint64_t timeout_ns = 20'000'000'000u;
    uint32_t absent = ~0u;
    uint32_t partitions = 2;
    bool trace = false;
    RecordFormat format = RecordFormat::span;

    static StressOptions parse(int count, char** given) {
        StressOptions options;
        for (int i = 0; i < count; ++i) {
            const std::string text = given[i];
            const size_t equals = text.find('=');
            const std::string key = text.substr(0, equals);
            const std::string value = equals == std::string::npos ? "" : text.substr(equals + 1);
            switch (choose(
                key, std::initializer_list<const char*>{"timeout_ms", "absent", "trace", "plant", "partitions"})) {
                case 0:
                    options.timeout_ns = std::stoull(value) * 1'000'000;
                    break;
                case 1:
                    options.absent = static_cast<uint32_t>(std::stoul(value));
                    break;
                case 2:
                    options.trace = choose(value, std::initializer_list<const char*>{"off", "on", "ring"});
                    if (value == "ring") options.format = RecordFormat::ring;
                    break;
                case 3:
                    plant(value);
                    break;
                case 4:
                    options.partitions = static_cast<uint32_t>(std::stoul(value));
                    break;
            }
        }
        return options;
    }

private:
    static void plant([[maybe_unused]] const std::string& value) {
#ifdef TK_PLANTED_FAULTS
        const size_t colon = value.find(':');
        planted_fault.channel = choose(value.substr(0, colon), channel_names());
        planted_fault.mutation = static_cast<Mutation>(choose(value.substr(colon + 1), kMutationNames));
#else
        std::fprintf(stderr, "plant needs -DTK_PLANTED_FAULTS\n");
        std::exit(2);
#endif
    }
};

// The symmetric heap of all ranks in one process.
struct StressHeaps {
    StressHeaps(uint32_t num_ranks, uint64_t bytes) : memory(num_ranks) {
        for (auto& heap : memory) {
            heap.resize(bytes / sizeof(HeapControl) + 1);
            addresses.push_back(reinterpret_cast<uint64_t>(heap.data()));
        }
    }
    std::vector<std::vector<HeapControl>> memory;
    std::vector<uint64_t> addresses;
    SimulatedClock clock = SimulatedClock::draw(0, 0, 0);
};

// Room for the records of one launch at a time, with guard words behind each part.
class TraceRegion {
public:
    TraceRegion(const StressOptions& options, uint32_t num_blocks, uint32_t warps_per_block, uint32_t records_per_track)
        : trace_(options.trace), format_(options.format) {
        if (!trace_) return;
        const size_t num_tracks = size_t{num_blocks} * warps_per_block;
        headers_.resize(num_tracks + 1);
        records_.resize(num_tracks * records_per_track + 1);
        descriptor_.region.headers = headers_.data();
        descriptor_.region.records = records_.data();
        descriptor_.event_mask = ~uint64_t{0};
        descriptor_.records_per_track = records_per_track;
        descriptor_.warps_per_block = warps_per_block;
        descriptor_.block_stop = num_blocks;
        descriptor_.block_step = 1;
        descriptor_.role_mask = ~0u;
    }

    TraceChoice begin_launch() {
        if (!trace_) return {};
        memset(headers_.data(), 0, headers_.size() * sizeof(TrackHeader));
        memset(records_.data(), 0, records_.size() * sizeof(WideRecord));
        memset(&headers_.back(), 0xa5, sizeof(TrackHeader));
        memset(&records_.back(), 0xa5, sizeof(WideRecord));
        return {&descriptor_, format_};
    }

    // Every track ran to its end, wrote no more than fits, and nothing stands behind the region.
    bool is_whole() const {
        if (!trace_) return true;
        for (size_t track = 0; track + 1 < headers_.size(); ++track) {
            const TrackHeader& header = headers_[track];
            if (!header.started || !header.end_ticks) return false;
            if (header.written > header.attempted) return false;
            if (format_ == RecordFormat::span && header.written > descriptor_.records_per_track) return false;
        }
        char guard[sizeof(TrackHeader)];
        memset(guard, 0xa5, sizeof(guard));
        return memcmp(&headers_.back(), guard, sizeof(TrackHeader)) == 0 &&
               memcmp(&records_.back(), guard, sizeof(WideRecord)) == 0;
    }

private:
    bool trace_;
    RecordFormat format_;
    std::vector<TrackHeader> headers_;
    std::vector<WideRecord> records_;
    LaunchDescriptor descriptor_{};
};

// One line on stderr; returns the exit code for it.
inline int report_fault(const FaultRecord& fault, const char* stage) {
    std::fprintf(stderr,
                 "fault rank=%u cause=%u stage=%s peer=%u channel=%s slot=%u block=%u warp=%u wanted=%u seen=%u "
                 "waited_ms=%llu\n",
                 fault.rank,
                 fault.cause,
                 stage,
                 fault.peer,
                 channel_names().at(fault.channel),
                 fault.slot,
                 fault.block,
                 fault.warp,
                 fault.wanted_epoch,
                 fault.seen_epoch,
                 static_cast<unsigned long long>(fault.waited_ticks / 1'000'000));
    return 3;
}

}  // namespace tracekern
