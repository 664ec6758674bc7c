// platform/warpgroup.h for machines without such products: each warp makes its own at once.
#pragma once

namespace tracekern {

constexpr bool kHasWarpgroups = true;

class DenseColumns {
public:
    TK_DEVICE explicit DenseColumns(const void* boxes) : part_(static_cast<const char*>(boxes)) {}
    TK_DEVICE DenseColumns part(uint32_t i) const { return DenseColumns(part_ + i * kBoxPartBytes); }
    // Of column g of a box, one half of the channels.
    TK_DEVICE DenseColumn column(int lane, uint32_t box, uint32_t half) const {
        const uint32_t row = lane_group(lane);
        DenseColumn column;
        TK_UNROLL
        for (uint32_t word = 0; word < 4; ++word) {
            const uint32_t place = (4 * half + word) ^ row;
            const char* at = part_ + box * kBoxBytes + row * kBoxRowBytes + place * sizeof(Vector16);
            column.words[word] = reinterpret_cast<const uint32_t*>(at)[lane_in_group(lane)];
        }
        return column;
    }

private:
    const char* part_;
};

template <uint32_t kSelector, uint32_t kTokens>
TK_DEVICE void start_product(Warp& warp,
                             PerLane<WideProduct<kTokens>>& product,
                             const PerLane<SparseRows>& rows,
                             const DenseColumns& columns,
                             uint32_t half,
                             const PerLane<uint32_t>& metadata) {
    TK_UNROLL
    for (uint32_t tile = 0; tile < kTokens / 8; ++tile) {
        const auto column = warp.lanes([&](int lane) { return columns.column(lane, tile, half); });
        const auto made = warp.template multiply_sparse<kSelector>(rows, column, metadata);
        warp.each_lane([&](int lane) { product[lane].tiles[tile] = made[lane]; });
    }
}
TK_DEVICE void settle(PerLane<SparseRows>&, PerLane<uint32_t>&) {}
TK_DEVICE void begin_products(Warp&) {}
TK_DEVICE void end_products(Warp&) {}
template <uint32_t kLeft, uint32_t kTokens, size_t kCount>
TK_DEVICE void finish_products(Warp&, PerLane<WideProduct<kTokens>> (&)[kCount]) {}

template <uint32_t>
TK_DEVICE void keep_registers() {}
template <uint32_t>
TK_DEVICE void take_registers() {}

}  // namespace tracekern
