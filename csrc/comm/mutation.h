// Planted faults, for the tests that prove that others would be found. Outside those tests nothing is mutated.
//
// A test compiles with -DTK_PLANTED_FAULTS and names one channel and mutation at run time. Channels are those of the
// kernels' event tables, and `grid`, the arrival of a grid's blocks.
#pragma once

#include "platform/qualifiers.h"

namespace tracekern {

enum class Channel : unsigned { counts, token, rank, result, results, ack, barrier, grid, row, partial, layout };
// What is left out: the release, the acquire, the comparison of the epoch, the whole wait.
enum class Mutation : unsigned { none, release, acquire, epoch, acknowledgement };

inline constexpr const char* kChannelNames[] = {
    "counts", "token", "rank", "result", "results", "ack", "barrier", "grid", "row", "partial", "layout"};
inline constexpr const char* kMutationNames[] = {"none", "release", "acquire", "epoch", "acknowledgement"};

#ifdef TK_PLANTED_FAULTS
struct PlantedFault {
    Channel channel;
    Mutation mutation;
};
TK_VARIABLE PlantedFault planted_fault;

TK_DEVICE bool mutated(Channel channel, Mutation mutation) {
    return planted_fault.channel == channel && planted_fault.mutation == mutation;
}
#else
TK_HOST_DEVICE constexpr bool mutated(Channel, Mutation) {
    return false;
}
#endif

}  // namespace tracekern
