// Leaves no room for another warp on the current GPU, for as long as it is told. Loaded by tests/moe/test_full_gpu.py.
#include <cstdint>

namespace {

constexpr int kThreads = 1024;

__global__ void spin(uint64_t duration_ns) {
    uint64_t started, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(started));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - started < duration_ns);
}

}  // namespace

// Starts it and returns a cudaError_t.
extern "C" int fill_gpu(uint64_t duration_ns) {
    int device, num_sms, blocks_per_sm;
    if (const cudaError_t code = cudaGetDevice(&device)) return code;
    if (const cudaError_t code = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device)) return code;
    if (const cudaError_t code = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, spin, kThreads, 0))
        return code;
    spin<<<num_sms * blocks_per_sm, kThreads>>>(duration_ns);
    return cudaGetLastError();
}
