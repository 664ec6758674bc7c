// platform/bulk.h for CUDA: mbarrier and the copies of the Tensor Memory Accelerator, from sm_90 on.
#pragma once

namespace tracekern {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasBulkCopies = false;
#else
constexpr bool kHasBulkCopies = true;
#endif

class alignas(8) TransactionBarrier {
public:
    // The fence: copies complete phases from outside the order of ordinary stores.
    TK_DEVICE void init(uint32_t num_arrivals) {
        asm volatile(
            "mbarrier.init.shared::cta.b64 [%0], %1;\n\t"
            "fence.mbarrier_init.release.cluster;" ::"r"(address()),
            "r"(num_arrivals)
            : "memory");
    }
    TK_DEVICE void arrive() {
        asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
    }
    TK_DEVICE void arrive_and_expect(uint32_t bytes) {
        asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes)
                     : "memory");
    }
    TK_DEVICE void wait(Warp&, uint32_t phase) const {
        asm volatile(
            "{\n\t.reg .pred %%ended;\n"
            "WAIT:\n\t"
            "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %%ended, [%0], %1;\n\t"
            "@!%%ended bra WAIT;\n\t}" ::"r"(address()),
            "r"(phase & 1)
            : "memory");
    }
    TK_DEVICE uint32_t address() const { return shared_address(this); }

private:
    uint64_t state_;
};

template <Reuse kReuse>
TK_DEVICE uint64_t cache_policy() {
    uint64_t policy;
    if constexpr (kReuse == Reuse::once) {
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    } else {
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    }
    return policy;
}

template <Reuse kReuse>
TK_DEVICE void copy_bulk(void* to, const void* from, uint32_t bytes, TransactionBarrier& barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(to)),
        "l"(from),
        "r"(bytes),
        "r"(barrier.address()),
        "l"(cache_policy<kReuse>())
        : "memory");
}

// What cuTensorMapEncodeTiled() makes.
struct alignas(128) RowMap {
    uint64_t words[16];
};

// Its rows are read again for other outputs of theirs.
TK_DEVICE void copy_box(void* to, const RowMap& map, uint32_t channel, uint32_t row, TransactionBarrier& barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
        "l"(&map),
        "n"(0),
        "r"(row),
        "r"(channel / kBoxRowChannels),
        "r"(barrier.address()),
        "l"(cache_policy<Reuse::again>())
        : "memory");
}

}  // namespace tracekern
