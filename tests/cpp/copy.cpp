// The copy loop of GPUs, lane by lane: 0 where it copies every vector and nothing beyond, whatever their number.
#include "platform/copy.h"

#include <cstdio>
#include <vector>

#include "platform/device.h"

using namespace tracekern;

namespace {

template <uint32_t kOfWarp, uint32_t kBatch>
bool copies_all() {
    for (uint32_t count = 0; count < 3 * kOfWarp * kBatch; ++count) {
        std::vector<uint32_t> from(count), to(count + kOfWarp, ~0u);
        for (uint32_t i = 0; i < count; ++i) from[i] = i;
        // A load beyond the last one is found by the sanitizer.
        for (uint32_t lane = 0; lane < kOfWarp; ++lane) {
            copy_batched<uint32_t, kOfWarp, kBatch>(to.data(), from.data(), count, lane);
        }
        for (uint32_t i = 0; i < to.size(); ++i) {
            if (to[i] != (i < count ? i : ~0u)) return false;
        }
    }
    return true;
}

}  // namespace

int main() {
    return copies_all<32, 4>() && copies_all<32, 8>() && copies_all<64, 8>() ? 0 : 1;
}
