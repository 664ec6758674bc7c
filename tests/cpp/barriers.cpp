// The barriers under attack, all ranks in one process.
//
//   barriers grid|rank EXECUTOR RANKS BLOCKS WARPS ROUNDS [OPTION=VALUE...]      (options: see p2p_stress.cpp)
//
// grid  every warp of every block writes, all meet, every warp reads what all others wrote; each rank on its own.
//       absent=BLOCK leaves that block out.
// rank  one warp a rank writes at every peer, all meet, it reads what every peer wrote.
// Exit: 0 right, 1 somebody went on too early, 2 usage, 3 a wait ran out of time.
#include <thread>

#include "comm/barrier.h"
#include "stress_cpu.hpp"

using namespace tracekern;

namespace {

struct Options {
    bool of_grid;
    CpuLaunch launch;
    uint32_t num_ranks;
    uint32_t rounds;
    StressOptions stress;
};

// What a block left behind: did its warps all get through, with the same answer?
struct Outcome {
    std::vector<uint32_t> wrong;     // [warp of the grid] rounds in which it read an old value
    std::vector<uint32_t> gave_up;   // [warp of the grid] 1: the barrier said so
    std::vector<uint32_t> finished;  // [warp of the grid]

    explicit Outcome(size_t num_warps) : wrong(num_warps), gave_up(num_warps), finished(num_warps) {}
};

void run_grid_warp(
    Warp& warp, const Options& options, const CommArgs& comm, uint64_t* count, uint32_t* words, Outcome& outcome) {
    const uint32_t num_warps = warp.num_blocks * warp.num_warps;
    const uint32_t self = warp.block * warp.num_warps + warp.warp;
    outcome.gave_up[self] = warp.block == options.stress.absent;
    for (uint32_t round = 1; round <= options.rounds && !outcome.gave_up[self]; ++round) {
        words[self] = round;
        bool ok = grid_barrier(warp, comm, count, 0);
        for (uint32_t other = 0; ok && other < num_warps; ++other) outcome.wrong[self] += words[other] != round;
        ok = ok && grid_barrier(warp, comm, count, 0);
        outcome.gave_up[self] = !ok;
    }
    // A warp that gave up must not leave the others of its block behind.
    warp.block_sync();
    outcome.finished[self] = 1;
}

int check(const Outcome& outcome, const CpuCommunicator& comm) {
    for (size_t warp = 0; warp < outcome.finished.size(); ++warp) {
        if (!outcome.finished[warp] || outcome.wrong[warp]) return 1;
        if (outcome.gave_up[warp] != outcome.gave_up[0]) return 1;
    }
    if (comm.failed() != (outcome.gave_up[0] != 0)) return 1;
    return comm.failed() ? report_fault(comm.fault(), "barrier") : 0;
}

int run_grid(const Options& options, CpuCommunicator& comm) {
    const size_t num_warps = size_t{options.launch.num_blocks} * options.launch.warps_per_block;
    std::vector<uint32_t> words(num_warps);
    Outcome outcome(num_warps);
    uint64_t count = 0;
    comm.launch(options.launch,
                [&](Warp& warp) { run_grid_warp(warp, options, comm.args(), &count, words.data(), outcome); });
    return check(outcome, comm);
}

// Each rank's payload: a word from every peer, behind the control block, for two epochs in turns.
uint32_t* payload(const CommArgs& comm, uint32_t at_rank, uint32_t epoch) {
    return comm.at<uint32_t>(at_rank, sizeof(HeapControl)) + epoch % 2 * kMaxRanks;
}

int run_rank(const Options& options, CpuCommunicator& comm) {
    const CommArgs& args = comm.args();
    Outcome outcome(1);
    for (uint32_t round = 0; round < options.rounds && !outcome.gave_up[0]; ++round) {
        const uint32_t epoch = kFirstEpoch + round;
        comm.launch(options.launch, [&](Warp& warp) {
            CommContext<Recorder<false>> context(warp, args, {}, 0, 0, epoch);
            for (uint32_t peer = 0; peer < args.num_ranks; ++peer) payload(args, peer, epoch)[args.rank] = round + 1;
            const bool ok = rank_barrier(context);
            const uint32_t* words = payload(args, args.rank, epoch);
            for (uint32_t peer = 0; ok && peer < args.num_ranks; ++peer) outcome.wrong[0] += words[peer] != round + 1;
            outcome.gave_up[0] = !ok;
        });
    }
    outcome.finished[0] = 1;
    return check(outcome, comm);
}

int run(const Options& options) {
    const StressHeaps heaps(options.num_ranks, sizeof(HeapControl) + 2 * kMaxRanks * sizeof(uint32_t));
    std::vector<std::unique_ptr<CpuCommunicator>> comms;
    for (uint32_t rank = 0; rank < options.num_ranks; ++rank) {
        comms.push_back(
            std::make_unique<CpuCommunicator>(rank, heaps.addresses, options.stress.timeout_ns, heaps.clock));
    }
    std::vector<int> exits(options.num_ranks);
    {
        std::vector<std::jthread> ranks;
        for (uint32_t rank = 0; rank < options.num_ranks; ++rank) {
            if (!options.of_grid && rank == options.stress.absent) continue;
            ranks.emplace_back([&, rank] {
                exits[rank] = options.of_grid ? run_grid(options, *comms[rank]) : run_rank(options, *comms[rank]);
            });
        }
    }
    int worst = 0;
    for (int code : exits) worst = code == 1 || worst == 1 ? 1 : std::max(worst, code);
    return worst;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 7) {
        std::fprintf(stderr, "usage: see the head of barriers.cpp\n");
        return 2;
    }
    const auto number = [&](int i) { return static_cast<uint32_t>(std::strtoul(argv[i], nullptr, 10)); };
    Options options{};
    options.of_grid = choose(argv[1], std::initializer_list<const char*>{"grid", "rank"}) == 0;
    options.launch.executor =
        static_cast<CpuExecutor>(choose(argv[2], std::initializer_list<const char*>{"fibers", "threads"}));
    options.num_ranks = number(3);
    options.launch.num_blocks = number(4);
    options.launch.warps_per_block = number(5);
    options.rounds = number(6);
    options.stress = StressOptions::parse(argc - 7, argv + 7, cpu_setters());
    const int code = run(options);
    if (code == 0) std::puts("ok");
    return code;
}
