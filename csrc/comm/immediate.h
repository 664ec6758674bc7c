// What a write over a network tells its receiver: the 32 bits that come with it, and who sent it. It tells of its own
// write alone; between writes there is no order.
//
//   kind:3  generation:2  epoch:3  which:8  n:16      from the highest bit on
//
// Of epochs the last bits travel: the receiver takes the one that is nearest to what it had last of that kind from the
// same source. Ranks are never so far apart that this would be another call's.
#pragma once

#include "comm/flag.h"

namespace tracekern {

enum class PutKind : uint32_t {
    word,     // a flag with value n, or a word that came with the write; `which` is a ControlWord or a kernel's own
    credit,   // n writes of the receiver were applied, and it may send as many more; costs none itself. `which` is 1
              // in the last of a source, which then leaves
    message,  // a token for local expert `which`, in place n of its source
    count,    // n tokens in all for local expert `which`
    row,      // the result of token n, made by the source's local expert `which`
    results,  // n such rows in all
    chunk,    // rows of ring `which`, a chunk, up to position n
    head,     // n positions of ring `which` may be written anew; it only grows within a call
};
constexpr uint32_t kFirstOwnWord = 16;  // of a kernel's

struct Immediate {
    PutKind kind = PutKind::word;
    uint32_t generation = 0;  // of the memory that is written, modulo 4
    uint32_t epoch = 0;       // modulo 8
    uint32_t which = 0;
    uint32_t n = 0;
};
constexpr uint32_t kMaxImmediateNumber = (1u << 16) - 1;
constexpr uint32_t kGenerationMask = 3, kImmediateEpochMask = 7;

TK_HOST_DEVICE constexpr uint32_t pack_immediate(const Immediate& imm) {
    return static_cast<uint32_t>(imm.kind) << 29 | (imm.generation & kGenerationMask) << 27 |
           (imm.epoch & kImmediateEpochMask) << 24 | (imm.which & 0xff) << 16 | (imm.n & kMaxImmediateNumber);
}
constexpr uint32_t of_generation(uint32_t bits, uint32_t generation) {
    return (bits & ~(kGenerationMask << 27)) | (generation & kGenerationMask) << 27;
}
constexpr Immediate unpack_immediate(uint32_t bits) {
    return {static_cast<PutKind>(bits >> 29),
            bits >> 27 & kGenerationMask,
            bits >> 24 & kImmediateEpochMask,
            bits >> 16 & 0xff,
            bits & kMaxImmediateNumber};
}
static_assert(pack_immediate(unpack_immediate(0x3fedcba9)) == 0x3fedcba9);

// The epoch that ends with `last_bits` and is at most 3 from `latest`; kNeverEpoch: there is none.
constexpr uint64_t nearest_epoch(uint64_t latest, uint32_t last_bits) {
    constexpr uint32_t kFurthest = kImmediateEpochMask / 2;
    const uint64_t ahead = (last_bits - latest) & kImmediateEpochMask;
    if (ahead == kFurthest + 1) return kNeverEpoch;
    return (latest + ahead - (ahead > kFurthest ? kImmediateEpochMask + 1 : 0)) & kEpochMask;
}
static_assert(nearest_epoch(16, 3) == 19 && nearest_epoch(16, 5) == 13 && nearest_epoch(16, 4) == kNeverEpoch);
static_assert(nearest_epoch(kEpochMask, 1) == 1 && nearest_epoch(0, 7) == kEpochMask);

}  // namespace tracekern
