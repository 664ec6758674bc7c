// What a lane moves at once. HIP's are its compiler's own.
#pragma once

#include <cstdint>

namespace tracekern {

struct alignas(16) Vector16 {
    uint32_t words[4];
};
struct alignas(8) Vector8 {
    uint32_t words[2];
};

}  // namespace tracekern
