// The roles of warps in kernels whose warps do different things.
//
//   roles BLOCKS WARPS
//
// Prints a line for each warp of each kernel: "kernel block warp roles", its row's name first.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "moe/low_latency/family.h"
#include "moe/p2p/kernels.h"
#include "platform/device.h"

using namespace tracekern;

namespace {

// Of a warp that only says which it is.
struct NoBlock final : BlockContext {
    void sync() override {}
    void relax(uint32_t&) override {}
    void trap() override {}
};

void print_role(const char* kernel, const Warp& warp, const char* role) {
    std::printf("%s %u %u %s\n", kernel, warp.block, warp.warp, role);
}

// other: of the half that does not name the row of a warp that has both. In a block that counts nobody asks for it.
void print_roles(const char* kernel, const Warp& warp, const OwnPart& own, P2PRole role, P2PRole other) {
    std::string names = kP2PRoleNames[static_cast<uint32_t>(role)];
    const bool has_both = own.in_first_half && own.in_second_half && role != P2PRole::count;
    if (has_both) names += std::string(" ") + kP2PRoleNames[static_cast<uint32_t>(other)];
    print_role(kernel, warp, names.c_str());
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    const auto num_blocks = static_cast<uint32_t>(std::atoi(argv[1]));
    const auto num_warps = static_cast<uint32_t>(std::atoi(argv[2]));
    for (uint32_t block = 0; block < num_blocks; ++block) {
        for (uint32_t i = 0; i < num_warps; ++i) {
            NoBlock context;
            const Warp warp(context, block, num_blocks, i, num_warps);
            using enum P2PRole;
            const OwnPart part = P2PDispatch::part_of(warp);
            using Combine = P2PCombine<float, ResultOfEachChoice>;
            const OwnPart of_combine = Combine::part_of(warp);
            const P2PRole sends = P2PDispatchSend<P2PVariant::flag>::role_of(is_count_block(warp));
            print_role("dispatch_send", warp, kP2PRoleNames[static_cast<uint32_t>(sends)]);
            print_roles("dispatch", warp, part, P2PDispatch::role_of(warp, part), receive);
            print_roles("combine", warp, of_combine, Combine::role_of(of_combine), reduce);
            print_roles("dispatch_combine", warp, part, P2PDispatchCombine<float>::role_of(warp, part), expert);
            print_role("low_latency", warp, is_count_warp(warp) ? "count" : "dispatch");
        }
    }
}
