// One rank's end of a symmetric heap on a GPU: device memory that all ranks of the node map, and what launches there
// need.
#pragma once

#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "comm/clock_ping_pong.h"
#include "comm/fault.h"
#include "comm/heap.h"
#include "comm/kernel_table.hpp"
#include "comm/proxy_peer.h"
#include "platform/gpu_host.hpp"
#include "trace/trace_choice.h"

namespace tracekern {

// The launch argument for a kernel's Rec::Args, of the body that a launch asks for: the descriptor itself, what the
// recorder of whole launches gets, or any byte where those are empty.
class TraceArgument {
public:
    TraceArgument(TraceChoice trace, Extent extent) {
        if (!trace.is_traced()) return;
        where_ = const_cast<LaunchDescriptor*>(&trace.descriptor());
        if (extent == Extent::any) return;
        whole_ = WholeLaunch::of(trace.descriptor());
        where_ = &whole_;
    }
    TraceArgument(const TraceArgument&) = delete;
    void* data() { return where_; }

private:
    WholeLaunch whole_{};
    void* where_ = &whole_;
};

// A rank's part of the heap, as one process maps it.
using HeapPart = std::variant<ShareableMemory, IpcMemory>;

inline char* heap_start(const HeapPart& part) {
    return std::visit([](const auto& memory) { return static_cast<char*>(memory.data()); }, part);
}

class CudaCommunicator {
public:
    // Allocates this rank's part on the current device; import_peer() or open_peer() for every other rank makes it
    // whole: by file descriptors or, on all ranks where one's driver exports none, by handles of CUDA IPC. Resident
    // ranks, which share this process and its GPU, need neither: attach_peer().
    CudaCommunicator(uint32_t rank, uint32_t num_ranks, uint64_t heap_bytes, uint64_t timeout_ns, bool by_descriptor)
        : heap_bytes_(heap_bytes),
          args_(args_of_rank(rank, num_ranks)),
          own_(std::make_shared<const HeapPart>(by_descriptor ? HeapPart(ShareableMemory::allocate(heap_bytes))
                                                              : HeapPart(IpcMemory::allocate(heap_bytes)))),
          fault_(sizeof(FaultRecord)) {
        args_.timeout_ticks = timeout_ns;  // %globaltimer counts ns
        args_.fault = fault_.as<FaultRecord>();
        args_.on_timeout = OnTimeout::raise;
        args_.heap[rank] = heap_start(*own_);
        clear_control();
    }

    int export_heap() const { return std::get<ShareableMemory>(*own_).export_descriptor(); }
    std::string heap_handle() const { return std::get<IpcMemory>(*own_).handle(); }
    void import_peer(uint32_t peer, int descriptor) {
        add_peer(peer, std::make_shared<const HeapPart>(ShareableMemory::import(descriptor, heap_bytes_)));
    }
    void open_peer(uint32_t peer, const std::string& handle) {
        add_peer(peer, std::make_shared<const HeapPart>(IpcMemory::open(handle)));
    }

    // Keeps the peer's part as long as this: kernels of this rank may write to it when the peer is gone. Not is_mapped:
    // it only shares the GPU, and a proxy reaches it.
    void attach_peer(const CudaCommunicator& peer, bool is_mapped = true) {
        if (is_mapped) add_peer(peer.args_.rank, peer.own_);
        ++num_residents_;
    }
    // Ranks that are not mapped are reached by a proxy: see FarArgs. ring: in memory of this GPU. Before any kernel.
    void reach_by(CommandRing* ring, char* far_heap) {
        ring_ = ring;
        far_heap_ = far_heap;
    }
    // Ranks whose kernels have to find room on this GPU beside each other, this one included.
    uint32_t num_residents() const { return num_residents_; }

    const CommArgs& args() const { return args_; }
    const FaultRecord& fault() const { return *args_.fault; }
    bool failed() const { return __atomic_load_n(&args_.fault->cause, __ATOMIC_ACQUIRE) != 0; }
    void set_timeout(uint64_t timeout_ns, OnTimeout on_timeout) {
        args_.timeout_ticks = timeout_ns;
        args_.on_timeout = on_timeout;
    }
    // Where faults are written from now on, the one there is included: host memory that outlives the process and that
    // the device reaches at the same address. nullptr: here.
    void keep_fault_at(FaultRecord* place) {
        if (!place) place = fault_.as<FaultRecord>();
        if (place != args_.fault) *place = *args_.fault;
        args_.fault = place;
    }

    // Collective, with all devices idle; all wait for all afterwards.
    void clear_control() {
        HeapControl control;
        lower_words(control);
        copy_to_device(args_.heap[args_.rank], &control, sizeof(control));
        memset(args_.fault, 0, sizeof(FaultRecord));
        args_.fault->version = kFaultVersion;
        barrier_epoch_ = kFirstEpoch;
    }

    void barrier(TraceChoice trace, uint64_t stream) {
        uint64_t epoch = std::exchange(barrier_epoch_, next_epoch(barrier_epoch_));
        LaunchSize size{1, 1};
        const void* kernel = rank_barrier_kernel(ring_ != nullptr, trace.is_traced(), trace.format());
        FarArgs args{args_, ring_, far_heap_};  // begins with what kernels get that map all ranks
        TraceArgument argument(trace, Extent::any);
        launch_kernel(kernel, {1, kLanes, 0, stream}, {&args, &epoch, &size, argument.data()});
    }
    // As records keep it.
    uint32_t barrier_epoch() const { return epoch_on_record(barrier_epoch_); }

private:
    void add_peer(uint32_t peer, std::shared_ptr<const HeapPart> part) {
        args_of_rank(peer, args_.num_ranks);
        args_.heap[peer] = heap_start(*part);
        peers_.push_back(std::move(part));
    }

    const uint64_t heap_bytes_;
    CommArgs args_;
    const std::shared_ptr<const HeapPart> own_;
    std::vector<std::shared_ptr<const HeapPart>> peers_;
    uint32_t num_residents_ = 1;
    MappedMemory fault_;
    uint64_t barrier_epoch_ = kFirstEpoch;
    CommandRing* ring_ = nullptr;
    char* far_heap_ = nullptr;
};

}  // namespace tracekern
