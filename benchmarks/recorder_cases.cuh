// The probes of recorder.cu on the host: each with its buffer, and a reader that knows what must stand in it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "platform/gpu_host.hpp"
#include "recorder_bounds.cuh"
#include "recorder_probes.cuh"

namespace {

constexpr uint32_t kMaxBlocks = 264;
constexpr uint32_t kMaxTracks = kMaxBlocks * 32;

struct Config {
    uint32_t num_blocks, num_warps, num_regions, num_steps;
    uint32_t num_tracks() const { return num_blocks * num_warps; }
};

struct DecodedSpan {
    uint64_t begin_ns, end_ns;
};
using Spans = std::vector<DecodedSpan>;

class Case {
public:
    Case(std::string name, const void* kernel, double bytes_per_span)
        : name(std::move(name)), kernel(kernel), bytes_per_span(bytes_per_span) {}
    virtual ~Case() = default;
    virtual void prepare(const Config&, bool) {}
    virtual void launch(const BenchArgs& args, const Config& config) = 0;
    // The spans of one track, oldest first; throws when a record is not what it must be.
    virtual Spans read(const Config&, uint32_t) const { return {}; }
    virtual bool has_records() const { return true; }

    const std::string name;
    const void* kernel;
    const double bytes_per_span;
    std::vector<float> times_ms;

protected:
    static constexpr uint32_t kSharedBytes = 120 << 10;  // one block an SM
    void start(const BenchArgs& args, const Config& config, void* trace) const {
        BenchArgs copy = args;
        launch_kernel(kernel, {config.num_blocks, config.num_warps * 32, kSharedBytes}, {&copy, trace});
    }

public:
    void allow_shared() const {
        TK_CUDA(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes)));
    }
};

void require(bool holds, const std::string& what) {
    if (!holds) throw std::runtime_error(what);
}

