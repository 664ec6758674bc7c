// Stores of records that are enabled one by one, for CUDA: predicated instructions and no branch. The others branch,
// platform/branching_stores.h.
#pragma once

#include "platform/number.h"
#include "platform/vectors.h"

namespace tracekern {

// Where bit kBit of `wanted` is set: moves `next` behind its place. Returns whether that is not beyond `limit`. Only
// the low words count: a carry would cost three more instructions. Here and below a few predicated instructions and no
// branch; the compiler's own choice for them is twice that. The bit itself is made the step: a choice between two
// numbers takes an instruction more.
template <uint32_t kBit, class Record>
TK_DEVICE bool take_place(uint32_t wanted, Record*& next, uint32_t limit) {
    constexpr uint32_t kRecordBit = 4;
    static_assert(sizeof(Record) == 1 << kRecordBit);
    uint32_t fits;
    asm("{\n\t.reg .pred %%wanted, %%fits;\n\t.reg .b32 %%low, %%high, %%step;\n\t"
        "and.b32 %%step, %2, %4;\n\t"
        "setp.ne.u32 %%wanted, %%step, 0;\n\t"
        "shr.u32 %%step, %%step, %5;\n\t"
        "mov.b64 {%%low, %%high}, %0;\n\t"
        "mad.lo.u32 %%low, %%step, %6, %%low;\n\t"
        "min.u32 %%low, %%low, %7;\n\t"
        "setp.le.and.u32 %%fits, %%low, %3, %%wanted;\n\t"
        "selp.u32 %1, 1, 0, %%fits;\n\t"
        "mov.b64 %0, {%%low, %%high};\n\t}"
        : "+l"(next), "=r"(fits)
        : "r"(wanted),
          "r"(limit),
          "n"(1u << kBit),
          "n"(kBit > kRecordBit ? kBit - kRecordBit : 0),
          "n"(kBit > kRecordBit ? 1 : 1 << (kRecordBit - kBit)),
          "n"(kLastPlace));
    return fits;
}

// Where `enabled`: stores 16 or 8 bytes at `place` + kOffset bytes, in global memory.
template <int kOffset = 0, class Record>
TK_DEVICE void put_if(bool enabled, void* place, const Record& record) {
    if constexpr (sizeof(Record) == sizeof(Vector16)) {
        const auto value = bits_as<Vector16>(record);
        asm volatile(
            "{\n\t.reg .pred %%enabled;\n\t"
            "setp.ne.u32 %%enabled, %1, 0;\n\t"
            "@%%enabled st.global.v4.b32 [%0 + %6], {%2, %3, %4, %5};\n\t}" ::"l"(place),
            "r"(uint32_t{enabled}),
            "r"(value.words[0]),
            "r"(value.words[1]),
            "r"(value.words[2]),
            "r"(value.words[3]),
            "n"(kOffset)
            : "memory");
    } else {
        const auto value = bits_as<Vector8>(record);
        asm volatile(
            "{\n\t.reg .pred %%enabled;\n\t"
            "setp.ne.u32 %%enabled, %1, 0;\n\t"
            "@%%enabled st.global.v2.b32 [%0 + %4], {%2, %3};\n\t}" ::"l"(place),
            "r"(uint32_t{enabled}),
            "r"(value.words[0]),
            "r"(value.words[1]),
            "n"(kOffset)
            : "memory");
    }
}

// Where `enabled`: adds 1 to a word of global memory, of which this device is told.
TK_DEVICE void count_if(bool enabled, uint32_t* word) {
    asm volatile(
        "{\n\t.reg .pred %%enabled;\n\t"
        "setp.ne.u32 %%enabled, %1, 0;\n\t"
        "@%%enabled red.relaxed.gpu.global.add.u32 [%0], 1;\n\t}" ::"l"(word),
        "r"(uint32_t{enabled})
        : "memory");
}

// Where `wanted` is not 0: counts `room` and takes it from `free` if there is so much. Returns whether it was taken.
TK_DEVICE bool take_if(uint32_t wanted, uint32_t room, uint32_t& free, uint32_t& attempted) {
    uint32_t taken;
    asm("{\n\t.reg .pred %%wanted, %%taken;\n\t"
        "setp.ne.u32 %%wanted, %3, 0;\n\t"
        "setp.ge.and.u32 %%taken, %0, %4, %%wanted;\n\t"
        "@%%wanted add.u32 %1, %1, %4;\n\t"
        "@%%taken sub.u32 %0, %0, %4;\n\t"
        "selp.u32 %2, 1, 0, %%taken;\n\t}"
        : "+r"(free), "+r"(attempted), "=r"(taken)
        : "r"(wanted), "r"(room));
    return taken;
}

// Where `enabled`: stores a record of 16 bytes in global memory and counts it.
template <class Record>
TK_DEVICE void store_if(bool enabled, Record* place, uint32_t& count, const Record& record) {
    static_assert(sizeof(Record) == sizeof(Vector16));
    const auto value = bits_as<Vector16>(record);
    asm volatile(
        "{\n\t.reg .pred %%enabled;\n\t"
        "setp.ne.u32 %%enabled, %2, 0;\n\t"
        "@%%enabled st.global.v4.b32 [%1], {%3, %4, %5, %6};\n\t"
        "@%%enabled add.u32 %0, %0, 1;\n\t}"
        : "+r"(count)
        : "l"(place),
          "r"(uint32_t{enabled}),
          "r"(value.words[0]),
          "r"(value.words[1]),
          "r"(value.words[2]),
          "r"(value.words[3])
        : "memory");
}

// Where `enabled`: stores a record of 16 bytes at `next`, which goes on by one. Only the low word of `next` is counted
// up: a carry would cost three more instructions, with 32 warps on an SM a tenth of a span. Whatever is counted up by,
// it is added and not predicated: the compiler copied the address before each predicated addition, which made a span
// 2 to 11 ns longer.
template <class Record>
TK_DEVICE void append_if(bool enabled, Record*& next, const Record& record) {
    static_assert(sizeof(Record) == sizeof(Vector16));
    const auto value = bits_as<Vector16>(record);
    const uint32_t bytes = enabled ? sizeof(Record) : 0;
    asm volatile(
        "{\n\t.reg .pred %%enabled;\n\t.reg .b32 %%low, %%high;\n\t"
        "setp.ne.u32 %%enabled, %1, 0;\n\t"
        "@%%enabled st.global.v4.b32 [%0], {%2, %3, %4, %5};\n\t"
        "mov.b64 {%%low, %%high}, %0;\n\t"
        "add.u32 %%low, %%low, %1;\n\t"
        "mov.b64 %0, {%%low, %%high};\n\t}"
        : "+l"(next)
        : "r"(bytes), "r"(value.words[0]), "r"(value.words[1]), "r"(value.words[2]), "r"(value.words[3])
        : "memory");
}

}  // namespace tracekern
