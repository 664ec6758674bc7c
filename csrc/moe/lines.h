// Lines of the cache, on which rows start and words stand alone.
#pragma once

#include <cstdint>

#include "platform/qualifiers.h"

namespace tracekern {

constexpr uint64_t kLineBytes = 128;

// Stores that straddle lines are more messages on the link.
TK_HOST_DEVICE constexpr uint64_t whole_lines(uint64_t bytes) {
    return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
}

// A word that others spin on or write beside: on a line of its own, so that nobody else's traffic delays it.
struct LineWord {
    uint64_t word;
    uint64_t rest[kLineBytes / sizeof(uint64_t) - 1];
};

}  // namespace tracekern
