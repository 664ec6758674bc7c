// The kernels of the communicator for GPUs. CUDA and HIP compile it.
#include "comm/barrier.h"
#include "comm/clock_ping_pong.h"
#include "comm/proxy_peer.h"

using namespace tracekern;  // NOLINT: entry points have C names

namespace {

template <class Rec, class Comm>
TK_DEVICE void run_rank_barrier(const Comm& comm, uint64_t epoch, LaunchSize size, typename Rec::Args trace) {
    Warp warp(size);
    CommContext<Rec, Comm> context(warp, comm, trace, kRankBarrierStage, 0, epoch);
    rank_barrier(context);
}

}  // namespace

#define TK_RANK_BARRIER(suffix, Rec)                                                                                  \
    TK_KERNEL rank_barrier_##suffix(TK_ARGUMENT CommArgs comm, uint64_t epoch, LaunchSize size, Rec::Args trace) {    \
        run_rank_barrier<Rec>(comm, epoch, size, trace);                                                              \
    }                                                                                                                 \
    TK_KERNEL far_rank_barrier_##suffix(TK_ARGUMENT FarArgs comm, uint64_t epoch, LaunchSize size, Rec::Args trace) { \
        run_rank_barrier<Rec>(comm, epoch, size, trace);                                                              \
    }

using RecorderOff = Recorder<false>;
using RecorderSpan = Recorder<true, RecordFormat::span>;
using RecorderRing = Recorder<true, RecordFormat::ring>;
using RecorderCycles = Recorder<true, RecordFormat::cycles>;

TK_RANK_BARRIER(off, RecorderOff)
TK_RANK_BARRIER(span, RecorderSpan)
TK_RANK_BARRIER(ring, RecorderRing)
TK_RANK_BARRIER(cycles, RecorderCycles)

TK_KERNEL initiate_clock_ping_pong(const ClockPingPongArgs<CommArgs> args, const LaunchSize size) {
    Warp warp(size);
    initiate_ping_pong(warp, args);
}
TK_KERNEL answer_clock_ping_pong(const ClockPingPongArgs<CommArgs> args, const LaunchSize size) {
    Warp warp(size);
    answer_ping_pong(warp, args);
}

// Answers the host, `count` times in all or until the limit. The host reads its own clock before it asks and after it
// sees the stamp. One lane: every other one would ask and stamp again, on the way that is measured.
TK_KERNEL answer_host_clock(HostClockMailbox* mailbox, uint32_t count, uint64_t timeout_ticks, const LaunchSize size) {
    Warp warp(size);
    warp.leader([&] {
        const uint64_t started = read_clock();
        for (uint64_t next = 1; next <= count; ++next) {
            uint64_t seen;
            while ((seen = load_acquire_system(&mailbox->request)) != next) {
                if (read_clock() - started > timeout_ticks) return;
            }
            store_release_system(&mailbox->stamp, read_clock_after(seen));
        }
    });
}

// Takes its time: the kernels behind it in its stream come so much later.
TK_KERNEL delay_stream(uint64_t ticks) {
    for (const uint64_t started = read_clock(); read_clock() - started < ticks;) {
    }
}

#ifdef TK_KERNEL_TABLE
    #include "comm/kernel_table.hpp"

const void* tracekern::rank_barrier_kernel(bool is_far, bool traced, RecordFormat format) {
    const auto choose = [is_far](auto* near, auto* far) {
        return is_far ? reinterpret_cast<const void*>(far) : reinterpret_cast<const void*>(near);
    };
    if (!traced) return choose(rank_barrier_off, far_rank_barrier_off);
    switch (format) {
        case RecordFormat::span:
            return choose(rank_barrier_span, far_rank_barrier_span);
        case RecordFormat::ring:
            return choose(rank_barrier_ring, far_rank_barrier_ring);
        case RecordFormat::cycles:
            return choose(rank_barrier_cycles, far_rank_barrier_cycles);
    }
    return nullptr;
}

const void* tracekern::ping_pong_kernel(bool initiates) {
    return initiates ? reinterpret_cast<const void*>(initiate_clock_ping_pong)
                     : reinterpret_cast<const void*>(answer_clock_ping_pong);
}

const void* tracekern::host_clock_kernel() {
    return reinterpret_cast<const void*>(answer_host_clock);
}

const void* tracekern::delay_kernel() {
    return reinterpret_cast<const void*>(delay_stream);
}

    #ifdef TK_PLANTED_FAULTS
        #include "platform/gpu_host.hpp"

void tracekern::plant_in_comm(PlantedFault fault) {
    set_variable(planted_fault, fault);
}
    #endif
#endif
