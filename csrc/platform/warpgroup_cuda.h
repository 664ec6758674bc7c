// platform/warpgroup.h for CUDA: wgmma.mma_async.sp and setmaxnreg, of sm_90a alone.
#pragma once

namespace tracekern {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
constexpr bool kHasWarpgroups = true;
#else
constexpr bool kHasWarpgroups = false;
#endif

// A matrix descriptor: rows of 128 bytes whose places are swizzled, and kBoxBytes from 8 of them to the next 8.
// Addresses are in units of 16 bytes, and what is added to them carries nowhere.
class DenseColumns {
public:
    TK_DEVICE explicit DenseColumns(const void* boxes)
        : descriptor_(uint64_t{(shared_address(boxes) & 0x3ffffu) >> 4} | uint64_t{1} << 16 |
                      uint64_t{kBoxBytes >> 4} << 32 | uint64_t{1} << 62) {}
    TK_DEVICE DenseColumns part(uint32_t i) const {
        DenseColumns moved = *this;
        moved.descriptor_ += i * (kBoxPartBytes >> 4);
        return moved;
    }
    TK_DEVICE uint64_t of_half(uint32_t half) const { return descriptor_ + half * (64 >> 4); }

private:
    uint64_t descriptor_;
};

// The accumulator is written, not added to (a predicate that is false); x's columns are K-major, and nothing is
// negated.
#define TK_WIDE_TILE(i) \
    "=f"(tiles[i].values[0]), "=f"(tiles[i].values[1]), "=f"(tiles[i].values[2]), "=f"(tiles[i].values[3])
#define TK_WIDE_OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(e), "n"(kSelector)
#define TK_WIDE_ASM(shape, sums, rest)                         \
    "{\n\t.reg .pred %%adds;\n\tsetp.ne.b32 %%adds, 0, 0;\n\t" \
    "wgmma.mma_async.sp.sync.aligned." shape ".f32.bf16.bf16 {" sums "}, " rest ", %%adds, 1, 1, 0;\n\t}"
template <uint32_t kSelector>
TK_DEVICE void start_wide(ProductTile (&tiles)[1], const uint32_t (&a)[4], uint64_t b, uint32_t e) {
    asm volatile(TK_WIDE_ASM("m64n8k32", "%0, %1, %2, %3", "{%4, %5, %6, %7}, %8, %9, %10")
                 : TK_WIDE_TILE(0)
                 : TK_WIDE_OPERANDS);
}
template <uint32_t kSelector>
TK_DEVICE void start_wide(ProductTile (&tiles)[2], const uint32_t (&a)[4], uint64_t b, uint32_t e) {
    asm volatile(TK_WIDE_ASM("m64n16k32", "%0, %1, %2, %3, %4, %5, %6, %7", "{%8, %9, %10, %11}, %12, %13, %14")
                 : TK_WIDE_TILE(0), TK_WIDE_TILE(1)
                 : TK_WIDE_OPERANDS);
}
template <uint32_t kSelector>
TK_DEVICE void start_wide(ProductTile (&tiles)[4], const uint32_t (&a)[4], uint64_t b, uint32_t e) {
    asm volatile(TK_WIDE_ASM("m64n32k32",
                             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
                             "{%16, %17, %18, %19}, %20, %21, %22")
                 : TK_WIDE_TILE(0), TK_WIDE_TILE(1), TK_WIDE_TILE(2), TK_WIDE_TILE(3)
                 : TK_WIDE_OPERANDS);
}
template <uint32_t kSelector>
TK_DEVICE void start_wide(ProductTile (&tiles)[8], const uint32_t (&a)[4], uint64_t b, uint32_t e) {
    asm volatile(TK_WIDE_ASM("m64n64k32",
                             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                             "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
                             "{%32, %33, %34, %35}, %36, %37, %38")
                 : TK_WIDE_TILE(0),
                   TK_WIDE_TILE(1),
                   TK_WIDE_TILE(2),
                   TK_WIDE_TILE(3),
                   TK_WIDE_TILE(4),
                   TK_WIDE_TILE(5),
                   TK_WIDE_TILE(6),
                   TK_WIDE_TILE(7)
                 : TK_WIDE_OPERANDS);
}
#undef TK_WIDE_TILE
#undef TK_WIDE_OPERANDS
#undef TK_WIDE_ASM

// The compiler may not move what makes them behind the fence: ptxas would put a fence of its own there.
TK_DEVICE void settle(PerLane<SparseRows>& rows, PerLane<uint32_t>& metadata) {
    TK_UNROLL
    for (uint32_t& word : rows.value.words) asm volatile("" : "+r"(word)::"memory");
    asm volatile("" : "+r"(metadata.value)::"memory");
}
// Registers that were written before are read by the products.
TK_DEVICE void begin_products(Warp&) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
template <uint32_t kSelector, uint32_t kTokens>
TK_DEVICE void start_product(Warp&,
                             PerLane<WideProduct<kTokens>>& product,
                             const PerLane<SparseRows>& rows,
                             const DenseColumns& columns,
                             uint32_t half,
                             const PerLane<uint32_t>& metadata) {
    start_wide<kSelector>(product.value.tiles, rows.value.words, columns.of_half(half), metadata.value);
}
TK_DEVICE void end_products(Warp&) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// The compiler takes a product for written where it was started; here it is written again, as far as it knows.
template <uint32_t kLeft, uint32_t kTokens, size_t kCount>
TK_DEVICE void finish_products(Warp&, PerLane<WideProduct<kTokens>> (&products)[kCount]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
    TK_UNROLL
    for (auto& product : products) {
        TK_UNROLL
        for (auto& tile : product.value.tiles) {
            TK_UNROLL
            for (float& value : tile.values) asm volatile("" : "+f"(value)::"memory");
        }
    }
}

template <uint32_t kRegisters>
TK_DEVICE void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <uint32_t kRegisters>
TK_DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace tracekern
