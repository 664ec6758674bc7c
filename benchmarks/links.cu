// What rows reach over NVLink where nothing else is done, for links.py: every GPU of the host sends to all others at
// once, one process, all kinds of copies in turns. Prints one JSON object a line.
//
//   links LAUNCHES ROWS
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "platform/gpu_host.hpp"
#include "tracekern.h"

using namespace tracekern;

namespace {

constexpr uint32_t kMaxGpus = 8;
constexpr uint32_t kRowBytes = 7168 * 2;
constexpr uint32_t kRowStride = kRowBytes + 128;  // a line for a header, as in the pipeline
constexpr uint32_t kChunkBytes = kRowBytes / 2;   // of bulk copies: a warp keeps two under way
constexpr uint32_t kChunks = kRowBytes / kChunkBytes;

struct SendArgs {
    const char* x;         // [row]
    char* rows[kMaxGpus];  // of each GPU: [source][row]
    uint64_t* flags[kMaxGpus];
    uint32_t gpu, num_gpus, num_rows;

    __device__ uint32_t peer(uint32_t row) const { return (gpu + 1 + row % (num_gpus - 1)) % num_gpus; }
    __device__ uint64_t place(uint32_t row) const { return uint64_t{gpu} * num_rows + row / (num_gpus - 1); }
    __device__ char* target(uint32_t row) const { return rows[peer(row)] + place(row) * kRowStride + 128; }
    __device__ uint64_t* flag(uint32_t row) const { return flags[peer(row)] + place(row); }
};

// ---- stores by all lanes ----

template <bool kFlags>
__global__ void __launch_bounds__(512) send_by_stores(SendArgs args) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    for (uint32_t row = warp * gridDim.x + blockIdx.x; row < args.num_rows; row += num_warps * gridDim.x) {
        const auto* from = reinterpret_cast<const uint4*>(args.x + uint64_t{row} * kRowBytes);
        copy_batched<uint4, 32, 4>(reinterpret_cast<uint4*>(args.target(row)), from, kRowBytes / 16, lane);
        __syncwarp();
        if (kFlags && lane == 0) store_release_system(args.flag(row), uint64_t{1});
    }
}

// ---- bulk copies, through shared memory, by one lane of each warp ----

__device__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ void load_chunk(char* chunk, const char* from, uint64_t* arrived) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrived)),
                 "r"(kChunkBytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(chunk)),
                 "l"(from),
                 "r"(kChunkBytes),
                 "r"(shared_address(arrived))
                 : "memory");
}
__device__ void wait_chunk(uint64_t* arrived, uint32_t parity) {
    uint32_t done = 0;
    while (!done) {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(shared_address(arrived)), "r"(parity)
                     : "memory");
    }
}
__device__ void store_chunk(char* to, const char* chunk) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\tcp.async.bulk.commit_group;" ::"l"(to),
                 "r"(shared_address(chunk)),
                 "r"(kChunkBytes)
                 : "memory");
}

