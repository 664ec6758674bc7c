// What a recorder does where a condition holds, for backends whose compiler makes good code of a branch;
// platform/cuda.h has its own.
#pragma once

#include <cstdint>

#include "platform/qualifiers.h"

namespace tracekern {

template <uint32_t kBit, class Record>
TK_DEVICE bool take_place(uint32_t wanted, Record*& next, uint32_t limit) {
    const bool is_wanted = wanted & 1u << kBit;
    const auto at = reinterpret_cast<uintptr_t>(next);
    uint32_t low = static_cast<uint32_t>(at) + (is_wanted ? sizeof(Record) : 0);
    if (low > kLastPlace) low = kLastPlace;
    next = reinterpret_cast<Record*>(at - static_cast<uint32_t>(at) + low);
    return is_wanted && low <= limit;
}
template <int kOffset = 0, class Record>
TK_DEVICE void put_if(bool enabled, void* place, const Record& record) {
    if (enabled) *reinterpret_cast<Record*>(static_cast<char*>(place) + kOffset) = record;
}
TK_DEVICE bool take_if(uint32_t wanted, uint32_t room, uint32_t& free, uint32_t& attempted) {
    const bool taken = wanted && free >= room;
    attempted += wanted ? room : 0;
    free -= taken ? room : 0;
    return taken;
}
template <class Record>
TK_DEVICE void store_if(bool enabled, Record* place, uint32_t& count, const Record& record) {
    if (!enabled) return;
    *place = record;
    ++count;
}
template <class Record>
TK_DEVICE void append_if(bool enabled, Record*& next, const Record& record) {
    if (enabled) *next++ = record;
}

}  // namespace tracekern
