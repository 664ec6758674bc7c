// What a span reads that ends where somebody else arrives, for test_true_times_gpu.py. Warp 0 (of block 0) comes 20 us
// after the others, who wait for it in a span. Prints a line a waiting warp:
//
//   KIND traced|naive WARP SPAN_NS LATE_NS WITNESS_NS
//
// traced: the span is closed after the wait's result; naive: by a clock read that follows it in the source alone.
// LATE_NS: from the span's begin until warp 0 went to arrive. WITNESS_NS: from there to a clock read that depends on a
// word which warp 0 wrote before it arrived; -1 in blocks that do not have that word.
#include <cstdio>
#include <string>
#include <vector>

#include "comm/barrier.h"
#include "platform/gpu_host.hpp"
#include "trace/recorder.h"

#define TK_TRUE_TIMES_EVENTS(EVENT) EVENT(wait_late, wait, completion, "", "", "")
TK_DEFINE_EVENTS(TrueTimesEvent, TK_TRUE_TIMES_EVENTS)

using namespace tracekern;

namespace {

enum class Kind { block, mbarrier, bulk_copy, cluster, grid };
constexpr const char* kKindNames[] = {"block", "mbarrier", "bulk_copy", "cluster", "grid"};
constexpr uint32_t kNumWarps = 8;
constexpr uint32_t kClusterBlocks = 2;
constexpr uint32_t kGridBlocks = 16;
constexpr uint64_t kDelayNs = 20'000;
constexpr uint64_t kTimeoutNs = 1'000'000'000;
constexpr uint32_t kWord = 0x5eed;

struct alignas(16) SharedWords {
    uint32_t payload[4];
    uint64_t barrier;
};

struct TrueTimesArgs {
    LaunchDescriptor launch;
    const uint32_t* source;
    uint64_t* witness;      // [warp of the grid]; of the late one when it went to arrive
    uint64_t* grid_counts;  // of grid_barrier()
    CommArgs comm;
};

TK_DEVICE uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Spins until phase 0 is over; 0 when it gave up.
TK_DEVICE uint32_t wait_mbarrier(uint64_t* barrier) {
    const uint64_t started = read_clock();
    uint32_t done = 0;
    while (!done && read_clock() - started < kTimeoutNs) {
        asm volatile(
            "{\n\t.reg .pred %%done;\n\t"
            "mbarrier.try_wait.parity.shared::cta.b64 %%done, [%1], 0;\n\t"
            "selp.u32 %0, 1, 0, %%done;\n\t}"
            : "=r"(done)
            : "r"(shared_address(barrier))
            : "memory");
    }
    return done;
}

TK_DEVICE void start_bulk_copy(SharedWords& words, const uint32_t* source) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 16;\n\t"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%1], [%2], 16, [%0];" ::"r"(
            shared_address(&words.barrier)),
        "r"(shared_address(words.payload)),
        "l"(source)
        : "memory");
}

TK_DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What the late warp does last. Returns when it went to arrive.
template <Kind kKind>
TK_DEVICE uint64_t arrive(Warp& warp, SharedWords& words, const uint32_t* source) {
    const uint64_t started = read_clock();
    while (read_clock() - started < kDelayNs) {
    }
    const uint64_t went = started + kDelayNs;
    if (!warp.is_leader()) return went;
    if constexpr (kKind == Kind::bulk_copy) {
        start_bulk_copy(words, source);
    } else {
        *static_cast<volatile uint32_t*>(words.payload) = kWord;
        if constexpr (kKind == Kind::mbarrier) {
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&words.barrier)) : "memory");
        }
    }
    return went;
}

template <Kind kKind, bool kNaive>
TK_DEVICE void wait_in_span(Warp& warp, Recorder<true>& recorder, SharedWords& words, const TrueTimesArgs& args) {
    TK_WAIT(recorder, TrueTimesEvent::wait_late);
    if constexpr (kKind == Kind::block) {
        if constexpr (kNaive) {
            warp.block_sync();
        } else {
            TK_END_AFTER_BARRIER(warp);
        }
    } else if constexpr (kKind == Kind::cluster) {
        cluster_barrier();
        // This barrier has no result. A load behind it is held until it is over.
        if constexpr (!kNaive) {
            const uint32_t loaded = *static_cast<volatile uint32_t*>(words.payload);
            TK_END_AFTER(loaded);
        }
    } else if constexpr (kKind == Kind::grid) {
        const bool through = grid_barrier(warp, args.comm, args.grid_counts, 1);
        if constexpr (!kNaive) {
            TK_END_IF(through);
        }
    } else {
        const uint32_t done = wait_mbarrier(&words.barrier);
        if constexpr (!kNaive) {
            TK_END_AFTER(done);
        }
    }
}

template <Kind kKind, bool kNaive>
TK_DEVICE void run(const TrueTimesArgs& args) {
    Warp warp(LaunchSize{});
    __shared__ SharedWords words;
    if (threadIdx.x == 0) {
        words.payload[0] = 0;
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(
                         shared_address(&words.barrier))
                     : "memory");
    }
    Recorder<true> recorder({args.launch}, warp);
    // All begin together: a branch on what is there behind the barrier holds the clock reads that follow.
    if constexpr (kKind == Kind::cluster) {
        cluster_barrier();
        if (*static_cast<volatile uint32_t*>(words.payload) == kWord) return;
    } else if constexpr (kKind == Kind::grid) {
        if (!grid_barrier(warp, args.comm, args.grid_counts, 0)) return;
    } else {
        if (warp.block_sync_count() == 0) return;
    }
    const bool late = warp.block == 0 && warp.warp == 0;
    const uint64_t went = late ? arrive<kKind>(warp, words, args.source) : 0;
    wait_in_span<kKind, kNaive>(warp, recorder, words, args);
    const uint32_t seen = *static_cast<volatile uint32_t*>(words.payload);
    const uint64_t seen_ticks = read_clock_after(seen);
    const uint64_t told = late ? went : seen == kWord ? seen_ticks : 0;
    if (warp.is_leader()) args.witness[warp.block * kNumWarps + warp.warp] = told;
}

