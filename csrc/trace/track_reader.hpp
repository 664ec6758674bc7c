// Reads the tracks of a region for the dump: how many records each has, and which, oldest first.
//
// In a track of spans that never finished, work that had begun and not ended holds empty places. Places behind the last
// record are unknown: nothing in a region says whether one was taken.
//
// A ring may be torn: its writer was killed, or still writes. Its own lap and time say what a slot holds, so a
// record that never arrived, or one that an earlier launch left in the same memory up to 39 hours before, is not taken
// for a new one. (In a track that finished, no older one either.)
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>

#include "trace/record.h"

namespace tracekern {

// Of any format: all have their word at the same place.
inline RecordKind kind_of(const WideRecord& record) {
    return static_cast<RecordKind>(record.word & ((1u << kKindBits) - 1));
}

class RingReader {
public:
    // records: of one track, at least one.
    RingReader(const TrackHeader& header, std::span<const WideRecord> records)
        : header_(header), slots_(records.first(std::bit_floor(records.size()))) {
        int64_t newest = -1;
        newest_lap_ = lap_of(slots_[0]);
        for (const WideRecord& slot : slots_) {
            if (!is_filled(slot) || since_start(slot) <= newest) continue;
            newest = since_start(slot);
            newest_lap_ = lap_of(slot);
        }
        for (uint32_t i = 0; i < slots_.size(); ++i) {
            if (is_filled(slots_[i]) && lap_of(slots_[i]) == newest_lap_) head_ = i + 1;
        }
    }

    // Calls visit(record) for each that arrived, its ticks without the lap.
    template <class Visit>
    void for_each(Visit visit) const {
        const auto visit_between = [&](uint32_t first, uint32_t stop, uint16_t lap) {
            for (uint32_t i = first; i < stop; ++i) {
                if (!is_filled(slots_[i]) || lap_of(slots_[i]) != lap) continue;
                WideRecord record = slots_[i];
                record.ticks = header_.start_ticks + static_cast<uint64_t>(since_start(record));
                visit(record);
            }
        };
        visit_between(head_, num_slots(), static_cast<uint16_t>(newest_lap_ - 1));
        visit_between(0, head_, newest_lap_);
    }

    // What the header of the track says in a dump.
    void count(TrackHeader& header) const {
        uint32_t num_older = 0, num_kept = 0;
        for (uint32_t i = head_; i < num_slots(); ++i) {
            num_older += is_filled(slots_[i]) && lap_of(slots_[i]) == static_cast<uint16_t>(newest_lap_ - 1);
        }
        for_each([&](const WideRecord&) { ++num_kept; });
        // Counted modulo 2^16: lap 0 is not the first where an older one is behind it.
        const uint32_t num_laps = head_ == 0 ? 0 : newest_lap_ == 0 && num_older > 0 ? 1u << 16 : newest_lap_;
        const uint32_t wanted = num_laps > 0 || num_older > 0 ? num_slots() : head_;
        if (!is_finished()) header.attempted = num_laps * num_slots() + head_;
        header.written = num_kept;
        header.missing = wanted - num_kept;
    }

private:
    uint32_t num_slots() const { return static_cast<uint32_t>(slots_.size()); }
    bool is_finished() const { return header_.end_ticks != 0; }
    static uint16_t lap_of(const WideRecord& slot) { return static_cast<uint16_t>(slot.ticks >> kLapShift); }
    // Sign-extended: what an earlier launch left comes out negative.
    int64_t since_start(const WideRecord& slot) const {
        return static_cast<int64_t>((slot.ticks - header_.start_ticks) << (64 - kLapShift)) >> (64 - kLapShift);
    }
    bool is_filled(const WideRecord& slot) const {
        const int64_t since = since_start(slot);
        const int64_t longest =
            is_finished() ? static_cast<int64_t>(header_.end_ticks - header_.start_ticks) : int64_t{1} << kLapShift;
        return kind_of(slot) != RecordKind::empty && since >= 0 && since <= longest;
    }

    const TrackHeader header_;
    const std::span<const WideRecord> slots_;
    uint16_t newest_lap_;
    uint32_t head_ = 0;  // slots of the newest lap, up to its last record
};

// Records of a track of cycles before the first that is not its own: that one is empty.
inline uint32_t count_before_empty(std::span<const WideRecord> records) {
    uint32_t found = 0;
    while (found < records.size() && kind_of(records[found]) != RecordKind::empty) ++found;
    return found;
}

// Sets `written` and `missing` of a track of spans that never finished.
inline void count_spans(TrackHeader& header, std::span<const WideRecord> records) {
    uint32_t num_stored = 0, num_until_last = 0;
    for (uint32_t i = 0; i < records.size(); ++i) {
        if (kind_of(records[i]) == RecordKind::empty) continue;
        ++num_stored;
        num_until_last = i + 1;
    }
    header.written = num_stored;
    header.missing = num_until_last - num_stored;
}

// Sets `written` of a track to the records that are in the region, where it did not finish `missing`, and of a ring
// `attempted`. is_reused: an earlier launch had the region. A body that keeps the first records stores nothing in such
// a region; of one that counts cycles, the records of a track that never finished are unknown.
inline void find_records(TrackHeader& header, std::span<const WideRecord> records, bool is_reused) {
    if (header.started == kStartedRing) {
        if (!records.empty()) RingReader(header, records).count(header);
    } else if (header.end_ticks == 0) {
        header.written = 0;
        const bool is_known = header.started != 0 && !is_reused;
        if (is_known && header.started == kStarted) count_spans(header, records);
        if (is_known && header.started == kStartedCycles) header.written = count_before_empty(records);
    }
    if (header.written > records.size()) header.written = static_cast<uint32_t>(records.size());
}

// Copies the `written` records that find_records() counted; returns where the next ones go. A kernel that still runs
// may have gone on since: what a ring has lost by then is left empty, what it has won is left out.
inline WideRecord* copy_records(const TrackHeader& header, std::span<const WideRecord> records, WideRecord* out) {
    WideRecord* const stop = out + header.written;
    if (header.started == kStarted && header.missing) {
        for (size_t i = 0; out < stop && i < records.size(); ++i) {
            if (kind_of(records[i]) != RecordKind::empty) *out++ = records[i];
        }
    } else if (header.started != kStartedRing) {
        if (header.written) memcpy(out, records.data(), header.written * sizeof(WideRecord));
        return stop;
    } else if (!records.empty()) {
        RingReader(header, records).for_each([&](const WideRecord& record) {
            if (out < stop) *out++ = record;
        });
    }
    while (out < stop) *out++ = WideRecord{};
    return stop;
}

}  // namespace tracekern
