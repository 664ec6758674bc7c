// The table of roles of the deduplicated kernels.
//
//   roles BLOCKS WARPS
//
// Prints a line for each warp of each kernel: "kernel block warp roles", its row's name first.
#include <cstdio>
#include <cstdlib>

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

template <class Body, P2PRole... kRoles>
void print_roles(const Warp& warp) {
    const typename Body::Roles roles(warp);
    const auto print = [&](P2PRole role) { std::printf(" %s", kP2PRoleNames[static_cast<uint32_t>(role)]); };
    std::printf("%s %u %u", kP2PStageNames[static_cast<uint32_t>(Body::kStage)], warp.block, warp.warp);
    print(roles.name());
    const auto print_other = [&]<P2PRole kRole>() {
        if (kRole != roles.name() && roles.name() != P2PRole::count && roles.template has<kRole>()) print(kRole);
    };
    (print_other.template operator()<kRoles>(), ...);
    std::puts("");
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
            print_roles<P2PDispatch, P2PRole::send, P2PRole::receive>(warp);
            print_roles<P2PCombine<float, ResultOfEachChoice>, P2PRole::send, P2PRole::reduce>(warp);
            print_roles<P2PDispatchCombine<float>, P2PRole::token, P2PRole::expert>(warp);
        }
    }
}