// A row's flag is raised while the next row's chunks are under way.
template <bool kFlags>
__global__ void __launch_bounds__(512) send_by_bulk_copies(SendArgs args) {
    extern __shared__ __align__(128) char chunks[];
    __shared__ uint64_t barriers[16][2];
    const uint32_t warp = threadIdx.x / 32, step = blockDim.x / 32 * gridDim.x;
    const uint32_t first = warp * gridDim.x + blockIdx.x;
    if (threadIdx.x % 32 != 0 || first >= args.num_rows) return;
    char* mine = chunks + uint64_t{warp} * 2 * kChunkBytes;
    uint64_t* arrived = barriers[warp];
    for (uint32_t i = 0; i < 2; ++i) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrived + i)));
    }
    asm volatile("fence.proxy.async.shared::cta;");
    const uint32_t num_chunks = (args.num_rows - first + step - 1) / step * kChunks;
    const auto row_of = [&](uint32_t chunk) { return first + chunk / kChunks * step; };
    const auto load = [&](uint32_t chunk) {
        const char* from = args.x + uint64_t{row_of(chunk)} * kRowBytes + chunk % kChunks * kChunkBytes;
        load_chunk(mine + chunk % 2 * kChunkBytes, from, arrived + chunk % 2);
    };
    load(0);
    for (uint32_t chunk = 0; chunk < num_chunks; ++chunk) {
        wait_chunk(arrived + chunk % 2, chunk / 2 % 2);
        char* to = args.target(row_of(chunk)) + chunk % kChunks * kChunkBytes;
        store_chunk(to, mine + chunk % 2 * kChunkBytes);
        if (chunk + 1 < num_chunks) {
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
            load(chunk + 1);
        }
        if (kFlags && chunk % kChunks == kChunks - 1 && chunk >= kChunks) {
            asm volatile("cp.async.bulk.wait_group 2;" ::: "memory");  // all but this row's
            store_release_system(args.flag(row_of(chunk - kChunks)), uint64_t{1});
        }
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    if (kFlags) store_release_system(args.flag(row_of(num_chunks - 1)), uint64_t{1});
}

// ---- host ----

struct Gpu {
    explicit Gpu(int index, uint32_t num_gpus, uint32_t num_rows) : index(index) {
        TK_CUDA(cudaSetDevice(index));
        for (uint32_t peer = 0; peer < num_gpus; ++peer) {
            if (static_cast<int>(peer) != index) TK_CUDA(cudaDeviceEnablePeerAccess(static_cast<int>(peer), 0));
        }
        TK_CUDA(cudaMalloc(&x, uint64_t{num_rows} * kRowBytes));
        TK_CUDA(cudaMalloc(&rows, uint64_t{num_gpus} * num_rows * kRowStride));
        TK_CUDA(cudaMalloc(&flags, uint64_t{num_gpus} * num_rows * sizeof(uint64_t)));
        TK_CUDA(cudaMemset(x, index + 1, uint64_t{num_rows} * kRowBytes));
        TK_CUDA(cudaDeviceSynchronize());
        stream = std::make_unique<SideStream>();
    }
    int index;
    char *x, *rows;
    uint64_t* flags;
    std::unique_ptr<SideStream> stream;
};

struct Kind {
    const char* name;
    void (*kernel)(SendArgs);
    uint32_t blocks, warps, shared_bytes;
    std::vector<double> ms;
};

struct Interval {
    StreamEvent start{cudaEventDefault}, stop{cudaEventDefault};
};

// Milliseconds of the GPU that took longest, each from right before its launch to its kernel's end. One thread starts
// them one after the other, so the first ones send alone for a moment, and the last ones at the end. The end is
// recorded before anything is waited for: behind the wait for another GPU it would come as late as the host sees that
// one end.
double launch_everywhere(const Kind& kind, const std::vector<Gpu>& gpus, uint32_t num_rows, uint32_t num_senders) {
    std::vector<std::unique_ptr<Interval>> intervals;
    for (uint32_t gpu = 0; gpu < num_senders; ++gpu) {
        SendArgs args{gpus[gpu].x, {}, {}, gpu, static_cast<uint32_t>(gpus.size()), num_rows};
        for (const Gpu& peer : gpus) {
            args.rows[peer.index] = peer.rows;
            args.flags[peer.index] = peer.flags;
        }
        TK_CUDA(cudaSetDevice(gpus[gpu].index));
        TK_CUDA(cudaFuncSetAttribute(kind.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 14 * 2 * kChunkBytes));
        intervals.push_back(std::make_unique<Interval>());
        const uint64_t stream = gpus[gpu].stream->handle();
        intervals[gpu]->start.record(stream);
        kind.kernel<<<kind.blocks, kind.warps * 32, kind.shared_bytes, reinterpret_cast<cudaStream_t>(stream)>>>(args);
        TK_CUDA(cudaGetLastError());
        intervals[gpu]->stop.record(stream);
    }
    float slowest = 0;
    for (uint32_t gpu = 0; gpu < num_senders; ++gpu) {
        float ms = 0;
        TK_CUDA(cudaSetDevice(gpus[gpu].index));
        TK_CUDA(cudaEventSynchronize(intervals[gpu]->stop.get()));
        TK_CUDA(cudaEventElapsedTime(&ms, intervals[gpu]->start.get(), intervals[gpu]->stop.get()));
        slowest = std::max(slowest, ms);
    }
    return slowest;
}

