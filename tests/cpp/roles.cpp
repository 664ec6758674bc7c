// The tables of roles of the kernels that have some.
//
//   roles BLOCKS WARPS
//
// Prints a line for each warp of each kernel: "kernel block warp roles", its row's name first.
#include <cstdio>
#include <cstdlib>

#include "moe/low_latency/kernels.h"
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

// Roles that a warp has beside its first are halves'; in a block that counts nobody asks for them.
template <class Roles, auto... kHalves>
void print_roles(const char* kernel, const Warp& warp, const char* const* names) {
    const Roles roles(warp);
    using Name = decltype(roles.name());
    const auto print = [&](auto role) { std::printf(" %s", names[static_cast<uint32_t>(role)]); };
    std::printf("%s %u %u", kernel, warp.block, warp.warp);
    print(roles.name());
    [[maybe_unused]] const auto print_other = [&]<auto kRole>() {
        if (kRole != roles.name() && roles.name() != Name::count && roles.template has<kRole>()) print(kRole);
    };
    (print_other.template operator()<kHalves>(), ...);
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
            using enum P2PRole;
            print_roles<P2PDispatchSend<P2PVariant::flag>::Roles>("dispatch_send", warp, kP2PRoleNames);
            print_roles<P2PDispatch::Roles, send, receive>("dispatch", warp, kP2PRoleNames);
            print_roles<P2PCombine<float, ResultOfEachChoice>::Roles, send, reduce>("combine", warp, kP2PRoleNames);
            print_roles<P2PDispatchCombine<float>::Roles, token, expert>("dispatch_combine", warp, kP2PRoleNames);
            print_roles<SendRoles<false>>("low_latency", warp, kLowLatencyRoleNames);
        }
    }
}
