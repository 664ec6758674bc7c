// What one begin+end span costs, for recorder.py: every probe around the same region of dependent FMAs, launch by
// launch in turns, on all SMs. Prints one JSON object a line, one a probe and configuration. recorder_loop.cuh has the
// loop, recorder_bounds.cuh the lower bounds, recorder_probes.cuh the recorders.
//
//   recorder LAUNCHES REGIONS
//
// Built with -DTK_FLASHINFER and FlashInfer's include folder it runs FlashInfer's own macros too.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "recorder_cases.cuh"

using namespace tracekern;

namespace {

double quantile(std::vector<double> values, double q) {
    std::sort(values.begin(), values.end());
    return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1) + 0.5)];
}

// Reads some tracks of a launch of its own. Returns the median length of a span; throws when something is wrong.
double verify(Case& probe, const BenchArgs& args, const Config& config, double untraced_ns, double traced_ns) {
    probe.prepare(config, true);
    probe.launch(args, config);
    TK_CUDA(cudaDeviceSynchronize());
    const bool shared_entries = probe.name == "atomic";
    std::vector<double> lengths;
    for (uint32_t i = 0; i < 5; ++i) {
        const Spans spans = probe.read(config, i * (config.num_tracks() - 1) / 4);
        require(spans.size() == config.num_regions || shared_entries, "wrong number of spans");
        require(!spans.empty(), "no spans");
        for (size_t k = 0; k < spans.size(); ++k) {
            require(spans[k].end_ns >= spans[k].begin_ns, "a span ends before it begins");
            require(shared_entries || k == 0 || spans[k].begin_ns >= spans[k - 1].end_ns, "spans overlap");
            lengths.push_back(static_cast<double>(spans[k].end_ns - spans[k].begin_ns));
        }
    }
    const double median = quantile(lengths, 0.5);
    // While most warps queue for one counter, the others compute as if they were alone: 4 cycles a step.
    const double least_ns = shared_entries ? 1.9 * config.num_steps : untraced_ns;
    require(median >= 0.8 * least_ns - 32 && median <= 1.2 * traced_ns + 64,
            "spans are " + std::to_string(median) + " ns long, the region " + std::to_string(untraced_ns) + " ns");
    return median;
}

float timed_launch(Case& probe, const BenchArgs& args, const Config& config, cudaEvent_t* events) {
    probe.prepare(config, false);
    TK_CUDA(cudaEventRecord(events[0]));
    probe.launch(args, config);
    TK_CUDA(cudaEventRecord(events[1]));
    TK_CUDA(cudaEventSynchronize(events[1]));
    TK_CUDA(cudaGetLastError());
    float ms = 0;
    TK_CUDA(cudaEventElapsedTime(&ms, events[0], events[1]));
    return ms;
}

// One line of JSON. Returns whether the records are right.
bool report(Case& probe, const Case& nothing, const BenchArgs& args, const Config& config) {
    std::vector<double> added, traced, untraced;
    for (size_t i = 0; i < probe.times_ms.size(); ++i) {
        untraced.push_back(1e6 * nothing.times_ms[i] / config.num_regions);
        traced.push_back(1e6 * probe.times_ms[i] / config.num_regions);
        added.push_back(traced.back() - untraced.back());
    }
    cudaFuncAttributes attributes;
    TK_CUDA(cudaFuncGetAttributes(&attributes, probe.kernel));
    std::string records = "none";
    double length = 0;
    if (probe.has_records()) {
        try {
            length = verify(probe, args, config, quantile(untraced, 0.5), quantile(traced, 0.5));
            records = "right";
        } catch (const std::exception& error) {
            TK_CUDA(cudaDeviceSynchronize());
            records = error.what();
        }
    }
    std::printf(
        "{\"probe\": \"%s\", \"warps_per_sm\": %u, \"fmas\": %u, \"region_ns\": %.1f, \"added_ns\": %.2f, "
        "\"p10_ns\": %.2f, \"p90_ns\": %.2f, \"bytes_per_span\": %g, \"registers\": %d, \"local_bytes\": %zu, "
        "\"span_ns\": %.0f, \"records\": \"%s\"}\n",
        probe.name.c_str(),
        config.num_warps,
        config.num_steps,
        quantile(untraced, 0.5),
        quantile(traced, 0.5) - quantile(untraced, 0.5),
        quantile(added, 0.1),
        quantile(added, 0.9),
        probe.bytes_per_span,
        attributes.numRegs,
        attributes.localSizeBytes,
        length,
        records.c_str());
    std::fflush(stdout);
    return records == "right" || records == "none";
}

