// A record in memory of the host that one lane of all fills: the first that has something to say.
#pragma once

#include "platform/device.h"

namespace tracekern {

// Whether the caller is to fill the record; its `claimed` begins with 0. By reference: kernels load the pointer twice
// rather than keep a register for what hardly ever happens.
template <class Record>
TK_DEVICE bool claim_report(Record* const& record) {
    return !load_relaxed_system(&record->claimed) && claim_system(&record->claimed);
}

// Publishes a record that is whole: a reader that sees `value` in its last word sees the rest.
TK_DEVICE void publish_report(uint32_t* last, uint32_t value) {
    store_release_system(last, value);
}

}  // namespace tracekern
