// The kernels of the communicator for GPUs. CUDA and HIP compile it.
#include "comm/barrier.h"
#include "comm/clock_ping_pong.h"

using namespace tracekern;  // NOLINT: entry points have C names

namespace {

template <class Rec>
TK_DEVICE void run_rank_barrier(const CommArgs& comm, uint32_t epoch, LaunchSize size, typename Rec::Args trace) {
    Warp warp(size);
    Rec recorder(trace, warp, 0, epoch);
    rank_barrier(warp, comm, recorder, epoch, 0);
}

}  // namespace

#define TK_RANK_BARRIER(suffix, Rec)                                                                               \
    TK_KERNEL rank_barrier_##suffix(const CommArgs comm, uint32_t epoch, const LaunchSize size, Rec::Args trace) { \
        run_rank_barrier<Rec>(comm, epoch, size, trace);                                                           \
    }

using RecorderOff = Recorder<false>;
using RecorderWide = Recorder<true, RecordFormat::wide>;
using RecorderCompact = Recorder<true, RecordFormat::compact>;

TK_RANK_BARRIER(off, RecorderOff)
TK_RANK_BARRIER(wide, RecorderWide)
TK_RANK_BARRIER(compact, RecorderCompact)

TK_KERNEL initiate_clock_ping_pong(const ClockPingPongArgs args, const LaunchSize size) {
    Warp warp(size);
    initiate_ping_pong(warp, args);
}
TK_KERNEL answer_clock_ping_pong(const ClockPingPongArgs args, const LaunchSize size) {
    Warp warp(size);
    answer_ping_pong(warp, args);
}
