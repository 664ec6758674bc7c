// What the communicator itself does between nodes, over a network: four ranks of two nodes in one process, each with a
// proxy; those of the other node are not mapped.
//
//   far_ranks barrier LIBRARY PROVIDER EXECUTOR ROUNDS [OPTION=VALUE...]   every rank writes, all meet, each reads what
//                                                                          all wrote
//   far_ranks clock LIBRARY PROVIDER EXECUTOR TRIPS [OPTION=VALUE...]      rank 0 asks a rank of the other node for its
//                                                                          clock
//
// LIBRARY: of libfabric. Options: commands=N, room in the ring of commands; window=N, writes to a peer that are not
// applied yet; lost=RANK, which ends with its endpoint before the others begin; others: see p2p_stress.cpp. Exit: 0
// right, 1 somebody went on too early or a time is wrong, 2 usage, 3 a wait ran out of time.
#include <thread>

#include "comm/barrier.h"
#include "comm/clock_ping_pong.h"
#include "comm/proxy_peer.h"
#include "stress_proxies.hpp"

using namespace tracekern;

namespace {

constexpr uint32_t kRanks = 4, kRanksPerNode = 2;
using Comm = FarArgs;

struct Options {
    NetworkOptions network;
    CpuLaunch launch;
    uint32_t rounds;
    uint32_t lost = ~0u;
    StressOptions stress;
};

// Returns how many words of other ranks were old.
uint32_t meet(Warp& warp, const Comm& comm, uint32_t rounds, uint32_t* words) {
    uint32_t wrong = 0;
    uint64_t epoch = kFirstEpoch;
    const auto pass = [&] {
        CommContext<Recorder<false>, Comm> context(warp, comm, {}, 0, 0, epoch);
        epoch = next_epoch(epoch);
        return rank_barrier(context);
    };
    for (uint32_t round = 1; round <= rounds; ++round) {
        words[comm.rank] = round;
        if (!pass()) break;
        for (uint32_t peer = 0; peer < kRanks; ++peer) wrong += words[peer] != round;
        if (!pass()) break;
    }
    return wrong;
}

bool exchange_clocks(Warp& warp, const Comm& comm, uint32_t max_trips) {
    std::vector<RoundTrip> trips(max_trips);
    uint32_t count = 0;
    const uint32_t peer = kRanks - 1 - comm.rank;
    const ClockPingPongArgs<Comm> args{comm, peer, 7, max_trips, 20'000'000'000, trips.data(), &count};
    if (comm.rank != 0) {
        answer_ping_pong(warp, args);
        return true;
    }
    initiate_ping_pong(warp, args);
    for (const RoundTrip& trip : trips) {
        if (trip.sent_ticks > trip.answered_ticks || trip.answered_ticks > trip.received_ticks) return false;
    }
    return count == max_trips;
}

int run(const Options& options, bool of_barrier) {
    const auto library = std::make_shared<FabricLibrary>(options.network.library);
    const StressHeaps heaps(kRanks, sizeof(HeapControl));
    const std::vector<uint32_t> host_of = hosts_of(kRanks, kRanksPerNode);
    std::vector<std::unique_ptr<CpuCommunicator>> comms;
    std::vector<std::unique_ptr<RankProxy>> proxies;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
        comms.push_back(std::make_unique<CpuCommunicator>(
            rank, heaps.of_host(rank, host_of), options.stress.timeout_ns, heaps.clock));
        proxies.push_back(options.network.open(library, comms[rank]->args(), sizeof(HeapControl)));
    }
    meet_all(proxies, host_of);
    uint32_t words[kRanks] = {};
    std::vector<int> exits(kRanks);
    const auto run_rank = [&](uint32_t rank) {
        const Comm comm{comms[rank]->args(), &proxies[rank]->ring(), proxies[rank]->far_heap()};
        comms[rank]->launch(options.launch, [&](Warp& warp) {
            exits[rank] = of_barrier ? meet(warp, comm, options.rounds, words) != 0
                                     : !exchange_clocks(warp, comm, options.rounds);
        });
        if (!exits[rank] && comms[rank]->failed()) exits[rank] = report_fault(comms[rank]->fault(), "barrier");
    };
    for (uint32_t rank = 0; rank < kRanks; ++rank)
        rank == options.lost ? proxies[rank].reset() : proxies[rank]->start();
    {
        std::vector<std::jthread> ranks;
        for (uint32_t rank = 0; rank < kRanks; ++rank) {
            const bool takes_part = of_barrier || rank == 0 || rank == kRanks - 1;
            if (takes_part && rank != options.stress.absent && rank != options.lost) ranks.emplace_back(run_rank, rank);
        }
    }
    return *std::max_element(exits.begin(), exits.end());
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 6) {
        std::fprintf(stderr, "usage: see the head of far_ranks.cpp\n");
        return 2;
    }
    Options options{};
    const bool of_barrier = choose(argv[1], std::initializer_list<const char*>{"barrier", "clock"}) == 0;
    options.network = {argv[2], argv[3], /*num_commands=*/2, /*window=*/0};
    options.launch.executor =
        static_cast<CpuExecutor>(choose(argv[4], std::initializer_list<const char*>{"fibers", "threads"}));
    options.rounds = StressOptions::number(argv[5]);
    OptionSetters setters = cpu_setters();
    options.network.add_setters(setters);
    setters["lost"] = [&](const std::string& value) { options.lost = StressOptions::number(value); };
    options.stress = StressOptions::parse(argc - 6, argv + 6, setters);
    const int code = run(options, of_barrier);
    if (code == 0) std::puts("ok");
    return code;
}
