// platform/bulk.h for machines without such copies: one lane copies, and a phase counts its arrivals.
#pragma once

#ifdef TK_LATE_COPIES
    #include <functional>
#endif

namespace tracekern {

constexpr bool kHasBulkCopies = true;

class TransactionBarrier {
public:
    TK_DEVICE void init(uint32_t num_arrivals) {
        num_arrivals_ = num_arrivals;
        arrived_ = 0;
        bytes_left_ = 0;
    }
    TK_DEVICE void arrive() { add_acq_rel_device(&arrived_, 1u); }
    // The last byte arrives for it: the warp that expects is the one that starts the copies.
    TK_DEVICE void arrive_and_expect(uint32_t bytes) {
        bytes_left_ = bytes;
        if (bytes == 0) arrive();
    }
    TK_DEVICE void wait(Warp& warp, uint32_t phase) const {
        const uint32_t goal = (phase + 1) * num_arrivals_;
        for (uint32_t spins = 0; static_cast<int32_t>(load_acquire_device(&arrived_) - goal) < 0;) warp.relax(spins);
    }
    TK_DEVICE void complete(uint32_t bytes) {
        bytes_left_ -= bytes;
        if (bytes_left_ == 0) arrive();
    }

private:
    uint32_t num_arrivals_;
    uint32_t arrived_;  // in all phases
    uint32_t bytes_left_;
};

// make() makes a copy: at once, or for tests that attack what waits for copies when it suits them.
#ifdef TK_LATE_COPIES
void copy_late(std::function<void()> make);
#else
template <class F>
TK_DEVICE void copy_late(F make) {
    make();
}
#endif

TK_DEVICE void copy_parts(void* to, const void* from, uint32_t bytes) {
    const auto* parts = static_cast<const Vector16*>(from);
    for (uint32_t i = 0; i < bytes / sizeof(Vector16); ++i) static_cast<Vector16*>(to)[i] = parts[i];
}

template <Reuse>
TK_DEVICE void copy_bulk(void* to, const void* from, uint32_t bytes, TransactionBarrier& barrier) {
    copy_late([=, &barrier] {
        copy_parts(to, from, bytes);
        barrier.complete(bytes);
    });
}

struct RowMap {
    const char* rows;
    uint32_t num_rows, num_channels;
};

TK_DEVICE void copy_box_parts(void* to, const RowMap& map, uint32_t channel, uint32_t row) {
    constexpr uint32_t kRowPlaces = kBoxRowBytes / sizeof(Vector16);
    auto* places = static_cast<Vector16*>(to);
    for (uint32_t i = 0; i < kBoxBytes / sizeof(Vector16); ++i) {
        const uint32_t place = i % kRowPlaces, box_row = i / kRowPlaces % kBoxRows, part = i / kRowPlaces / kBoxRows;
        const uint32_t first = channel + part * kBoxRowChannels + (place ^ box_row) * 8;
        places[i] = Vector16{};
        if (row + box_row >= map.num_rows || first >= map.num_channels) continue;
        const uint64_t at = (uint64_t{row + box_row} * map.num_channels + first) * sizeof(BFloat16);
        places[i] = *reinterpret_cast<const Vector16*>(map.rows + at);
    }
}

TK_DEVICE void copy_box(void* to, const RowMap& map, uint32_t channel, uint32_t row, TransactionBarrier& barrier) {
    copy_late([=, &barrier] {
        copy_box_parts(to, map, channel, row);
        barrier.complete(kBoxBytes);
    });
}

}  // namespace tracekern
