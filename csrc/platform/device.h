// The device layer: everything a kernel needs from its machine, at warp granularity, for three backends.
//
// A kernel is written once. A plain variable is warp-uniform; PerLane<T> holds one value per lane; whatever crosses
// lanes, warps or blocks is a method of Warp. Vendor words are used in this folder alone.
//
// platform/device_warp.h has what a Warp can do. Warp::trap() stops the device for good; what was written before stays
// readable. Every backend header defines, besides class Warp and PerLane<T>, of which x[lane] is the own value of a
// lane:
//   kLanes                                         lanes of a warp
//   read_clock(), read_clock_after(value)          realtime ticks; the second one not before `value` is there
//   read_cycles(), read_cycles_after(value)        the same of the core's cycle counter: of this unit alone
//   kClockShift                                    low bits of the clock that never change
//   take_place<bit>(wanted, next, limit)           moves `next` behind a record if the bit of `wanted` is set
//   put_if<offset>(enabled, place, record)         stores it there, without a branch where that is cheaper
//   take_if(wanted, room, free, attempted)         room for records: counted, and taken where there is enough
//   store_if(enabled, place, count, record)        *place = record and ++count, without a branch where that is cheaper
//   append_if(enabled, next, record)               *next++ = record; may count up the low word of `next` only
//   first_bit(bits)                                place of the lowest bit that is set; bits is not 0
//   count_bits(bits)                               bits that are set
//   sm_id()                                        physical unit this block runs on
//   load_acquire_system, load_relaxed_system       64- and 32-bit loads, ordered with every rank
//   store_release_system, store_relaxed_system     64- and 32-bit stores
//   load_acquire_device, store_release_device      64 bits, ordered with this device
//   load_acquire_block, load_relaxed_block         64 bits of the block's shared memory, ordered with this block
//   store_release_block, store_relaxed_block       the same
//   load_once(place), store_once(place, value)     2 to 16 bytes of global memory, of a row that passes through
//   add_relaxed_device, add_acq_rel_device         fetch-and-add, ordered with this device
//   exchange_relaxed_device                        the same of 32 bits, which are replaced
//   add_relaxed_block                              the same on a word of the block's shared memory
//   claim_system(word)                             0 -> 1 once, by one caller of all
//   multiply_rn, add_rn, divide_rn                 fp32 with one rounding each, never fused
//   larger_number(a, b)                            of a number and a NaN the number
//   multiply_add_rn(a, b, c)                       a * b + c with one rounding
//   to_float(Half | BFloat16 | float), from_float<T>(x)   round to nearest even
//   from_floats<T>(low, high)                      two of 16 bits in one word
//   fp8_from_floats(low, high)                     two of 8 bits in the low half of a word
//   nibbles_minus_8(word)                          bf16 of the low 4 bits of each half, less 8
//   NibbleSplitter().split(word)                   each of these numbers alone in its half of a word, the other half 0
//   permute_bytes(low, high, selector)            4 bytes of the 8, each named by 4 bits of `selector`: 0 to 7
//
// Warp::elect(f) is Warp::leader(f) by whichever lane. Warp::gather(x, source) gives each lane the x of lane
// source(lane). Warp::load_transposed(rows) loads [32][8] numbers of 16 bits from shared memory, 16 bytes a row, as the
// dense operand of Warp::multiply_sparse<kSelector>(rows, column, metadata); see platform/sparse_multiply.h.
// Warp::load_columns(place) loads the same operand from columns in shared memory: place(lane) is where the 16 bytes of
// column lane % 8 stand, of channels 8 * (lane / 8) on. Warp::multiply_unordered() is the same product of numbers in
// any order of their places, no two of a chunk at one. Warp::transpose(rows) turns an 8 x 8 matrix of 16 bits, of which
// lane 4 i + j has numbers 2 j and 2 j + 1 of row i.
//
// WarpGroup(id, num_warps, warp, arrivals) is some warps of a block that meet, of which all call its block_sync() or
// all its block_sync_count(), which are those of a Warp otherwise. id: 1 to 15. Machines without named barriers count
// in arrivals[id - 1], shared memory that begins with 0; CUDA needs neither warp nor arrivals.
#pragma once

#include <cstdint>

namespace tracekern {
// Where take_place() stops counting up the low word of an address.
constexpr uint32_t kLastPlace = 0xffffffe0u;
}  // namespace tracekern

#if defined(__HIP__)
    #include "platform/hip.h"
#elif defined(__CUDACC__)
    #include "platform/cuda.h"
#else
    #include "platform/cpu.h"
#endif
// Not where users compile the header as C++17, nor for nvcc's host code, which leaves out what device functions return.
#if defined(__cpp_concepts) && (!defined(__CUDACC__) || defined(__CUDA_ARCH__))
    #include "platform/device_warp.h"
static_assert(tracekern::DeviceWarp<tracekern::Warp>);
#endif

namespace tracekern {

// Of `room` records from `next` on, those that take_place() can take: the two in front of a multiple of 4 GiB stay
// free, so that a count that stays at kLastPlace is beyond all. `next` is moved to where it begins to count.
template <class Record>
TK_DEVICE uint32_t usable_places(Record*& next, uint32_t room) {
    const auto at = reinterpret_cast<uintptr_t>(next);
    const uint32_t low = static_cast<uint32_t>(at) < kLastPlace ? static_cast<uint32_t>(at) : kLastPlace;
    next = reinterpret_cast<Record*>(at - static_cast<uint32_t>(at) + low);
    const uint32_t until_last = (kLastPlace - low) / static_cast<uint32_t>(sizeof(Record));
    return room < until_last ? room : until_last - (until_last != 0);
}
// The limit of take_place() for so many; never 0.
template <class Record>
TK_DEVICE uint32_t limit_of(const Record* next, uint32_t usable) {
    const auto low = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(next));
    return usable ? low + usable * static_cast<uint32_t>(sizeof(Record)) : 1;
}
// Of `room` records from `next` on, those that append_if() can store: not beyond a multiple of 4 GiB.
template <class Record>
TK_DEVICE uint32_t append_room(const Record* next, uint32_t room) {
    const uint32_t low = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(next));
    const uint32_t until_carry = ~low / static_cast<uint32_t>(sizeof(Record)) + 1;
    return room < until_carry ? room : until_carry;
}
// Records that append_if() stored between the two.
template <class Record>
TK_DEVICE uint32_t num_appended(const Record* first, const Record* next) {
    const uintptr_t bytes = reinterpret_cast<uintptr_t>(next) - reinterpret_cast<uintptr_t>(first);
    return static_cast<uint32_t>(bytes) / static_cast<uint32_t>(sizeof(Record));
}

// A condition that is the same in all lanes. By a vote: the compiler keeps what the lanes have in common in one place
// only as long as it knows that no branch has divided them, and of what was loaded it does not.
TK_DEVICE bool holds_for_all(Warp& warp, bool condition) {
    return warp.ballot([&](int) { return condition; }) != 0;
}

// Copies `bytes` (a multiple of 2) with all lanes; 16 bytes a lane where both sides allow it.
TK_DEVICE void copy_row(Warp& warp, void* dst, const void* src, uint32_t bytes) {
    const uint64_t alignment = reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src) | bytes;
    if (alignment % 16 == 0) {
        warp.copy_vectors<Vector16>(dst, src, bytes / 16);
    } else if (alignment % 4 == 0) {
        warp.copy_vectors<uint32_t>(dst, src, bytes / 4);
    } else {
        warp.copy_vectors<uint16_t>(dst, src, bytes / 2);
    }
}

}  // namespace tracekern
