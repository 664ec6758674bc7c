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
#include "fabric/proxy.hpp"
#include "stress_cpu.hpp"

using namespace tracekern;

namespace {

constexpr uint32_t kRanks = 4, kRanksPerNode = 2;
using Comm = RoutedArgs<CommandRing>;

struct Options {
    std::string library, provider;
    CpuLaunch launch;
    uint32_t rounds;
    uint32_t num_commands = 2, window = 0, lost = ~0u;
    StressOptions stress;
};

// Commands of a rank's kernels, and the proxy that takes them.
struct ProxyOfRank {
    std::vector<Command> commands;
    uint64_t num_claimed = 0, num_taken = 0;
    CommandRing ring;
    Proxy proxy;

    ProxyOfRank(const FabricLibrary& library, const Options& options, const CommArgs& comm)
        : commands(options.num_commands),
          ring{commands.data(), options.num_commands, &num_claimed, &num_taken},
          proxy(library,
                {options.provider, options.provider == "tcp" ? "127.0.0.1" : "", ""},
                comm,
                ring,
                options.window) {}
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
    const FabricLibrary library(options.library);
    const StressHeaps heaps(kRanks, sizeof(HeapControl));
    std::vector<std::unique_ptr<CpuCommunicator>> comms;
    std::vector<std::unique_ptr<ProxyOfRank>> proxies;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
        comms.push_back(std::make_unique<CpuCommunicator>(
            rank, heaps.node_of(rank, kRanksPerNode), options.stress.timeout_ns, heaps.clock));
        proxies.push_back(std::make_unique<ProxyOfRank>(library, options, comms[rank]->args()));
    }
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
        for (uint32_t peer = 0; peer < kRanks; ++peer) {
            if (rank / kRanksPerNode != peer / kRanksPerNode)
                proxies[rank]->proxy.meet(peer, proxies[peer]->proxy.address());
        }
    }
    uint32_t words[kRanks] = {};
    std::vector<int> exits(kRanks);
    const auto run_rank = [&](uint32_t rank) {
        const Comm comm{comms[rank]->args(), &proxies[rank]->ring, kRanksPerNode};
        comms[rank]->launch(options.launch, [&](Warp& warp) {
            exits[rank] = of_barrier ? meet(warp, comm, options.rounds, words) != 0
                                     : !exchange_clocks(warp, comm, options.rounds);
        });
        if (!exits[rank] && comms[rank]->failed()) exits[rank] = report_fault(comms[rank]->fault(), "barrier");
    };
    if (options.lost < kRanks) proxies[options.lost].reset();
    std::vector<std::jthread> threads;
    for (auto& of_rank : proxies) {
        if (!of_rank) continue;
        threads.emplace_back([&proxy = of_rank->proxy](const std::stop_token& stop) {
            for (uint32_t spins = 0; !stop.stop_requested();) proxy.turn() ? void(spins = 0) : relax_thread(spins);
        });
    }
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
    options.library = argv[2];
    options.provider = argv[3];
    options.launch.executor =
        static_cast<CpuExecutor>(choose(argv[4], std::initializer_list<const char*>{"fibers", "threads"}));
    options.rounds = StressOptions::number(argv[5]);
    OptionSetters setters = cpu_setters();
    setters["commands"] = [&](const std::string& value) { options.num_commands = StressOptions::number(value); };
    setters["lost"] = [&](const std::string& value) { options.lost = StressOptions::number(value); };
    setters["window"] = [&](const std::string& value) { options.window = StressOptions::number(value); };
    options.stress = StressOptions::parse(argc - 6, argv + 6, setters);
    const int code = run(options, of_barrier);
    if (code == 0) std::puts("ok");
    return code;
}