int run(int num_launches, uint32_t num_rows) {
    int num_gpus = 0;
    TK_CUDA(cudaGetDeviceCount(&num_gpus));
    if (num_gpus < 2) return std::fprintf(stderr, "links: needs 2 GPUs, %d are here\n", num_gpus), 2;
    num_gpus = std::min(num_gpus, static_cast<int>(kMaxGpus));
    std::vector<Gpu> gpus;
    for (int gpu = 0; gpu < num_gpus; ++gpu) gpus.emplace_back(gpu, num_gpus, num_rows);
    for (uint32_t num_senders : {static_cast<uint32_t>(num_gpus), 1u}) {
        std::vector<Kind> kinds;
        for (const auto& [blocks, warps] : {std::pair{132u, 16u}, {132u, 8u}, {64u, 8u}, {16u, 8u}}) {
            kinds.push_back({"stores", send_by_stores<false>, blocks, warps, 0, {}});
            kinds.push_back({"stores, flags", send_by_stores<true>, blocks, warps, 0, {}});
            if (warps > 14) continue;  // two chunks a warp fill the shared memory
            const uint32_t bytes = warps * 2 * kChunkBytes;
            kinds.push_back({"bulk copies", send_by_bulk_copies<false>, blocks, warps, bytes, {}});
            kinds.push_back({"bulk copies, flags", send_by_bulk_copies<true>, blocks, warps, bytes, {}});
        }
        for (int launch = 0; launch < num_launches + 2; ++launch) {
            for (Kind& kind : kinds) {
                const double ms = launch_everywhere(kind, gpus, num_rows, num_senders);
                if (launch >= 2) kind.ms.push_back(ms);  // the first ones load code
            }
        }
        for (Kind& kind : kinds) {
            std::sort(kind.ms.begin(), kind.ms.end());
            const auto rate = [&](size_t i) { return num_rows * double{kRowBytes} / kind.ms[i] / 1e6; };
            std::printf(
                "{\"kind\": \"%s\", \"senders\": %u, \"blocks\": %u, \"warps\": %u, \"gb_per_s\": %.1f, \"p10\": %.1f, "
                "\"p90\": %.1f}\n",
                kind.name,
                num_senders,
                kind.blocks,
                kind.warps,
                rate(kind.ms.size() / 2),
                rate(kind.ms.size() * 9 / 10),
                rate(kind.ms.size() / 10));
        }
    }
    // The last row of GPU 0 is a whole one of GPU 0's.
    std::vector<char> row(kRowBytes);
    const uint32_t last = num_rows - 1;
    const uint32_t peer = 1 + last % (num_gpus - 1);
    const char* there = gpus[peer].rows + uint64_t{last / (num_gpus - 1)} * kRowStride + 128;
    TK_CUDA(cudaMemcpy(row.data(), there, kRowBytes, cudaMemcpyDefault));
    const bool right = std::all_of(row.begin(), row.end(), [](char byte) { return byte == 1; });
    if (!right) std::fprintf(stderr, "links: the last row did not arrive\n");
    return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return std::fprintf(stderr, "links LAUNCHES ROWS\n"), 2;
    try {
        return run(std::atoi(argv[1]), static_cast<uint32_t>(std::atoi(argv[2])));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "links: %s\n", error.what());
        return 1;
    }
}
