// Tokens through two rings, from node to node by a transport that shuffles: see ring_protocol.h. All ranks in one
// process; those of other nodes are not mapped.
//
//   rings EXECUTOR NODES LOCALS CHANNELS TOKENS CALLS SEED [OPTION=VALUE...]       (options: see p2p_stress.cpp)
//
// Exit: 0 right, 1 a token was lost, came twice or was another, 2 usage, 3 a wait ran out of time.
#include <mutex>
#include <thread>

#include "comm/shuffled_transport.hpp"
#include "ring_protocol.h"

#define TK_OWN_CHANNEL_NAMES kRingChannelNames
#include "stress_cpu.hpp"

using namespace tracekern;

namespace {

using Args = RingArgs<RoutedArgs<ShuffledTransport>>;

struct Options {
    CpuLaunch launch;
    uint32_t num_nodes, num_locals, max_tokens, num_calls, seed;
    StressOptions stress;

    uint32_t num_ranks() const { return num_nodes * num_locals; }
};

void never_raise(RingMemory& memory) {
    const auto clear = [](auto& flags) {
        std::fill_n(reinterpret_cast<uint64_t*>(&flags), sizeof(flags) / sizeof(uint64_t), make_flag(kNeverEpoch, 0));
    };
    clear(memory.arrival);
    clear(memory.credit);
    clear(memory.tail);
    clear(memory.head);
}

bool is_right(const Options& options, uint32_t rank, const RingCall& call, const RingReceipt& receipt) {
    RingReceipt wanted{};
    const uint32_t node = rank / options.num_locals, local = rank % options.num_locals;
    for (uint32_t source = 0; source < options.num_ranks(); ++source) {
        const uint32_t count = call.num_tokens(source, node, options.max_tokens);
        for (uint32_t i = 0; i < count; ++i) {
            const uint32_t word = call.word(source, node, i);
            if (word % options.num_locals != local) continue;
            ++wanted.num_tokens;
            wanted.sum += word;
        }
    }
    if (receipt.num_tokens == wanted.num_tokens && receipt.sum == wanted.sum && !receipt.wrong) return true;
    std::fprintf(stderr,
                 "rank %u call %u: %llu tokens, wanted %llu; %u wrong\n",
                 rank,
                 call.call,
                 static_cast<unsigned long long>(receipt.num_tokens),
                 static_cast<unsigned long long>(wanted.num_tokens),
                 receipt.wrong);
    return false;
}

int run_rank(const Options& options, CpuCommunicator& comm, ShuffledTransport& transport) {
    std::vector<RingReceipt> receipts(size_t{options.launch.num_blocks} * options.num_calls);
    Args args{};
    static_cast<CommArgs&>(args.comm) = comm.args();
    args.comm.transport = &transport;
    args.num_locals = options.num_locals;
    args.num_nodes = options.num_nodes;
    args.max_tokens = options.max_tokens;
    args.num_calls = options.num_calls;
    args.seed = options.seed;
    args.token_bytes = sizeof(RingToken);
    args.receipts = receipts.data();
    comm.launch(options.launch, [&](Warp& warp) { run_rings(warp, args); });
    if (comm.failed()) return report_fault(comm.fault(), kRingRoleNames[comm.fault().role - 1]);
    for (uint32_t channel = 0; channel < options.launch.num_blocks; ++channel) {
        for (uint32_t call = 0; call < options.num_calls; ++call) {
            const RingReceipt& receipt = receipts[channel * options.num_calls + call];
            if (!is_right(options, comm.args().rank, {options.seed, channel, call}, receipt)) return 1;
        }
    }
    return 0;
}

int run(const Options& options) {
    const uint32_t num_ranks = options.num_ranks();
    const StressHeaps heaps(num_ranks, sizeof(HeapControl) + options.launch.num_blocks * sizeof(RingMemory));
    std::vector<std::unique_ptr<CpuCommunicator>> comms;
    std::vector<std::unique_ptr<ShuffledTransport>> transports;
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
        comms.push_back(std::make_unique<CpuCommunicator>(rank,
                                                          heaps.of_host(rank, hosts_of(num_ranks, options.num_locals)),
                                                          options.stress.timeout_ns,
                                                          heaps.clock));
        auto* memory = comms[rank]->args().at<RingMemory>(rank, sizeof(HeapControl));
        for (uint32_t channel = 0; channel < options.launch.num_blocks; ++channel) never_raise(memory[channel]);
    }
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
        transports.push_back(
            std::make_unique<ShuffledTransport>(heaps.addresses, options.seed * uint64_t{num_ranks} + rank));
    }
    std::vector<int> exits(num_ranks);
    {
        std::vector<std::jthread> ranks;
        for (uint32_t rank = 0; rank < num_ranks; ++rank) {
            if (rank == options.stress.absent) continue;
            ranks.emplace_back([&, rank] { exits[rank] = run_rank(options, *comms[rank], *transports[rank]); });
        }
    }
    int worst = 0;
    for (int code : exits) worst = code == 1 || worst == 1 ? 1 : std::max(worst, code);
    return worst;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 8) {
        std::fprintf(stderr, "usage: see the head of rings.cpp\n");
        return 2;
    }
    const auto number = [&](int i) { return static_cast<uint32_t>(std::strtoul(argv[i], nullptr, 10)); };
    Options options{};
    options.launch.executor =
        static_cast<CpuExecutor>(choose(argv[1], std::initializer_list<const char*>{"fibers", "threads"}));
    options.num_nodes = number(2);
    options.num_locals = number(3);
    options.launch.num_blocks = number(4);
    options.launch.warps_per_block = ring_warps(options.num_locals);
    options.launch.shared_bytes = sizeof(RingShared);
    options.max_tokens = number(5);
    options.num_calls = number(6);
    options.seed = number(7);
    options.stress = StressOptions::parse(argc - 8, argv + 8, cpu_setters());
    const int code = run(options);
    if (code == 0) std::puts("ok");
    return code;
}
