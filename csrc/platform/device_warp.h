// What class Warp of each backend has: the machine of a kernel, as one warp sees it. platform/device.h checks each
// against it. Functions take an f of a lane, of an index, or of nothing.
#pragma once

#include <concepts>
#include <cstdint>

namespace tracekern {

// clang-format off
template <class Warp>
concept DeviceWarp =
    // Where it is, and values of its lanes.
    requires(Warp warp, const Warp own, PerLane<uint32_t> x, uint32_t (*of_lane)(int), bool (*asks)(int),
             int (*source)(int), void (*each)(int)) {
        { own.block } -> std::convertible_to<uint32_t>;
        { own.num_blocks } -> std::convertible_to<uint32_t>;
        { own.warp } -> std::convertible_to<uint32_t>;
        { own.num_warps } -> std::convertible_to<uint32_t>;
        { own.is_leader() } -> std::same_as<bool>;
        { warp.lanes(of_lane) } -> std::same_as<PerLane<uint32_t>>;
        { warp.each_lane(each) } -> std::same_as<void>;
        { warp.shuffle(x, 0) } -> std::same_as<uint32_t>;
        { warp.gather(x, source) } -> std::same_as<PerLane<uint32_t>>;
        { warp.sum(of_lane) } -> std::same_as<uint32_t>;
        { warp.ballot(asks) } -> std::same_as<uint32_t>;
        { warp.template max_within<16>(of_lane) } -> std::same_as<PerLane<uint32_t>>;
    } &&
    // Work that lanes share.
    requires(Warp warp, uint32_t n, void* memory, uint32_t (*of_index)(uint32_t), void (*each)(uint32_t),
             uint32_t (*value)(), void (*act)()) {
        { warp.strided(n, each) } -> std::same_as<void>;
        { warp.strided_rolled(n, each) } -> std::same_as<void>;
        { warp.block_strided(n, each) } -> std::same_as<void>;
        { warp.sum_over(n, of_index) } -> std::same_as<uint32_t>;
        { warp.once(value) } -> std::same_as<uint32_t>;
        { warp.leader(act) } -> std::same_as<void>;
        { warp.elect(act) } -> std::same_as<void>;
        { warp.template copy_vectors<Vector16>(memory, memory, n) } -> std::same_as<void>;
        { warp.template copy_vectors<Vector16, 2>(memory, memory, n) } -> std::same_as<void>;
        { warp.template shared<uint32_t>() } -> std::same_as<uint32_t&>;
    } &&
    requires(Warp warp, const void* rows, PerLane<SparseRows> a, PerLane<DenseColumn> b, PerLane<uint32_t> metadata,
             const void* (*place)(int)) {
        { warp.load_transposed(rows) } -> std::same_as<PerLane<DenseColumn>>;
        { warp.template multiply_sparse<0>(a, b, metadata) } -> std::same_as<PerLane<ProductTile>>;
        { warp.template multiply_unordered<0>(a, b, metadata) } -> std::same_as<PerLane<ProductTile>>;
        { warp.load_columns(place) } -> std::same_as<PerLane<DenseColumn>>;
        { warp.transpose(metadata) } -> std::same_as<PerLane<uint32_t>>;
    } &&
    // Where warps meet, wait and stop.
    requires(Warp warp, const Warp own, uint32_t spins) {
        { warp.sync() } -> std::same_as<void>;
        { warp.block_sync() } -> std::same_as<void>;
        { warp.block_sync_count() } -> std::same_as<uint32_t>;
        { warp.relax(spins) } -> std::same_as<void>;
        { own.trap() } -> std::same_as<void>;
    };
// clang-format on

}  // namespace tracekern
