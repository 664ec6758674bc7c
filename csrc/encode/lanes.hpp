// Spans of one track that overlap in part cannot share a row: a trace viewer nests by order alone and would draw wrong
// lengths. A lane is a row on which every span lies inside, or beside, every other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace tracekern::encode {

// `Open` needs a member `int64_t end`. Spans come in order of (start, -end).
template <class Open>
class Lanes {
public:
    // The first lane with a span that ends at or before `horizon`; -1 when there is none.
    int lane_to_close(int64_t horizon) const {
        for (size_t lane = 0; lane < stacks_.size(); ++lane) {
            if (!stacks_[lane].empty() && stacks_[lane].back().end <= horizon) return static_cast<int>(lane);
        }
        return -1;
    }

    Open close(int lane) {
        Open open = stacks_[lane].back();
        stacks_[lane].pop_back();
        return open;
    }

    // Call when lane_to_close(start) is -1: the lane where [start, end] fits, a new one if need be.
    int find(int64_t end) {
        for (size_t lane = 0; lane < stacks_.size(); ++lane) {
            if (stacks_[lane].empty() || stacks_[lane].back().end >= end) return static_cast<int>(lane);
        }
        stacks_.emplace_back();
        return static_cast<int>(stacks_.size()) - 1;
    }

    void open(int lane, const Open& span) { stacks_[lane].push_back(span); }

    size_t count() const { return stacks_.size(); }

    void clear() { stacks_.clear(); }

private:
    std::vector<std::vector<Open>> stacks_;
};

constexpr int64_t kEndOfTime = std::numeric_limits<int64_t>::max();

}  // namespace tracekern::encode