bool measure(std::vector<std::unique_ptr<Case>>& cases, float* sink, const Config& config, uint32_t num_launches) {
    const BenchArgs args{sink, config.num_regions, config.num_steps, kPeer, 0.5f};
    cudaEvent_t events[2];
    for (cudaEvent_t& event : events) TK_CUDA(cudaEventCreate(&event));
    for (auto& probe : cases) {
        probe->times_ms.clear();
        for (int i = 0; i < 3; ++i) timed_launch(*probe, args, config, events);
    }
    for (uint32_t round = 0; round < num_launches; ++round) {
        for (size_t i = 0; i < cases.size(); ++i) {
            Case& probe = *cases[(i + round) % cases.size()];
            probe.times_ms.push_back(timed_launch(probe, args, config, events));
        }
    }
    for (cudaEvent_t event : events) TK_CUDA(cudaEventDestroy(event));
    bool right = true;
    for (auto& probe : cases) right = report(*probe, *cases[0], args, config) && right;
    return right;
}

// Where `num_bytes` from `buffer`, which has twice as many, do not cross a multiple of 4 GiB: cursors count up the low
// word of their address only.
char* clear_of_carry(char* buffer, uint64_t num_bytes) {
    const uint64_t last = reinterpret_cast<uint64_t>(buffer) + num_bytes + 64;
    const uint64_t multiple = last >> 32 << 32;
    return multiple > reinterpret_cast<uint64_t>(buffer) ? reinterpret_cast<char*>(multiple) : buffer;
}

int run(uint32_t num_launches, uint32_t num_regions) {
    int device = 0, num_sms = 0;
    TK_CUDA(cudaGetDevice(&device));
    TK_CUDA(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    const uint32_t num_blocks = std::min<uint32_t>(num_sms, kMaxBlocks);
    const uint64_t num_spans = uint64_t{num_blocks} * 32 * num_regions;
    const uint64_t num_bytes = num_spans * 32 + 4096;
    DeviceMemory buffer(2 * num_bytes);
    DeviceMemory sink(uint64_t{num_blocks} * 1024 * sizeof(float));
    char* records = clear_of_carry(buffer.as<char>(), num_bytes);

    std::vector<std::unique_ptr<Case>> cases;
    cases.push_back(std::make_unique<NothingCase>());
    cases.push_back(std::make_unique<BoundCase<Reads>>("clock reads", records));
    cases.push_back(std::make_unique<BoundCase<TwoStores>>("bare stores", records));
    cases.push_back(std::make_unique<BoundCase<OneStore>>("one bare store", records));
    cases.push_back(std::make_unique<BoundCase<OneChecked<false>>>("one checked store", records));
    cases.push_back(std::make_unique<BoundCase<OneChecked<true>>>("one checked store, fields", records));
    cases.push_back(std::make_unique<BoundCase<Short>>("8-byte records", records));
    cases.push_back(std::make_unique<BoundCase<Shared>>("in shared memory", records));
    cases.push_back(std::make_unique<OursCase<false>>("span", records));
    cases.push_back(std::make_unique<OursCase<true>>("span, fields", records));
    cases.push_back(std::make_unique<OursCase<false, Recorder<true>>>("span of any launch", records));
    cases.push_back(std::make_unique<OursCase<false, Recorder<true>>>("span, deselected", records, true));
#ifdef TK_FLASHINFER
    cases.push_back(std::make_unique<FlashinferCase<Flashinfer>>("flashinfer", records));
#endif
    cases.push_back(std::make_unique<FlashinferCase<Clean>>("clean", records));
    cases.push_back(std::make_unique<AtomicCase>(records));
    for (auto& probe : cases) probe->allow_shared();
    bool right = true;
    for (const uint32_t num_steps : {125u, 1000u}) {
        for (const uint32_t num_warps : {4u, 16u, 32u}) {
            right = measure(cases, sink.as<float>(), {num_blocks, num_warps, num_regions, num_steps}, num_launches) &&
                    right;
        }
    }
    return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    const int num_launches = argc == 3 ? std::atoi(argv[1]) : 0, num_regions = argc == 3 ? std::atoi(argv[2]) : 0;
    if (num_launches < 1 || num_regions < 1) return std::fprintf(stderr, "recorder LAUNCHES REGIONS, 1 or more\n"), 2;
    try {
        return run(static_cast<uint32_t>(num_launches), static_cast<uint32_t>(num_regions));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "recorder: %s\n", error.what());
        return 1;
    }
}
