// Rows that the warps of one rank store at a peer of its node, and over a slow link at one of another node.
//
//   slow_link fibers|threads
//
// Exit: 0 right, 1 a row was not counted as near or far, or a warp went on before its row had left.
#include <atomic>
#include <cstdio>
#include <string>

#include "stress_cpu.hpp"

using namespace tracekern;

namespace {

constexpr double kGbPerS = 0.004;
constexpr uint32_t kRanks = 4, kRanksPerNode = 2, kNear = 1, kFar = 3;
constexpr uint32_t kBlocks = 2, kWarps = 4, kRowBytes = 4096;
constexpr uint64_t kHeapBytes = sizeof(HeapControl) + 2 * kBlocks * kWarps * kRowBytes;

// By one of the ways in which rows are stored.
void store_row(Warp& warp, char* to, const char* from, bool is_copied) {
    if (is_copied) return copy_row(warp, to, from, kRowBytes);
    for (uint32_t i = 0; i < kRowBytes; i += sizeof(Vector16)) {
        store_once(reinterpret_cast<Vector16*>(to + i), *reinterpret_cast<const Vector16*>(from + i));
    }
}

// By one of the ways in which a warp orders its memory or lets others run.
void order(Warp& warp, uint32_t way) {
    uint32_t spins = 0;
    if (way == 0) warp.sync();
    if (way == 1) warp.leader([] {});
    if (way == 2) warp.once([] { return 0; });
    if (way == 3) warp.relax(spins);
}

struct Outcome {
    std::atomic<uint32_t> wrong = 0;
    std::atomic<int64_t> ended_ns = 0;
};

void run_warp(Warp& warp, const CommArgs& comm, Outcome& outcome) {
    const uint32_t self = warp.block * warp.num_warps + warp.warp;
    const uint64_t place = sizeof(HeapControl) + uint64_t{self} * kRowBytes;
    const auto* from = comm.at<char>(comm.rank, place + kBlocks * kWarps * kRowBytes);
    store_row(warp, comm.at<char>(kNear, place), from, warp.block == 0);
    outcome.wrong += outgoing.bytes != 0;

    const int64_t began_ns = SimulatedClock::host_now_ns();
    store_row(warp, comm.at<char>(kFar, place), from, warp.block == 0);
    outcome.wrong += outgoing.bytes != kRowBytes;
    order(warp, warp.warp);
    const int64_t ended_ns = SimulatedClock::host_now_ns();
    outcome.wrong += static_cast<double>(ended_ns - began_ns) < kRowBytes / kGbPerS;
    for (int64_t last = outcome.ended_ns; last < ended_ns && !outcome.ended_ns.compare_exchange_weak(last, ended_ns);) {
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) return 2;
    const bool has_threads = std::string(argv[1]) == "threads";
    const CpuLaunch launch{kBlocks, kWarps, 0, has_threads ? CpuExecutor::threads : CpuExecutor::fibers};
    const StressHeaps heaps(kRanks, kHeapBytes);
    CpuCommunicator comm(0, heaps.addresses, 1'000'000'000, heaps.clock);
    comm.set_slow_link(kGbPerS, kRanksPerNode, kHeapBytes);
    Outcome outcome;
    const int64_t began_ns = SimulatedClock::host_now_ns();
    comm.launch(launch, [&](Warp& warp) { run_warp(warp, comm.args(), outcome); });
    // Rows of all warps share the link.
    outcome.wrong += static_cast<double>(outcome.ended_ns - began_ns) < kBlocks * kWarps * kRowBytes / kGbPerS;

    comm.set_slow_link(0, kRanksPerNode, kHeapBytes);
    comm.launch(CpuLaunch{}, [&](Warp& warp) {
        store_row(warp, comm.args().at<char>(kFar, sizeof(HeapControl)), comm.args().at<char>(0, 0), true);
        outcome.wrong += outgoing.bytes != 0;
    });
    if (outcome.wrong) return 1;
    std::puts("ok");
}
