// Warp 0 has more on its stack than there is room, warp 1 looks whether its own stack is as it was. Exits with 1 where
// it is not.
#include <alloca.h>

#include "platform/cpu_executor.hpp"

using namespace tracekern;

int main() {
    bool is_damaged = false;
    launch_cpu({.warps_per_block = 2}, [&](Warp& warp) {
        volatile char own[FiberStack::kBytes / 2];
        for (volatile char& byte : own) byte = 1;
        warp.block_sync();
        if (warp.warp == 0) {
            auto* beyond = static_cast<volatile char*>(alloca(FiberStack::kBytes * 3 / 4));
            for (int i = 0; i < 1000; ++i) beyond[i] = 7;
        }
        warp.block_sync();
        if (warp.warp == 0) return;
        for (volatile char& byte : own) is_damaged |= byte != 1;
    });
    return is_damaged;
}
