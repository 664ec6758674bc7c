// What the attacking programs share on every backend: options, trace regions with guard words, fault lines.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "comm/fault.h"
#include "comm/mutation.h"
#include "trace/trace_choice.h"

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

#ifdef TK_PLANTED_FAULTS
// Leaves one thing out of the protocol from now on. Each backend has its own.
inline void plant(PlantedFault fault);
#endif

// What takes the value of an option, by the option's name.
using OptionSetters = std::map<std::string, std::function<void(const std::string&)>>;

struct StressOptions {
    uint64_t timeout_ns = 120'000'000'000u;
    uint32_t absent = ~0u;
    uint32_t partitions = 2;
    bool trace = false;
    RecordFormat format = RecordFormat::span;

    // setters: the options of one program alone.
    static StressOptions parse(int count, char** given, OptionSetters setters = {}) {
        StressOptions options;
        setters["timeout_ms"] = [&](const std::string& value) { options.timeout_ns = std::stoull(value) * 1'000'000; };
        setters["absent"] = [&](const std::string& value) { options.absent = number(value); };
        setters["partitions"] = [&](const std::string& value) { options.partitions = number(value); };
        setters["trace"] = [&](const std::string& value) {
            options.trace = choose(value, std::initializer_list<const char*>{"off", "on", "ring"});
            if (value == "ring") options.format = RecordFormat::ring;
        };
        setters["plant"] = plant_named;
        for (int i = 0; i < count; ++i) {
            const std::string text = given[i];
            const size_t equals = text.find('=');
            const auto setter = setters.find(text.substr(0, equals));
            if (setter == setters.end()) {
                std::fprintf(stderr, "what is %s?\n", text.c_str());
                std::exit(2);
            }
            setter->second(equals == std::string::npos ? "" : text.substr(equals + 1));
        }
        return options;
    }

    // So few that rings go round.
    uint32_t records_per_track() const { return format == RecordFormat::ring ? 8 : 64; }

    static uint32_t number(const std::string& value) { return static_cast<uint32_t>(std::stoul(value)); }

private:
    static void plant_named([[maybe_unused]] const std::string& value) {
#ifdef TK_PLANTED_FAULTS
        const size_t colon = value.find(':');
        const uint32_t channel = choose(value.substr(0, colon), channel_names());
        plant({channel, static_cast<Mutation>(choose(value.substr(colon + 1), kMutationNames))});
#else
        std::fprintf(stderr, "plant needs -DTK_PLANTED_FAULTS\n");
        std::exit(2);
#endif
    }
};

// Where the records of one launch at a time go, with guard words behind each part. The memory is the caller's.
class TraceRegion {
public:
    // headers, records: so many as num_headers() and num_records() say.
    TraceRegion(const StressOptions& options,
                uint32_t num_blocks,
                uint32_t warps_per_block,
                TrackHeader* headers,
                WideRecord* records)
        : trace_(options.trace), format_(options.format), num_tracks_(num_blocks * warps_per_block) {
        if (!trace_) return;
        num_records_ = size_t{num_tracks_} * options.records_per_track();
        descriptor_.region.headers = headers;
        descriptor_.region.records = records;
        descriptor_.event_mask = ~uint64_t{0};
        descriptor_.records_per_track = options.records_per_track();
        descriptor_.warps_per_block = static_cast<uint16_t>(warps_per_block);
        descriptor_.block_stop = num_blocks;
        descriptor_.block_step = 1;
        descriptor_.role_mask = ~0u;
    }

    // None where nothing is recorded. The last one is a guard.
    static size_t num_headers(const StressOptions& options, size_t num_tracks) {
        return options.trace ? num_tracks + 1 : 0;
    }
    static size_t num_records(const StressOptions& options, size_t num_tracks) {
        return options.trace ? num_tracks * options.records_per_track() + 1 : 0;
    }

    TraceChoice begin_launch() {
        if (!trace_) return {};
        const Region& region = descriptor_.region;
        memset(region.headers, 0, num_tracks_ * sizeof(TrackHeader));
        memset(region.records, 0, num_records_ * sizeof(WideRecord));
        memset(region.headers + num_tracks_, 0xa5, sizeof(TrackHeader));
        memset(region.records + num_records_, 0xa5, sizeof(WideRecord));
        return {&descriptor_, format_};
    }

    // Every track was started once and ran to its end, wrote no more than fits, and nothing stands behind the region.
    bool is_whole() const {
        if (!trace_) return true;
        for (uint32_t track = 0; track < num_tracks_; ++track) {
            const TrackHeader& header = descriptor_.region.headers[track];
            if (!header.started || !header.end_ticks || header.starts != 1) return false;  // once, in either format
            if (format_ == RecordFormat::ring) continue;
            if (header.written > header.attempted || header.written > descriptor_.records_per_track) return false;
        }
        char guard[sizeof(TrackHeader)];
        memset(guard, 0xa5, sizeof(guard));
        return memcmp(descriptor_.region.headers + num_tracks_, guard, sizeof(TrackHeader)) == 0 &&
               memcmp(descriptor_.region.records + num_records_, guard, sizeof(WideRecord)) == 0;
    }

private:
    const bool trace_;
    const RecordFormat format_;
    const uint32_t num_tracks_;
    size_t num_records_ = 0;
    LaunchDescriptor descriptor_{};
};

// One line on stderr; returns the exit code for it.
inline int report_fault(const FaultRecord& fault, const char* stage) {
    std::fprintf(stderr,
                 "fault rank=%u cause=%u stage=%s peer=%u channel=%s slot=%u block=%u warp=%u wanted=%llu seen=%llu "
                 "waited_ms=%llu aborted_by=%u\n",
                 fault.rank,
                 fault.cause,
                 stage,
                 fault.peer,
                 channel_names().at(fault.channel),
                 fault.slot,
                 fault.block,
                 fault.warp,
                 static_cast<unsigned long long>(fault.wanted_epoch),
                 static_cast<unsigned long long>(fault.seen_epoch),
                 static_cast<unsigned long long>(fault.waited_ticks / 1'000'000),
                 fault.aborted_by);
    return 3;
}

}  // namespace tracekern
