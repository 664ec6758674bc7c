// The word that ranks signal by: a 64-bit {epoch, value}.
//
// The epoch says of which call it is, so flags are never cleared, and equality of the epoch survives its wrap. A flag
// that nobody raises for exactly 2^40 calls would pass for a new one: with calls of 10 us that takes four months. A
// value that counts, such as a ring's position, begins at 0 in each call.
#pragma once

#include "platform/qualifiers.h"

namespace tracekern {

constexpr uint32_t kFlagValueBits = 24;
constexpr uint64_t kEpochMask = ~uint64_t{0} >> kFlagValueBits;
constexpr uint32_t kMaxFlagValue = (1u << kFlagValueBits) - 1;

// Keeps the low 24 bits of the value. Code that counts must check beforehand that they suffice.
TK_HOST_DEVICE constexpr uint64_t make_flag(uint64_t epoch, uint32_t value) {
    return epoch << kFlagValueBits | (value & kMaxFlagValue);
}
TK_HOST_DEVICE constexpr uint64_t flag_epoch(uint64_t flag) {
    return flag >> kFlagValueBits;
}
TK_HOST_DEVICE constexpr uint32_t flag_value(uint64_t flag) {
    return static_cast<uint32_t>(flag) & kMaxFlagValue;
}

// Whether a flag is behind another in time: of a later epoch, or of the same one with a larger value. Holds across the
// wrap, for flags that are less than 2^39 calls apart.
TK_HOST_DEVICE constexpr bool is_ahead(uint64_t flag, uint64_t other) {
    return static_cast<int64_t>(flag - other) > 0;
}

// The first epoch of a communicator: just below the wrap, so that every run crosses it. Flags start one before it.
constexpr uint64_t kFirstEpoch = kEpochMask - 15;
constexpr uint64_t kNeverEpoch = kFirstEpoch - 1;

// A flag that was never raised must not become one of this call: kNeverEpoch is left out, and the epoch behind it, so
// that odd and even ones still take turns.
TK_HOST_DEVICE constexpr uint64_t next_epoch(uint64_t epoch) {
    const uint64_t next = (epoch + 1) & kEpochMask;
    return next == kNeverEpoch ? kFirstEpoch + 1 : next;
}
static_assert(next_epoch(kNeverEpoch - 1) == kFirstEpoch + 1 && (kNeverEpoch - 1) % 2 != (kFirstEpoch + 1) % 2);
static_assert(is_ahead(make_flag(0, 0), make_flag(kEpochMask, kMaxFlagValue)) &&
              !is_ahead(make_flag(kEpochMask, 1), 0));
static_assert(next_epoch(kEpochMask) == 0 && flag_epoch(make_flag(kEpochMask, 0)) == kEpochMask);

// What records and faults keep of an epoch.
TK_HOST_DEVICE constexpr uint32_t epoch_on_record(uint64_t epoch) {
    return static_cast<uint32_t>(epoch);
}

}  // namespace tracekern
