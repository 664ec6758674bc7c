// Records of an engine: tracks of a capture that its threads write, in the wall clock of the host.
//
// A capture reserves one region for an engine, as for a launch. The worker writes all tracks but one; threads that wait
// share that one, under a mutex. Tracing never fails a transfer: what finds no room is counted by the recorder.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fabric/events.h"
#include "platform/device.h"
#include "trace/trace_choice.h"

namespace tracekern {

// One track of a region, whose writer is a thread of the host.
class HostTrack {
public:
    using Rec = Recorder<true>;

    HostTrack(const LaunchDescriptor& launch, uint32_t track, uint32_t num_tracks)
        : warp_(block_, 0, 1, track, num_tracks), recorder_(open(launch, warp_, track)) {}
    HostTrack(const HostTrack&) = delete;
    ~HostTrack() {
        current_clock = &kWallClock;  // of the track's end
        recorder_.reset();
        current_clock = &kHostClock;
    }

    static uint64_t now() { return kWallClock.read(); }

    // Spans may overlap. Readers rely on begins that never fall, and threads read the clock before they queue.
    template <auto kEvent, class... Values>
    OpenSpan begin(uint64_t ticks, Values... values) {
        last_begin_ = std::max(last_begin_, ticks);
        return recorder_->template begin_at<kEvent>(last_begin_, values...);
    }
    void end(const OpenSpan& span, uint64_t ticks) { recorder_->end_at(span, ticks); }
    template <auto kEvent, class... Values>
    void mark(uint64_t ticks, Values... values) {
        last_begin_ = std::max(last_begin_, ticks);
        recorder_->template mark_at<kEvent>(last_begin_, values...);
    }

private:
    // A host thread has no block to meet in.
    struct NoBlock final : BlockContext {
        void sync() override {}
        void relax(uint32_t&) override {}
        void trap() override {}
    };

    static std::unique_ptr<Rec> open(const LaunchDescriptor& launch, const Warp& warp, uint32_t track) {
        current_clock = &kWallClock;
        auto recorder = std::make_unique<Rec>(Rec::Args{launch}, warp, track);
        current_clock = &kHostClock;
        return recorder;
    }

    NoBlock block_;
    Warp warp_;
    std::unique_ptr<Rec> recorder_;
    uint64_t last_begin_ = 0;
};

// A span that has begun, and in which recording: what begins in one must not end in the next, whose memory is another.
struct RecordedSpan {
    OpenSpan span;
    uint32_t recording = 0;  // 0: not recorded
};

// Of the worker alone.
class WorkerTrace {
public:
    bool is_on() const { return !tracks_.empty(); }

    void start(const LaunchDescriptor& launch, uint32_t num_domains, uint64_t engine) {
        const uint32_t num_tracks = static_cast<uint32_t>(EngineTrack::first_domain) + num_domains;
        ++recording_;
        for (uint32_t track = 0; track < num_tracks; ++track) {
            const bool is_mine = track != static_cast<uint32_t>(EngineTrack::waits);
            tracks_.push_back(is_mine ? std::make_unique<HostTrack>(launch, track, num_tracks) : nullptr);
        }
        of(EngineTrack::transfers).mark<TransferEvent::engine>(HostTrack::now(), engine);
    }
    void stop() { tracks_.clear(); }

    void introduce(uint32_t peer, uint64_t engine) {
        if (is_on()) of(EngineTrack::transfers).mark<TransferEvent::peer>(HostTrack::now(), peer, engine);
    }

    template <auto kEvent, class... Values>
    RecordedSpan begin(EngineTrack track, uint64_t ticks, Values... values) {
        if (!is_on()) return {};
        return {of(track).begin<kEvent>(ticks, values...), recording_};
    }
    template <auto kEvent, class... Values>
    RecordedSpan begin_write(uint32_t domain, uint64_t ticks, Values... values) {
        if (!is_on()) return {};
        return {of_domain(domain).begin<kEvent>(ticks, values...), recording_};
    }
    void end(EngineTrack track, RecordedSpan& span, uint64_t ticks) {
        if (is_of_this(span)) of(track).end(span.span, ticks);
        span.recording = 0;
    }
    void end_write(uint32_t domain, RecordedSpan& span, uint64_t ticks) {
        if (is_of_this(span)) of_domain(domain).end(span.span, ticks);
        span.recording = 0;
    }
    template <auto kEvent, class... Values>
    void mark(EngineTrack track, uint64_t ticks, Values... values) {
        if (is_on()) of(track).mark<kEvent>(ticks, values...);
    }
    // 0 where nothing is recorded: a clock read costs more than all else here.
    uint64_t now() const { return is_on() ? HostTrack::now() : 0; }

private:
    bool is_of_this(const RecordedSpan& span) const { return is_on() && span.recording == recording_; }
    HostTrack& of(EngineTrack track) { return *tracks_[static_cast<size_t>(track)]; }
    HostTrack& of_domain(uint32_t domain) { return *tracks_[static_cast<size_t>(EngineTrack::first_domain) + domain]; }

    std::vector<std::unique_ptr<HostTrack>> tracks_;
    uint32_t recording_ = 0;
};

// Of threads that wait for immediates.
class WaitTrace {
public:
    void start(const LaunchDescriptor& launch, uint32_t num_domains) {
        const std::lock_guard lock(mutex_);
        const uint32_t num_tracks = static_cast<uint32_t>(EngineTrack::first_domain) + num_domains;
        ++recording_;
        track_ = std::make_unique<HostTrack>(launch, static_cast<uint32_t>(EngineTrack::waits), num_tracks);
        is_on_.store(true, std::memory_order_relaxed);
    }
    void stop() {
        const std::lock_guard lock(mutex_);
        is_on_.store(false, std::memory_order_relaxed);
        track_.reset();
    }
    RecordedSpan begin(uint32_t imm, uint64_t wanted) {
        if (!is_on_.load(std::memory_order_relaxed)) return {};  // a wait that begins meanwhile may be missed
        const std::lock_guard lock(mutex_);
        if (!track_) return {};
        return {track_->begin<TransferEvent::wait_imm>(HostTrack::now(), imm, wanted), recording_};
    }
    // Not of a wait that gave up: what it waited for never came, so its span stays open.
    void end(const RecordedSpan& span) {
        if (span.recording == 0) return;
        const std::lock_guard lock(mutex_);
        if (track_ && span.recording == recording_) track_->end(span.span, HostTrack::now());
    }

private:
    std::atomic<bool> is_on_ = false;
    std::mutex mutex_;
    std::unique_ptr<HostTrack> track_;
    uint32_t recording_ = 0;
};

}  // namespace tracekern