template <class T>
std::vector<T> fetch(const T* device, size_t count) {
    std::vector<T> host(count);
    TK_CUDA(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
}

// Leave no records.
class NothingCase final : public Case {
public:
    NothingCase() : Case("nothing", reinterpret_cast<const void*>(run_regions<Nothing>), 0) {}
    void launch(const BenchArgs& args, const Config& config) override {
        Nothing::Args none;
        start(args, config, &none);
    }
    bool has_records() const override { return false; }
};

// A span whose times are the low 32 bits of (ns >> `shift`), behind those that were read before it.
DecodedSpan unwrap(const Spans& before, uint32_t begin, uint32_t end, uint32_t shift) {
    const uint64_t base = before.empty() ? begin : before.back().end_ns >> shift;
    const uint64_t first = base + static_cast<uint32_t>(begin - static_cast<uint32_t>(base));
    return {first << shift, (first + static_cast<uint32_t>(end - begin)) << shift};
}

// A span from the words that a bound stored for it.
template <class Probe>
DecodedSpan decode(const uint32_t* words, const Spans& before) {
    if constexpr (std::is_same_v<Probe, TwoStores>) {
        require(words[3] == TwoStores::kWord && words[7] == TwoStores::kWord, "wrong word");
        return {uint64_t{words[1]} << 32 | words[0], uint64_t{words[5]} << 32 | words[4]};
    } else if constexpr (std::is_same_v<Probe, Short>) {
        require(words[0] == Short::kBeginWord && words[2] == Short::kEndWord, "begin and end do not alternate");
        return unwrap(before, words[1], words[3], 0);
    } else {
        uint64_t fields = 0;
        if constexpr (std::is_same_v<Probe, OneChecked<true>>) {
            fields = Probe::fields(kPeer, static_cast<uint32_t>(before.size()));
        }
        const uint64_t low_and_word = fields << kFieldsFrom | Probe::kWord;
        require(
            words[2] == static_cast<uint32_t>(low_and_word >> 32) && words[3] == static_cast<uint32_t>(low_and_word),
            "wrong fields or word");
        return unwrap(before, words[0], words[1], kTickBits);
    }
}

// A lower bound.
template <class Probe>
class BoundCase final : public Case {
public:
    BoundCase(const std::string& name, char* buffer)
        : Case(name, reinterpret_cast<const void*>(run_regions<Probe>), Probe::kSpanBytes), buffer_(buffer) {}
    bool has_records() const override { return Probe::kSpanBytes != 0; }
    void launch(const BenchArgs& args, const Config& config) override {
        const uint32_t track_bytes = std::max(Probe::kSpanBytes * config.num_regions, 16u);
        TrackArgs trace{reinterpret_cast<uint64_t*>(buffer_), track_bytes, ~0u};
        start(args, config, &trace);
    }
    Spans read(const Config& config, uint32_t track) const override {
        Spans spans;
        if constexpr (Probe::kSpanBytes != 0) {
            const uint64_t track_bytes = uint64_t{Probe::kSpanBytes} * config.num_regions;
            const char* const place = buffer_ + track * track_bytes;
            const auto words = fetch(reinterpret_cast<const uint32_t*>(place), track_bytes / sizeof(uint32_t));
            for (size_t at = 0; at < words.size(); at += Probe::kSpanBytes / sizeof(uint32_t)) {
                spans.push_back(decode<Probe>(&words[at], spans));
            }
        }
        return spans;
    }

private:
    char* buffer_;
};

// deselected: its launches select no event, so that no store is left of a span but all its instructions.
template <bool kFields, class Rec = WholeRecorder>
class OursCase final : public Case {
    using Probe = Ours<kFields, Rec>;

public:
    OursCase(const std::string& name, char* records, bool deselected = false)
        : Case(name, reinterpret_cast<const void*>(run_regions<Probe>), deselected ? 0 : sizeof(SpanRecord)),
          records_(reinterpret_cast<SpanRecord*>(records)),
          headers_(sizeof(TrackHeader) * kMaxTracks),
          deselected_(deselected) {}
    bool has_records() const override { return !deselected_; }

    void prepare(const Config& config, bool zero) override {
        LaunchDescriptor launch{};
        launch.region.headers = headers_.template as<TrackHeader>();
        launch.region.records = reinterpret_cast<WideRecord*>(records_);
        launch.event_mask = deselected_ ? 0 : ~uint64_t{0};
        launch.records_per_track = config.num_regions;
        launch.warps_per_block = static_cast<uint16_t>(config.num_warps);
        launch.block_stop = config.num_blocks;
        launch.block_step = 1;
        launch.role_mask = ~0u;
        launch.num_blocks = config.num_blocks;
        require(!Rec::kIsWhole || WholeLaunch::is_fit(launch),
                "the region has no room for the recorder of whole launches");
        trace_ = Rec::Args::of(launch);
        if (zero) TK_CUDA(cudaMemset(launch.region.headers, 0, sizeof(TrackHeader) * config.num_tracks()));
    }
    void launch(const BenchArgs& args, const Config& config) override { start(args, config, &trace_); }
    Spans read(const Config& config, uint32_t track) const override {
        const TrackHeader header = fetch(headers_.template as<TrackHeader>() + track, 1)[0];
        require(header.started == kStarted && header.end_ticks != 0, "a track did not finish");
        require(header.written == header.attempted, "records were lost");
        require(header.written == config.num_regions, "wrong number of records: " + std::to_string(header.written));
        const auto records = fetch(records_ + uint64_t{track} * config.num_regions, header.written);
        Spans spans;
        for (const SpanRecord& record : records) {
            const uint64_t payload = uint64_t{record.payload_high} << kPayloadLowBits | record.word >> 9;
            require(static_cast<RecordKind>(record.word & 7) == RecordKind::span, "wrong kind");
            require((record.word >> kKindBits & (kMaxEvents - 1)) == (kFields ? 1u : 0u), "wrong event");
            const uint64_t i = spans.size();
            require(!kFields || payload == (kPeer | i << 10 | (i & 0xffff) << 32), "wrong payload");
            spans.push_back(unwrap(spans, record.begin, record.end, kClockShift));
        }
        return spans;
    }

private:
    SpanRecord* records_;
    DeviceMemory headers_;
    const bool deselected_;
    typename Probe::Args trace_{};
};

// FlashInfer's layout: word 0, then event k of writer w at 1 + k * num_writers + w; 8 bytes each, tag low, time high.
template <class Probe>
class FlashinferCase final : public Case {
public:
    FlashinferCase(const std::string& name, char* buffer)
        : Case(name, reinterpret_cast<const void*>(run_regions<Probe>), 16),
          buffer_(reinterpret_cast<uint64_t*>(buffer)) {}
    void launch(const BenchArgs& args, const Config& config) override {
        typename Probe::Args trace{buffer_};
        start(args, config, &trace);
    }
    Spans read(const Config& config, uint32_t track) const override {
        std::vector<uint64_t> events(size_t{2} * config.num_regions);
        TK_CUDA(cudaMemcpy2D(events.data(),
                             sizeof(uint64_t),
                             buffer_ + 1 + track,
                             config.num_tracks() * sizeof(uint64_t),
                             sizeof(uint64_t),
                             events.size(),
                             cudaMemcpyDeviceToHost));
        Spans spans;
        for (size_t i = 0; i < events.size(); i += 2) {
            require((events[i] & 3) == 0 && (events[i + 1] & 3) == 1, "begin and end do not alternate");
            const auto begin = static_cast<uint32_t>(events[i] >> 32), end = static_cast<uint32_t>(events[i + 1] >> 32);
            spans.push_back(unwrap(spans, begin, end, 0));
        }
        return spans;
    }

private:
    uint64_t* buffer_;
};

class AtomicCase final : public Case {
public:
    explicit AtomicCase(char* buffer)
        : Case("atomic", reinterpret_cast<const void*>(run_regions<Atomic>), 32),
          buffer_(reinterpret_cast<uint64_t*>(buffer)) {}
    void prepare(const Config&, bool) override { TK_CUDA(cudaMemset(buffer_, 0, sizeof(uint64_t))); }
    void launch(const BenchArgs& args, const Config& config) override {
        BufferArgs trace{buffer_};
        start(args, config, &trace);
    }
    // Entries name their block only: the first num_regions of the asked block's, in order of time.
    Spans read(const Config& config, uint32_t track) const override {
        const size_t count = size_t{config.num_tracks()} * config.num_regions;
        require(fetch(buffer_, 1)[0] == count, "wrong number of entries");
        const auto words = fetch(buffer_ + 1, std::min<size_t>(count, 1 << 20) * 4);
        Spans spans;
        for (size_t i = 0; i < words.size() && spans.size() < config.num_regions; i += 4) {
            if (words[i + 3] == track / config.num_warps) spans.push_back({words[i], words[i] + words[i + 1]});
        }
        std::sort(spans.begin(), spans.end(), [](auto a, auto b) { return a.begin_ns < b.begin_ns; });
        return spans;
    }

private:
    uint64_t* buffer_;
};

}  // namespace
