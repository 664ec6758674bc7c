// Makes a RowMap on the host.
#pragma once

#include "platform/bulk.h"
#include "platform/gpu_host.hpp"

namespace tracekern {

// What copy_box() copies from: a box is 64 channels of 8 rows, from each of 4 parts of 64 channels.
inline RowMap make_row_map(const void* rows, uint32_t num_rows, uint32_t num_channels) {
    RowMap map;
    static_assert(sizeof(map) == sizeof(CUtensorMap) && alignof(RowMap) >= alignof(CUtensorMap));
    const cuuint64_t sizes[] = {kBoxRowChannels, num_rows, num_channels / kBoxRowChannels};
    const cuuint64_t strides[] = {uint64_t{num_channels} * sizeof(BFloat16), kBoxRowBytes};
    const cuuint32_t box[] = {kBoxRowChannels, kBoxRows, kBoxParts}, steps[] = {1, 1, 1};
    static auto* const encode = TK_DRIVER(cuTensorMapEncodeTiled);
    const CUresult made = encode(reinterpret_cast<CUtensorMap*>(&map),
                                 CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                 3,
                                 const_cast<void*>(rows),
                                 sizes,
                                 strides,
                                 box,
                                 steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    check(made, "cuTensorMapEncodeTiled");
    return map;
}

}  // namespace tracekern
