// A GPU for each rank: heaps are device memory that the ranks map by CUDA IPC, and records go to the segment, which the
// device writes through the bus.
#pragma once

#include <comm/clock_ping_pong.h>
#include <platform/host_clock.h>

#include <memory>
#include <numeric>
#include <platform/gpu_facts.hpp>
#include <vector>

#include "../ring/ring.h"
#include "ranks.h"
#include "tracekern_host.h"

__global__ void ping_pong(const ClockPingPongArgs<CommArgs> args, bool initiates) {
    Warp warp({1, 1});
    initiates ? initiate_ping_pong(warp, args) : answer_ping_pong(warp, args);
}
// `count` readings of the clock, each behind the one before.
__global__ void read_clocks(uint64_t* ticks, uint32_t count) {
    if (threadIdx.x != 0) return;
    for (uint32_t i = 0; i < count; ++i) {
        do ticks[i] = read_clock();
        while (i != 0 && ticks[i] == ticks[i - 1]);
    }
}

class Device {
public:
    Device(Board& board, Place place, size_t heap_bytes)
        : board_(board), place_(place), own_(allocate_heap(place, heap_bytes)), trips_(kMaxTrips * sizeof(RoundTrip)) {
        const std::string handle = own_.handle();
        memcpy(board.text(place.rank), handle.data(), handle.size());
        board.barrier();
        for (uint32_t peer = 0; peer < place.num_ranks; ++peer) {
            if (peer != place.rank) peers_.push_back(IpcMemory::open({board.text(peer), handle.size()}));
            comm.heap[peer] = static_cast<char*>(peer == place.rank ? own_.data() : peers_.back().data());
        }
        const DeviceFacts facts = device_facts();
        name_ = facts.name;
        uuid_ = device_uuid(current_device());
    }
    // The texts stay as long as the device.
    void describe(tk_host_options& options) {
        options.device = name_.c_str();
        options.clock_id = uuid_.c_str();
        const uint64_t* ticks = read(kMaxTrips);
        uint64_t step = 0;
        for (uint32_t i = 1; i < kMaxTrips; ++i) step = std::gcd(step, ticks[i] - ticks[i - 1]);
        options.clock_step = static_cast<uint32_t>(step);
    }
    void attach(tk_host* host) {
        uint64_t bytes = 0;
        arena_ = reinterpret_cast<uint64_t>(tk_host_memory(host, &bytes));
        if (register_host_memory(arena_, bytes) != arena_) {
            throw std::runtime_error("this GPU sees host memory at another address than the host");
        }
    }
    void detach() { unregister_host_memory(arena_); }

    // All ranks together, with their GPUs idle: one pair at a time.
    void sample_clocks(tk_host* host, uint32_t round) {
        for (int i = 0; i < 50; ++i) {
            const int64_t before = monotonic_ns(), ticks = static_cast<int64_t>(*read(1));
            tk_host_clock_sample(host, round, place_.rank, place_.rank, before, ticks, ticks, monotonic_ns());
        }
        for (uint32_t first = 0, epoch = 1; first < place_.num_ranks; ++first) {
            for (uint32_t second = first + 1; second < place_.num_ranks; ++second, ++epoch) {
                board_.barrier();
                if (place_.rank == first) exchange(host, round, second, true, epoch + (round << 16));
                if (place_.rank == second) exchange(host, round, first, false, epoch + (round << 16));
            }
        }
        board_.barrier();
    }
    void synchronize() const { synchronize_device(); }
    void write(uint64_t offset, const void* data, size_t bytes) {
        copy_to_device(static_cast<char*>(own_.data()) + offset, data, bytes);
    }
    // Memory that host and kernels use.
    uint32_t* allocate(size_t words) {
        buffers_.push_back(std::make_unique<MappedMemory>(words * sizeof(uint32_t)));
        return buffers_.back()->as<uint32_t>();
    }

    CommArgs comm{};

private:
    static constexpr uint32_t kMaxTrips = 1000;
    static constexpr uint64_t kPairNs = 20'000'000;

    static IpcMemory allocate_heap(Place place, size_t bytes) {
        if (static_cast<int>(place.num_ranks) > count_devices()) {
            throw std::runtime_error(std::to_string(place.num_ranks) + " ranks, " + std::to_string(count_devices()) +
                                     " GPUs; wanted one for each rank");
        }
        use_device(static_cast<int>(place.rank));
        return IpcMemory::allocate(bytes);
    }
    const uint64_t* read(uint32_t count) {
        read_clocks<<<1, 32>>>(trips_.as<uint64_t>(), count);
        synchronize();
        return trips_.as<uint64_t>();
    }
    void exchange(tk_host* host, uint32_t round, uint32_t peer, bool initiates, uint32_t epoch) {
        MappedMemory count(sizeof(uint32_t));
        ping_pong<<<1, 32>>>({comm, peer, epoch, kMaxTrips, kPairNs, trips_.as<RoundTrip>(), count.as<uint32_t>()},
                             initiates);
        synchronize();
        for (uint32_t i = 0; initiates && i < *count.as<uint32_t>(); ++i) {
            const RoundTrip& trip = trips_.as<RoundTrip>()[i];
            const auto answered = static_cast<int64_t>(trip.answered_ticks);
            const auto sent = static_cast<int64_t>(trip.sent_ticks), back = static_cast<int64_t>(trip.received_ticks);
            tk_host_clock_sample(host, round, place_.rank, peer, sent, answered, answered, back);
        }
    }

    Board& board_;
    const Place place_;
    const IpcMemory own_;
    const MappedMemory trips_;
    std::vector<IpcMemory> peers_;
    std::vector<std::unique_ptr<MappedMemory>> buffers_;
    std::string name_, uuid_;
    uint64_t arena_ = 0;
};
