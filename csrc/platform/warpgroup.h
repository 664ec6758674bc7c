// Products that four neighbouring warps make together: 64 rows of a 2:4 sparse matrix, of which each warp holds 16 as
// for Warp::multiply_sparse(), times columns of a dense one that are in shared memory for all four. They go on without
// the warps, which scale one while the next is made.
//
//   DenseColumns          columns in boxes of 8, as copy_box() lays them one behind the other; part(i) is the part of
//                         64 channels of them
//   WideProduct<kTokens>  what a lane gets: a ProductTile for each 8 columns
//   settle(rows, metadata)    what a product will read: changed no more from here on
//   begin_products(warp)  in front of some products, behind settle() of each
//   start_product<kSelector>(warp, product, rows, columns, half, metadata)    of one half of a part's channels, 32.
//                         `product` is not there, and `rows` and the columns stay as they are, until it was finished
//   end_products(warp)    they are a group
//   finish_products<kLeft>(warp, products)    waits for all groups but the last kLeft; `products`, an array, are there
//   keep_registers<n>(), take_registers<n>()    of all four warps: gives up all but n registers a lane, or has n
//
// The four warps call them together. kHasWarpgroups: the device that this is compiled for has them; elsewhere nothing
// of it may run.
#pragma once

#include "platform/bulk.h"

namespace tracekern {

constexpr uint32_t kWarpsPerGroup = 4;

template <uint32_t kTokens>
struct WideProduct {
    ProductTile tiles[kTokens / 8];
};

}  // namespace tracekern

#if defined(__CUDACC__) && !defined(__HIP__)
    #include "platform/warpgroup_cuda.h"
#else
    #include "platform/warpgroup_loops.h"
#endif
