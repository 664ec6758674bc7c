// Planted faults, for the tests that prove that others would be found. Outside those tests nothing is mutated.
//
// A test compiles with -DTK_MUTATE_CHANNEL=token -DTK_MUTATION=release. Channels are those of the kernels' event
// tables.
#pragma once

#include "platform/qualifiers.h"

namespace tracekern {

enum class Channel : unsigned { counts, token, rank, result, results, ack, barrier, clock };
enum class Mutation { none, release, acquire, epoch, acknowledgement };

inline constexpr const char* kChannelNames[] = {
    "counts", "token", "rank", "result", "results", "ack", "barrier", "clock"};

TK_HOST_DEVICE constexpr bool mutated([[maybe_unused]] Channel channel, [[maybe_unused]] Mutation mutation) {
#ifdef TK_MUTATION
    return channel == Channel::TK_MUTATE_CHANNEL && mutation == Mutation::TK_MUTATION;
#else
    return false;
#endif
}

}  // namespace tracekern
