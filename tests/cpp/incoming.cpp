// The order in which the warps of a rank take the rows that come.
//
//   incoming RANK WARPS LATE COUNT [COUNT...]
//
// COUNT: rows that come from each rank. LATE: a rank whose rows come when a warp has nothing else left; -1: none.
// Prints a line for each warp, "source:slot" for each row in its order.
#include "moe/p2p/incoming.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "platform/cpu_executor.hpp"

using namespace tracekern;

namespace {

constexpr uint32_t kTokensEach = 4096;
constexpr uint32_t kPartition = 1;

// Lanes whose row is there: not those of the late rank, unless no other is left.
uint32_t arrived(IncomingRows& rows, int late) {
    uint32_t there = 0;
    for (int lane = 0; lane < 32; ++lane) {
        if (!(rows.left() >> lane & 1)) continue;
        if (static_cast<int>(rows.own_row(lane).source) != late) there |= 1u << lane;
    }
    return there ? there : rows.left();
}

void list_rows(Warp& warp, const P2PArgs& args, int late) {
    IncomingRows rows(warp, args, Share{warp.block, warp.num_blocks}, kPartition);
    while (rows.left()) {
        const auto print = [&](uint32_t source, uint32_t slot) {
            std::printf("%u:%u ", source, slot - partition_begin(args, kPartition));
        };
        rows.take(arrived(rows, late), print);
    }
    std::puts("");
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 5) return 2;
    const uint32_t num_ranks = static_cast<uint32_t>(argc - 4);
    std::vector<uint32_t> counts(kPartition * num_ranks), begins(kPartition * num_ranks);  // nothing in those before
    uint32_t sum = 0;
    for (int i = 4; i < argc; ++i) {
        begins.push_back(sum);
        counts.push_back(static_cast<uint32_t>(std::atoi(argv[i])));
        sum += counts.back();
    }
    P2PArgs args{};
    args.comm.rank = static_cast<uint32_t>(std::atoi(argv[1]));
    args.comm.num_ranks = args.shape.num_ranks = num_ranks;
    args.layout.partition_tokens = kTokensEach;
    args.recv_count = counts.data();
    args.recv_begin = begins.data();
    CpuLaunch launch{static_cast<uint32_t>(std::atoi(argv[2])), 1};
    launch_cpu(launch, [&](Warp& warp) { list_rows(warp, args, std::atoi(argv[3])); });
}
