// Records of an engine: tracks of a capture that its threads write, in host time.
//
// A capture reserves one region for an engine, as for a launch. The worker writes all tracks but one; threads that wait
// share that one, under a mutex. Tracing never fails a transfer: what finds no room is counted by the recorder.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fabric/events.h"
#include "fabric/rule.hpp"
#include "platform/device.h"
#include "trace/trace_choice.h"

namespace tracekern {

// The anchor of host time (tracekern/host_clock.py). Engines of several hosts compare their times.
inline std::atomic<int64_t> host_anchor_ns{read_anchor_ns()};

inline SimulatedClock host_time() {
    return {.anchor_ns = host_anchor_ns.load(std::memory_order_relaxed)};
}

// One track of a region, whose writer is a thread of the host.
class HostTrack {
public:
    using Rec = Recorder<true>;

    HostTrack(const LaunchDescriptor& launch, uint32_t track, uint32_t num_tracks)
        : warp_(block_, 0, 1, track, num_tracks), recorder_(open(launch, warp_, track)) {}
    HostTrack(const HostTrack&) = delete;
    ~HostTrack() {
        const SimulatedClock clock = host_time();
        current_clock = &clock;  // of the track's end
        recorder_.reset();
        current_clock = &kHostClock;
    }

    static uint64_t now() { return host_time().read(); }

    // A span that has begun, and when.
    struct Open {
        Rec::Open span;
        uint64_t begin = 0;
    };

    // Spans may overlap. Readers rely on begins that never fall, and threads read the clock before they queue.
    template <auto kEvent, class... Values>
    Open begin(uint64_t ticks, Values... values) {
        go_on_to(ticks);
        return {recorder_->template begin_at<kEvent>(last_begin_, values...), last_begin_};
    }
    // One that is longer than a record can say is as long as it can: readers know this length.
    void end(const Open& open, uint64_t ticks) { recorder_->end_at(open.span, std::min(ticks, open.begin + kLongest)); }
    template <auto kEvent, class... Values>
    void mark(uint64_t ticks, Values... values) {
        go_on_to(ticks);
        recorder_->template mark_at<kEvent>(last_begin_, values...);
    }

private:
    // A host thread has no block to meet in.
    struct NoBlock final : BlockContext {
        void sync() override {}
        void relax(uint32_t&) override {}
        void trap() override {}
    };

    // Of 32 bits in units of the clock; one more says that a span is open.
    static constexpr uint64_t kLongest = uint64_t{0xffff'fffe} << kClockShift;

    // Records say when they begin by the same 32 bits: in between there must not be more.
    void go_on_to(uint64_t ticks) {
        while (ticks > last_begin_ + kLongest / 2) {
            last_begin_ += kLongest / 2;
            recorder_->template mark_at<TransferEvent::nothing>(last_begin_);
        }
        last_begin_ = std::max(last_begin_, ticks);
    }

    static std::unique_ptr<Rec> open(const LaunchDescriptor& launch, const Warp& warp, uint32_t track) {
        const SimulatedClock clock = host_time();
        current_clock = &clock;
        auto recorder = std::make_unique<Rec>(Rec::Args{launch}, warp, track);
        current_clock = &kHostClock;
        return recorder;
    }

    NoBlock block_;
    Warp warp_;
    std::unique_ptr<Rec> recorder_;
    uint64_t last_begin_ = now();
};

// A span that has begun, and in which recording: what begins in one must not end in the next, whose memory is another.
struct RecordedSpan {
    HostTrack::Open span;
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
        given_up_.clear();
        track_ = std::make_unique<HostTrack>(launch, static_cast<uint32_t>(EngineTrack::waits), num_tracks);
        is_on_.store(true, std::memory_order_relaxed);
    }
    void stop() {
        const std::lock_guard lock(mutex_);
        is_on_.store(false, std::memory_order_relaxed);
        track_.reset();
    }

    // One wait. Where it gives up, its span stays open, and the next wait for the same goes on with it.
    class Wait {
    public:
        Wait(WaitTrace& trace, uint32_t imm, uint64_t wanted) : trace_(trace), what_(imm, wanted) {
            if (!trace.is_on_.load(std::memory_order_relaxed)) return;  // one that begins meanwhile may be missed
            const std::lock_guard lock(trace.mutex_);
            if (!trace.track_) return;
            const auto given_up = trace.given_up_.extract(what_);
            span_ = given_up ? given_up.mapped()
                             : RecordedSpan{trace.track_->begin<TransferEvent::wait_imm>(HostTrack::now(), imm, wanted),
                                            trace.recording_};
        }
        Wait(const Wait&) = delete;
        ~Wait() {
            if (span_.recording == 0) return;
            const std::lock_guard lock(trace_.mutex_);
            if (span_.recording == trace_.recording_ && trace_.track_) trace_.given_up_[what_] = span_;
        }
        void end() {
            if (span_.recording == 0) return;
            const std::lock_guard lock(trace_.mutex_);
            if (trace_.track_ && span_.recording == trace_.recording_) trace_.track_->end(span_.span, HostTrack::now());
            span_ = {};
        }

    private:
        WaitTrace& trace_;
        const std::pair<uint32_t, uint64_t> what_;
        RecordedSpan span_;
    };

private:
    std::atomic<bool> is_on_ = false;
    rule::Mutex mutex_;
    std::unique_ptr<HostTrack> track_;
    std::map<std::pair<uint32_t, uint64_t>, RecordedSpan> given_up_;  // by immediate and what was wanted
    uint32_t recording_ = 0;
};

}  // namespace tracekern
