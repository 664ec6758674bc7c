// A test's hook: what a network brings comes late and in another order, as from one that keeps none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <utility>
#include <vector>

namespace tracekern {

class Shuffle {
public:
    explicit Shuffle(uint32_t seed) : random_(seed) {}

    void hold(std::function<void()> what) { held_.push_back(std::move(what)); }

    // Does about a third of what is held. Returns whether there was any.
    bool release() {
        if (held_.empty()) return false;
        std::shuffle(held_.begin(), held_.end(), random_);
        const size_t kept = held_.size() * 2 / 3;
        const std::vector<std::function<void()>> released(held_.begin() + static_cast<ptrdiff_t>(kept), held_.end());
        held_.resize(kept);
        for (const auto& what : released) what();
        return true;
    }

private:
    std::mt19937 random_;
    std::vector<std::function<void()>> held_;
};

}  // namespace tracekern
