// In which order a warp takes the rows that come to its rank.
//
// The rows of a partition are laid end to end, source by source, and dealt out one by one: the shares of two warps
// differ by one row at most, and so do their parts of each source. A warp takes its share in turns, a row of each
// source that has one left, and neighbouring warps begin with different sources. So a rank works for all ranks at a
// time, from the first row to the last: were all ranks to take source 0 first, they would all send their results to
// rank 0 at once, which takes as long as if they sent them one after the other.
//
// Lanes keep the turns: each looks after one source, or after every few rows of one, and knows its next row, the head.
// A head that has not come is passed over, since other lanes have others. Only where no head is there does the warp
// wait, and then for whichever comes first. Rows behind a missing head are not looked at: a source sends its rows in
// about their order.
#pragma once

#include "moe/p2p/call.h"

namespace tracekern {

class IncomingRows {
public:
    TK_DEVICE IncomingRows(Warp& warp, const P2PArgs& args, Share share, uint32_t partition)
        : warp_(warp), args_(args), share_(share), partition_(partition) {
        const uint32_t num_ranks = args.shape.num_ranks;
        rows_ahead_ = num_ranks < kHeads ? kHeads / num_ranks : 1;
        const uint32_t num_heads = num_ranks < kLookers ? num_ranks * rows_ahead_ : kLookers;
        heads_ = warp.lanes([&](int lane) {
            const uint32_t index = static_cast<uint32_t>(lane);
            return index < num_heads ? first_with_rows(head_of(index % num_ranks, index / num_ranks)) : Head{};
        });
        find_left();
        turn_ = share.first % num_heads;
    }

    // The lanes that have a row left, of the first 32, a bit each.
    TK_DEVICE uint32_t left() const { return left_; }

    struct Row {
        uint32_t source;
        uint32_t slot;  // at this rank, among the rows of that source
    };
    // The row that this lane is at.
    TK_DEVICE Row own_row(int lane) const { return row_at(heads_[lane].place, heads_[lane].row); }
    // The row of the lane whose turn it is, of those in `lanes`, for all lanes.
    TK_DEVICE Row first_of(uint32_t lanes) { return row_of(next_turn(lanes)); }

    // Calls visit(src_rank, slot) for the rows of these lanes, each of which then goes on to its next.
    template <class Visit>
    TK_DEVICE void take(uint32_t lanes, Visit visit) {
        for (uint32_t rest = lanes; rest;) {
            const int lane = next_turn(rest);
            rest &= ~(1u << lane);
            turn_ = (static_cast<uint32_t>(lane) + 1) % kLookers;
            const Row row = row_of(lane);
            visit(row.source, row.slot);
        }
        heads_ = warp_.lanes([&](int lane) { return is_in(lanes, lane) ? next_head(heads_[lane]) : heads_[lane]; });
        find_left();
    }

private:
    // Lanes that may look after a source, and how many of them do at most where there are few sources: a polling warp
    // asks for one line of the cache each.
    static constexpr uint32_t kLookers = 32;
    static constexpr uint32_t kHeads = 8;

    struct Head {
        uint32_t place = 0;  // of the source: how many ranks behind this one it stands, less one
        uint32_t row = 0;    // of those that come from there in this partition
        uint32_t count = 0;
    };

    static TK_DEVICE bool is_in(uint32_t lanes, int lane) {
        return static_cast<uint32_t>(lane) < kLookers && lanes >> lane & 1;
    }
    TK_DEVICE uint32_t source_at(uint32_t place) const {
        const uint32_t source = args_.comm.rank + 1 + place;
        return source < args_.shape.num_ranks ? source : source - args_.shape.num_ranks;
    }

    // The first row of this share at a source, `skipped` rows of the share left out.
    TK_DEVICE Head head_of(uint32_t place, uint32_t skipped) const {
        const uint32_t cell = partition_ * args_.shape.num_ranks + source_at(place);
        const uint32_t begin = args_.recv_begin[cell];
        const uint32_t before = begin > share_.first ? begin - share_.first : 0;
        const uint32_t first = share_.first + (before + share_.stride - 1) / share_.stride * share_.stride - begin;
        return {place, first + skipped * share_.stride, args_.recv_count[cell]};
    }
    // Where there are more sources than lanes, a lane has several, one after the other.
    TK_DEVICE Head next_head(Head head) const {
        head.row += rows_ahead_ * share_.stride;
        return first_with_rows(head);
    }
    TK_DEVICE Head first_with_rows(Head head) const {
        while (head.row >= head.count && head.place + kLookers < args_.shape.num_ranks) {
            head = head_of(head.place + kLookers, 0);
        }
        return head;
    }
    TK_DEVICE void find_left() {
        left_ = warp_.ballot([&](int lane) { return heads_[lane].row < heads_[lane].count; });
    }

    TK_DEVICE int next_turn(uint32_t lanes) const {
        const uint32_t later = lanes & ~0u << turn_;
        return static_cast<int>(first_bit(later ? later : lanes));
    }
    TK_DEVICE Row row_at(uint32_t place, uint32_t row) const {
        return {source_at(place), partition_begin(args_, partition_) + row};
    }
    TK_DEVICE Row row_of(int lane) {
        const auto both = warp_.lanes([&](int own) { return uint64_t{heads_[own].place} << 32 | heads_[own].row; });
        const uint64_t head = warp_.shuffle(both, lane);
        return row_at(static_cast<uint32_t>(head >> 32), static_cast<uint32_t>(head));
    }

    Warp& warp_;
    const P2PArgs& args_;
    const Share share_;
    const uint32_t partition_;
    uint32_t rows_ahead_;  // lanes that look after one source, each after every rows_ahead_-th of its rows
    PerLane<Head> heads_;
    uint32_t left_;
    uint32_t turn_;  // the lane whose turn it is
};

}  // namespace tracekern
