// Copies from global to shared memory that go on without the lanes that started them, and barriers in shared memory
// that say when they are there.
//
//   TransactionBarrier                phases, counted from 0. One ends when all its arrivals and its bytes are there
//     init(num_arrivals)              of each phase; by one lane, in front of a barrier of the block
//     arrive()                        by one lane: releases what it did, and its warp in front of a warp.sync()
//     arrive_and_expect(bytes)        the same, of a phase that copies of so many bytes belong to; by one warp of all
//     wait(warp, phase)               until it has ended; acquires what was released to it, and copies. All lanes.
//                                     phase: the one under way or the one before, of others nothing is known
//   copy_bulk<reuse>(to, from, bytes, barrier)    by one lane; both addresses and `bytes` are multiples of 16
//   RowMap                            rows of 16 bits [num_rows][num_channels] in global memory, described by the host
//   copy_box(to, map, channel, row, barrier)      by one lane: 8 rows of 256 channels, a box of kBoxBytes. In shared
//                                     memory it is [4][8 rows][64 channels], in each row part p of 16 bytes at place
//                                     p ^ row, so that neither rows nor columns meet in one bank. What is beyond the
//                                     rows or channels of the map becomes 0. `to` is a multiple of 1024 and `channel`
//                                     one of 64
//
// Only CUDA's copies are under way behind the call; those of the others are over, and they stand here so that one
// source makes all kernels. `reuse` tells the L2 cache whether others read the same soon.
#pragma once

#include "platform/device.h"

namespace tracekern {

enum class Reuse { once, again };

constexpr uint32_t kBoxRows = 8;
constexpr uint32_t kBoxChannels = 256;
constexpr uint32_t kBoxRowChannels = 64;  // of a row in shared memory, 128 bytes
constexpr uint32_t kBoxRowBytes = kBoxRowChannels * sizeof(BFloat16);
constexpr uint32_t kBoxPartBytes = kBoxRows * kBoxRowBytes;
constexpr uint32_t kBoxParts = kBoxChannels / kBoxRowChannels;
constexpr uint32_t kBoxBytes = kBoxParts * kBoxPartBytes;

}  // namespace tracekern

#if defined(__CUDACC__) && !defined(__HIP__)
    #include "platform/bulk_cuda.h"
#else
    #include "platform/bulk_loops.h"
#endif
