// The barrier of ranks, some of which a network reaches, as a kernel: for test_proxies.py, which compiles it.
#include "comm/barrier.h"
#include "comm/proxy_peer.h"

using namespace tracekern;

using Comm = FarArgs;

TK_ENTRY(32, 1) meet(Comm comm, uint64_t epoch, LaunchSize size) {
    Warp warp(size);
    CommContext<Recorder<false>, Comm> context(warp, comm, {}, kRankBarrierStage, 0, epoch);
    rank_barrier(context);
}
