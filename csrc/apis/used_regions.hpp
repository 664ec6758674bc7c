// The regions that launches of a flight recorder had, and which of them may be used again: those whose launches have
// certainly finished. Called with the interpreter's lock; what asks a stream runs code of Python.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>

namespace tracekern {

// How far a stream is, in launches of any kernel. It is read from marks between launches; each mark costs time.
class StreamProgress {
public:
    // mark(): puts a mark behind all launches so far; returns a function that tells whether the stream passed it.
    explicit StreamProgress(pybind11::object mark) : mark_(std::move(mark)) {}

    // Makes a mark that is due, before a launch that may or may not be recorded. ahead: earlier launches have not all
    // been started, so that a mark made now would come before them.
    void before_launch(bool ahead) {
        may_mark_ = !ahead;
        mark_after(spacing_);
    }
    // Limits the launches between two marks from now on, not counting those of one burst.
    void limit_spacing(uint64_t spacing) { spacing_ = std::min(spacing_, spacing); }
    // The number of the next launch. spacing: how far apart the marks for its kernel may be.
    uint64_t count(uint64_t spacing) {
        mark_after(spacing);
        return num_launches_++;
    }
    // Whether the launch with this number has certainly finished.
    bool is_through(uint64_t launch) {
        if (launch >= last_mark_) mark_after(1);
        while (launch >= num_passed_ && !marks_.empty()) {
            const auto [number, passed] = marks_.front();
            if (!pybind11::cast<bool>(passed())) break;
            // Another thread may have come here while that one was asked.
            if (!marks_.empty() && marks_.front().first == number) marks_.pop_front();
            num_passed_ = std::max(num_passed_, number);
        }
        return launch < num_passed_;
    }

private:
    // Makes a mark if so many launches came since the last one and a mark is possible here.
    void mark_after(uint64_t num_launches) {
        if (!may_mark_ || num_launches_ - last_mark_ < num_launches) return;
        const uint64_t number = num_launches_;
        pybind11::object passed = mark_();
        last_mark_ = std::max(last_mark_, number);
        marks_.emplace_back(number, std::move(passed));
    }

    pybind11::object mark_;
    std::deque<std::pair<uint64_t, pybind11::object>> marks_;
    uint64_t num_launches_ = 0, last_mark_ = 0, num_passed_ = 0;
    uint64_t spacing_ = uint64_t{1} << 30;
    bool may_mark_ = true;
};

// Of one kernel's launches on one stream, in the order of the launches.
class UsedRegions {
public:
    struct Region {
        uint32_t launch_idx;
        uint64_t offset;  // from the segment's start
    };

    explicit UsedRegions(StreamProgress& progress) : progress(progress) {}

    // One that a launch is about to use.
    void append(Region region) { regions_.emplace_back(progress.count(spacing()), region); }
    // The oldest; none if there is none, or if its launch may still run. Half the regions lie between two marks, which
    // leaves the stream time to pass one.
    std::optional<Region> take_oldest() {
        if (regions_.empty()) return std::nullopt;
        progress.limit_spacing(spacing());
        const uint64_t oldest = regions_.front().first;
        if (!progress.is_through(oldest) || regions_.empty() || regions_.front().first != oldest) return std::nullopt;
        const Region region = regions_.front().second;
        regions_.pop_front();
        return region;
    }
    // It was not used after all. Its launch is over.
    void put_back(Region region) { regions_.emplace_front(0, region); }

    StreamProgress& progress;

private:
    uint64_t spacing() const { return regions_.size() / 2 + 1; }

    std::deque<std::pair<uint64_t, Region>> regions_;  // with the number of the launch
};

}  // namespace tracekern
