// Channels of flags, and planted faults in them, for the tests that prove that others would be found. Outside those
// tests nothing is mutated: a test compiles with -DTK_PLANTED_FAULTS and names one channel and mutation at run time.
#pragma once

#include "platform/qualifiers.h"

namespace tracekern {

// What a flag belongs to. These are the communicator's own; kernels number theirs, an enum of their own, from
// kFirstOwnChannel on. Names are those of the kernels' event tables; `grid` is the arrival of a grid's blocks,
// `command` what a kernel tells its proxy, and `completed` what that tells of it.
enum class CommChannel : uint32_t { barrier, grid, command, completed };
inline constexpr const char* kCommChannelNames[] = {"barrier", "grid", "command", "completed"};
constexpr uint32_t kFirstOwnChannel = 4;

template <class Channel>
TK_HOST_DEVICE constexpr uint32_t channel_number(Channel channel) {
    return static_cast<uint32_t>(channel);
}

// What is left out: the release, the acquire, the comparison of the epoch, the whole wait, the comparison of the value,
// the look whether a flag is ahead already, and what a published design has wrong at this channel.
enum class Mutation : unsigned { none, release, acquire, epoch, acknowledgement, value, maximum, as_published };

inline constexpr const char* kMutationNames[] = {
    "none", "release", "acquire", "epoch", "acknowledgement", "value", "maximum", "as_published"};

#ifdef TK_PLANTED_FAULTS
struct PlantedFault {
    uint32_t channel;
    Mutation mutation;
};
TK_VARIABLE PlantedFault planted_fault;

template <class Channel>
TK_DEVICE bool mutated(Channel channel, Mutation mutation) {
    return planted_fault.channel == channel_number(channel) && planted_fault.mutation == mutation;
}
#else
template <class Channel>
TK_HOST_DEVICE constexpr bool mutated(Channel, Mutation) {
    return false;
}
#endif

// Whether a kernel does at this channel what a published design has wrong.
template <class Channel>
TK_DEVICE bool does_as_published(Channel channel) {
    return mutated(channel, Mutation::as_published);
}

}  // namespace tracekern
