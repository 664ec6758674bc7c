// Spans far shorter than a tick of the realtime clock, in cycles, for test_cycle_clock.py: writes the raw headers and
// then the records to stdout. Span i of a warp holds 8 (i + 1) dependent multiply-adds; 20 us of spinning follow, so
// that a track is long enough to measure its rate.
#include <cstdio>
#include <vector>

#include "platform/gpu_host.hpp"
#include "trace/recorder.h"

#define TK_CYCLE_EVENTS(EVENT) EVENT(multiply, work, completion, "", "steps:16", "")
TK_DEFINE_EVENTS(CycleEvent, TK_CYCLE_EVENTS)

using namespace tracekern;

namespace {

constexpr uint32_t kNumBlocks = 4;
constexpr uint32_t kNumWarps = 2;
constexpr uint32_t kNumTracks = kNumBlocks * kNumWarps;
constexpr uint32_t kNumSpans = 8;
constexpr uint64_t kSpinNs = 20'000;

template <uint32_t kSpan, class Rec>
TK_DEVICE void multiply(Rec& recorder, float& x) {
    constexpr uint32_t kSteps = 8 * (kSpan + 1);
    TK_RANGE(recorder, CycleEvent::multiply, kSteps);
    TK_UNROLL
    for (uint32_t step = 0; step < kSteps; ++step) x = x * 0.5f + 0.5f;
    TK_END_AFTER(__float_as_uint(x));
}

__global__ void short_spans(const LaunchDescriptor launch, float* sink) {
    Warp warp(LaunchSize{});
    Recorder<true, RecordFormat::cycles> recorder({launch}, warp);
    float x = sink[threadIdx.x];
    const uint64_t started = read_clock_after(__float_as_uint(x));  // x is there: no span waits for it
    [&]<uint32_t... kSpan>(std::integer_sequence<uint32_t, kSpan...>) {
        (multiply<kSpan>(recorder, x), ...);
    }(std::make_integer_sequence<uint32_t, kNumSpans>{});
    sink[threadIdx.x] = x;
    while (read_clock() - started < kSpinNs) {
    }
}

void run() {
    DeviceMemory headers(sizeof(TrackHeader) * kNumTracks), records(sizeof(WideRecord) * 2 * kNumSpans * kNumTracks);
    DeviceMemory sink(sizeof(float) * 32 * kNumWarps);
    LaunchDescriptor launch{};
    launch.region.headers = headers.as<TrackHeader>();
    launch.region.records = records.as<WideRecord>();
    launch.event_mask = ~uint64_t{0};
    launch.records_per_track = 2 * kNumSpans;
    launch.warps_per_block = kNumWarps;
    launch.block_stop = kNumBlocks;
    launch.block_step = 1;
    launch.role_mask = ~0u;
    // The first launches fetch the code; the last one counts.
    for (int i = 0; i < 4; ++i) {
        auto* sink_ptr = sink.as<float>();
        launch_kernel(reinterpret_cast<const void*>(short_spans), {kNumBlocks, kNumWarps * 32}, {&launch, &sink_ptr});
        TK_CUDA(cudaGetLastError());
        TK_CUDA(cudaDeviceSynchronize());
    }
    std::vector<TrackHeader> found_headers(kNumTracks);
    std::vector<WideRecord> found(2 * kNumSpans * kNumTracks);
    TK_CUDA(cudaMemcpy(found_headers.data(), headers.as<void>(), sizeof(TrackHeader) * kNumTracks, cudaMemcpyDefault));
    TK_CUDA(cudaMemcpy(found.data(), records.as<WideRecord>(), sizeof(WideRecord) * found.size(), cudaMemcpyDefault));
    std::fwrite(found_headers.data(), sizeof(TrackHeader), found_headers.size(), stdout);
    std::fwrite(found.data(), sizeof(WideRecord), found.size(), stdout);
}

}  // namespace

int main() {
    try {
        run();
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