template <Kind kKind, bool kNaive>
__global__ void wait_kernel(const TrueTimesArgs args) {
    run<kKind, kNaive>(args);
}

template <bool kNaive>
__global__ void __cluster_dims__(kClusterBlocks, 1, 1) wait_cluster_kernel(const TrueTimesArgs args) {
    run<Kind::cluster, kNaive>(args);
}

template <Kind kKind, bool kNaive>
const void* kernel_of() {
    if constexpr (kKind == Kind::cluster) {
        return reinterpret_cast<const void*>(wait_cluster_kernel<kNaive>);
    } else {
        return reinterpret_cast<const void*>(wait_kernel<kKind, kNaive>);
    }
}

template <Kind kKind, bool kNaive>
void measure() {
    constexpr uint32_t kBlocks = kKind == Kind::cluster ? kClusterBlocks : kKind == Kind::grid ? kGridBlocks : 1;
    constexpr uint32_t kTracks = kBlocks * kNumWarps;
    DeviceMemory headers(sizeof(TrackHeader) * kTracks), records(sizeof(SpanRecord) * kTracks);
    DeviceMemory witness(sizeof(uint64_t) * kTracks), source(16);
    DeviceMemory control(sizeof(HeapControl)), fault(sizeof(FaultRecord)), grid_counts(sizeof(uint64_t));
    TrueTimesArgs args{};
    args.source = source.as<uint32_t>();
    args.witness = witness.as<uint64_t>();
    args.grid_counts = grid_counts.as<uint64_t>();
    args.comm.num_ranks = 1;
    args.comm.timeout_ticks = kTimeoutNs;
    args.comm.fault = fault.as<FaultRecord>();
    args.comm.heap[0] = control.as<char>();
    LaunchDescriptor& launch = args.launch;
    launch.region.headers = headers.as<TrackHeader>();
    launch.region.records = records.as<WideRecord>();
    launch.event_mask = ~uint64_t{0};
    launch.records_per_track = 1;
    launch.warps_per_block = kNumWarps;
    launch.block_stop = kBlocks;
    launch.block_step = 1;
    launch.role_mask = ~0u;
    TK_CUDA(cudaMemcpy(source.as<void>(), &kWord, sizeof(kWord), cudaMemcpyHostToDevice));
    // The first launches fetch the code; the last one counts.
    for (int i = 0; i < 4; ++i) {
        launch_kernel(kernel_of<kKind, kNaive>(), {kBlocks, kNumWarps * 32}, {&args});
        TK_CUDA(cudaGetLastError());
        TK_CUDA(cudaDeviceSynchronize());
    }
    std::vector<SpanRecord> found(kTracks);
    std::vector<uint64_t> seen(kTracks);
    TK_CUDA(cudaMemcpy(found.data(), records.as<void>(), found.size() * sizeof(SpanRecord), cudaMemcpyDeviceToHost));
    TK_CUDA(cudaMemcpy(seen.data(), witness.as<void>(), seen.size() * sizeof(uint64_t), cudaMemcpyDeviceToHost));
    for (uint32_t track = 1; track < kTracks; ++track) {
        const SpanRecord& span = found[track];
        if ((span.word & 7) != static_cast<uint32_t>(RecordKind::span))
            throw std::runtime_error("no span is on record");
        // Low words, made whole by a time that is close.
        const auto ticks_of = [&](uint32_t low) {
            const uint64_t near = seen[0] >> kClockShift;
            return static_cast<int64_t>(near + static_cast<int32_t>(low - static_cast<uint32_t>(near))) << kClockShift;
        };
        const int64_t begin = ticks_of(span.begin), end = ticks_of(span.end);
        // Only block 0 has the word.
        const bool has_word = track < kNumWarps;
        if (has_word && !seen[track]) throw std::runtime_error("a wait ended before the late warp came");
        const int64_t witness_ns = has_word ? static_cast<int64_t>(seen[track]) - begin : -1;
        std::printf("%s %s %u %lld %lld %lld\n",
                    kKindNames[static_cast<int>(kKind)],
                    kNaive ? "naive" : "traced",
                    track,
                    static_cast<long long>(end - begin),
                    static_cast<long long>(static_cast<int64_t>(seen[0]) - begin),
                    static_cast<long long>(witness_ns));
    }
}

template <Kind kKind>
void measure_both() {
    measure<kKind, false>();
    measure<kKind, true>();
}

}  // namespace

int main() {
    try {
        measure_both<Kind::block>();
        measure_both<Kind::mbarrier>();
        measure_both<Kind::bulk_copy>();
        measure_both<Kind::cluster>();
        measure_both<Kind::grid>();
    } catch (const std::exception& error) {
        std::fprintf(stderr, "true_times: %s\n", error.what());
        return 1;
    }
    return 0;
}
