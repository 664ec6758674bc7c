// One rank's end of a symmetric heap on the CPU backend: its clock, its time limit, its fault record, and how to
// launch.
#pragma once

#include <cstring>
#include <exception>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "comm/barrier.h"
#include "comm/heap.h"
#include "comm/proxy_peer.h"
#include "comm/signal.h"
#include "platform/cpu_executor.hpp"
#include "trace/trace_choice.h"

namespace tracekern {

class CpuCommunicator {
public:
    // heaps: where each rank's part is mapped here; part `rank` is this rank's own.
    CpuCommunicator(uint32_t rank, const std::vector<uint64_t>& heaps, uint64_t timeout_ns, const SimulatedClock& clock)
        : args_(args_of_rank(rank, heaps.size())), clock_(clock) {
        args_.fault = &fault_;
        set_timeout(timeout_ns, OnTimeout::raise);
        for (size_t peer = 0; peer < heaps.size(); ++peer) args_.heap[peer] = reinterpret_cast<char*>(heaps[peer]);
        clear_control();
    }
    CpuCommunicator(const CpuCommunicator&) = delete;

    const CommArgs& args() const { return args_; }
    const SimulatedClock& clock() const { return clock_; }
    const FaultRecord& fault() const { return *args_.fault; }
    bool failed() const { return load_acquire_system(&args_.fault->cause) != 0; }

    // For the launches to come. The simulated clock counts ns.
    void set_timeout(uint64_t timeout_ns, OnTimeout on_timeout) {
        args_.timeout_ticks = timeout_ns;
        args_.on_timeout = on_timeout;
    }
    // For the launches to come: what this rank stores at ranks of other nodes leaves it at gb_per_s; 0: as fast as
    // memory takes it. Ranks are split into nodes in their order. heap_bytes: of each rank.
    void set_slow_link(double gb_per_s, uint32_t ranks_per_node, uint64_t heap_bytes) {
        link_.reset();
        if (gb_per_s == 0) return;
        std::vector<uint64_t> heaps;
        for (uint32_t peer = 0; peer < args_.num_ranks; ++peer) {
            const bool is_far = peer / ranks_per_node != args_.rank / ranks_per_node;
            if (is_far) heaps.push_back(reinterpret_cast<uint64_t>(args_.heap[peer]));
        }
        link_.emplace(std::move(heaps), heap_bytes, gb_per_s);
    }
    // Where faults are written from now on, the one there is included: memory that outlives the process. nullptr: here.
    void keep_fault_at(FaultRecord* place) {
        if (!place) place = &fault_;
        if (place != args_.fault) *place = *args_.fault;
        args_.fault = place;
    }

    // Forgets a fault and sets this rank's flags back. Collective: no rank may be in a kernel, and all wait for all
    // afterwards.
    void clear_control() {
        lower_words(args_.control(args_.rank));
        memset(args_.fault, 0, sizeof(FaultRecord));
        args_.fault->version = kFaultVersion;
        barrier_epoch_ = kFirstEpoch;
    }

    // Ranks whose heap is not mapped are reached by a proxy: see FarArgs. Before any kernel.
    void reach_by(CommandRing* ring, char* far_heap) {
        ring_ = ring;
        far_heap_ = far_heap;
    }
    // Calls use(comm) with what kernels get, which reach all ranks.
    template <class Use>
    void with_comm(Use use) const {
        if (ring_) {
            use(FarArgs{args_, ring_, far_heap_});
        } else {
            use(args_);
        }
    }

    void launch(CpuLaunch launch, const CpuKernel& kernel) const {
        if (trapped_) throw DeviceTrapped();
        launch.clock = &clock_;
        launch.link = link_ ? &*link_ : nullptr;
        std::exception_ptr interruption;
        if (find_interruption_) {
            launch.while_waiting = [&] {
                if (!interruption) interruption = find_interruption_();
                if (interruption) give_up();
            };
        }
        try {
            launch_cpu(launch, kernel);
        } catch (const DeviceTrapped&) {
            trapped_ = true;
            throw;
        }
        if (interruption) std::rethrow_exception(interruption);
    }
    // What a launch asks now and then while its warps wait: returns the exception that ends it, such as for Ctrl-C.
    void on_wait(std::function<std::exception_ptr()> find_interruption) {
        find_interruption_ = std::move(find_interruption);
    }
    // Like a device after a trap: nothing more can be launched.
    bool trapped() const { return trapped_; }

    // All ranks arrive before any returns; one traced kernel of one warp.
    void barrier(TraceChoice trace) {
        const uint64_t epoch = std::exchange(barrier_epoch_, next_epoch(barrier_epoch_));
        with_recorder(trace, [&]<class Rec>(typename Rec::Args trace_args) {
            with_comm([&]<class Comm>(const Comm& comm) {
                launch(CpuLaunch{}, [&](Warp& warp) {
                    CommContext<Rec, Comm> context(warp, comm, trace_args, kRankBarrierStage, 0, epoch);
                    rank_barrier(context);
                });
            });
        });
    }
    // As records keep it.
    uint32_t barrier_epoch() const { return epoch_on_record(barrier_epoch_); }

private:
    // All waits end, on all ranks: what this rank waits for may come before it looks, and nobody would tell its peers.
    void give_up() const {
        const uint64_t self = (args_.rank + 1) | kInterrupted;
        with_comm([&](const auto& comm) {
            for (uint32_t rank = 0; rank < args_.num_ranks; ++rank) {
                with_peer(comm, rank, [&](const auto& to) { tell_abort(to, self); });
            }
        });
    }

    CommArgs args_;
    FaultRecord fault_{};
    SimulatedClock clock_;
    mutable std::optional<SlowLink> link_;
    mutable bool trapped_ = false;
    uint64_t barrier_epoch_ = kFirstEpoch;
    std::function<std::exception_ptr()> find_interruption_;
    CommandRing* ring_ = nullptr;
    char* far_heap_ = nullptr;
};

}  // namespace tracekern
