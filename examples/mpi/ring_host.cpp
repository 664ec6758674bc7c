// Ranks without Python that send tokens around the ring of examples/ring, and record it by tracekern_host.h.
//
//   ring_host [-o DIR] [--slow RANK] [--calls N] [--timeout SECONDS] [--rings N]
//
// With --rings N there is a ring of every N-th rank, and the capture is told which ranks these are.
//
// g++ builds it for the CPU backend, `nvcc -x cu` for GPUs; README.md has the commands. Exits with 0 where this rank
// received what was sent to it.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string_view>
#include <vector>

#ifdef __CUDACC__
    #include "device_cuda.h"
#else
    #include "device_cpu.h"
#endif

namespace {

constexpr uint32_t kNumChannels = 2, kNumTokens = 50, kWords = kNumChannels * kNumTokens * kWordsPerToken;
constexpr uint64_t kSlowNs = 1'000'000;  // what a token takes longer at a slow receiver

// Offsets in the heap of a rank.
constexpr uint64_t kSlotsAt = sizeof(HeapControl);
constexpr uint64_t kWordsAt = kSlotsAt + kNumChannels * kSlots * kWordsPerToken * sizeof(uint32_t);
constexpr uint64_t kTailsAt = kWordsAt, kCreditsAt = kWordsAt + 1024, kArrivalsAt = kWordsAt + 2048;
constexpr uint64_t kHeapBytes = (kWordsAt + 4096 + 4095) / 4096 * 4096;

struct Options {
    const char* directory = "ring-capture";
    int slow = -1;
    uint32_t calls = 4;
    uint64_t timeout_s = 20;
    uint32_t rings = 1;
};

Options parse(int count, char** words) {
    Options options;
    for (int i = 1; i < count; i += 2) {
        const std::string_view name = words[i];
        if (i + 1 == count) throw std::runtime_error(std::string(name) + ": wanted a value behind it");
        const char* value = words[i + 1];
        if (name == "-o") {
            options.directory = value;
        } else if (name == "--slow") {
            options.slow = std::atoi(value);
        } else if (name == "--calls") {
            options.calls = static_cast<uint32_t>(std::atoi(value));
        } else if (name == "--timeout") {
            options.timeout_s = static_cast<uint64_t>(std::atoi(value));
        } else if (name == "--rings") {
            options.rings = std::max(1, std::atoi(value));
        } else {
            throw std::runtime_error(std::string(name) + ": wanted -o, --slow, --calls, --timeout or --rings");
        }
    }
    return options;
}

uint32_t token_word(uint32_t rank, uint32_t call, uint32_t word) {
    return (call << 8 | rank) << 16 | word;
}

// The ranks of this one's ring, in their order.
std::vector<uint32_t> find_ring(Place place, uint32_t num_rings) {
    std::vector<uint32_t> ranks;
    for (uint32_t rank = place.rank % num_rings; rank < place.num_ranks; rank += num_rings) ranks.push_back(rank);
    return ranks;
}

RingArgs ring_args(
    Device& device, Place place, const std::vector<uint32_t>& ring, const Options& options, tk_host* host) {
    RingArgs args{};
    args.comm = device.comm;
    args.comm.rank = place.rank / options.rings;
    args.comm.num_ranks = static_cast<uint32_t>(ring.size());
    for (size_t peer = 0; peer < ring.size(); ++peer) args.comm.heap[peer] = device.comm.heap[ring[peer]];
    args.comm.timeout_ticks = options.timeout_s * 1'000'000'000;
    args.comm.fault = static_cast<FaultRecord*>(tk_host_fault(host));
    args.slots = kSlotsAt;
    args.tails = kTailsAt;
    args.credits = kCreditsAt;
    args.arrivals = kArrivalsAt;
    args.sent = device.allocate(kWords);
    args.received = device.allocate(kWords);
    args.num_tokens = kNumTokens;
    args.slow_ticks = options.slow == static_cast<int>(place.rank) ? kSlowNs : 0;
    return args;
}

// Runs the calls. Returns whether this rank received in each what the one before it sent.
bool send_around(
    Device& device, Place place, const std::vector<uint32_t>& ring, const Options& options, tk_host* host) {
    RingArgs args = ring_args(device, place, ring, options, host);
    const std::string events = describe_events<RingEvent>();
    tk_host_kernel kernel{};
    kernel.name = "ring";
    kernel.blocks = kNumChannels;
    kernel.warps = kWarps;
    kernel.events = events.c_str();
    kernel.roles = "send receive";
    const uint32_t previous = ring[(args.comm.rank + ring.size() - 1) % ring.size()];
    bool is_right = true;
    for (args.call = 1; args.call <= options.calls; ++args.call) {
        for (uint32_t i = 0; i < kWords; ++i)
            const_cast<uint32_t*>(args.sent)[i] = token_word(place.rank, args.call, i);
        // One epoch: counts run on, so a wait may be for what an earlier call signalled.
        with_recorder<Recorder<true>>(tk_host_launch(host, &kernel, 1),
                                      [&]<class Rec>(auto trace) { launch<Rec>(args, kNumChannels, trace); });
        device.synchronize();
        if (args.comm.fault->cause) {
            throw std::runtime_error("call " + std::to_string(args.call) + " gave up on rank " +
                                     std::to_string(ring[args.comm.fault->peer]));
        }
        for (uint32_t i = 0; i < kWords; ++i) is_right &= args.received[i] == token_word(previous, args.call, i);
    }
    return is_right;
}

bool run(Place place, const Options& options) {
    const char* name = std::getenv("RING_RUN");
    if (!name) throw std::runtime_error("RING_RUN is not set: a name that all ranks share and no run had before");
    Board board(name, place, kHeapBytes);
    Device device(board, place, kHeapBytes);
    tk_host_options about{};
    about.directory = options.directory;
    about.run = name;
    about.rank = place.rank;
    about.num_ranks = place.num_ranks;
    about.stages = "ring";
    about.channels = "tail credit arrival";
    const std::vector<uint32_t> ring = find_ring(place, options.rings);
    const std::string ring_name = "ring " + std::to_string(ring[0]);
    const tk_host_group group{ring_name.c_str(), 0, ring.data(), static_cast<uint32_t>(ring.size())};
    if (options.rings > 1) about.group = &group;
    device.describe(about);
    const std::unique_ptr<tk_host, decltype(&tk_host_close)> host(tk_host_open(&about), tk_host_close);
    if (!host) throw std::runtime_error(tk_host_error());
    const uint64_t credits[kNumChannels] = {kSlots, kSlots};
    device.write(kCreditsAt, credits, sizeof(credits));
    device.attach(host.get());
    device.sample_clocks(host.get(), 0);
    board.barrier();  // no credit is returned before all begin full
    const bool is_right = send_around(device, place, ring, options, host.get());
    device.sample_clocks(host.get(), 1);
    device.detach();
    return is_right;
}

}  // namespace

int main(int count, char** words) {
    std::string who = "ring_host";
    try {
        const Options options = parse(count, words);
        const Place place = find_place();
        who = "rank " + std::to_string(place.rank);
        const bool is_right = run(place, options);
        std::printf("%s received %s that was sent to it\n", who.c_str(), is_right ? "all" : "NOT all");
        return is_right ? 0 : 1;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: %s\n", who.c_str(), error.what());
        return 2;
    }
}
