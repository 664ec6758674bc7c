// Which rank this process is, as its launcher tells, and memory that the ranks of one host share.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

constexpr int kMostRanks = 64;  // that a heap has room for

struct Place {
    uint32_t rank, num_ranks;
};

// A program with MPI would ask MPI_Comm_rank() and MPI_Comm_size(). The order is that of tracekern.
inline Place find_place() {
    constexpr const char* kNames[][2] = {{"RANK", "WORLD_SIZE"},
                                         {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                         {"PMI_RANK", "PMI_SIZE"},
                                         {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}};
    for (const auto& [rank, num_ranks] : kNames) {
        if (!std::getenv(rank) || !std::getenv(num_ranks)) continue;
        const int own = std::atoi(std::getenv(rank)), all = std::atoi(std::getenv(num_ranks));
        if (own < 0 || own >= all || all > kMostRanks) {
            throw std::runtime_error(std::string(rank) + "=" + std::getenv(rank) + " " + num_ranks + "=" +
                                     std::getenv(num_ranks) + ": wanted a rank below a number of at most 64");
        }
        return {static_cast<uint32_t>(own), static_cast<uint32_t>(all)};
    }
    throw std::runtime_error("no launcher says which rank this is; set RANK and WORLD_SIZE, as start.sh does");
}

// POSIX shared memory of all ranks: a barrier, and for each rank a text and a heap.
class Board {
public:
    Board(const std::string& run, Place place, size_t heap_bytes)
        : name_("/ring-" + run), place_(place), heap_bytes_(heap_bytes) {
        const size_t size = kHeadBytes + place.num_ranks * heap_bytes;
        const int file = shm_open(name_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (file < 0 || posix_fallocate(file, 0, static_cast<off_t>(size)) != 0) {
            throw std::runtime_error(name_ + ": no room for it in /dev/shm, or of another user");
        }
        memory_ = static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
        close(file);
        if (memory_ == MAP_FAILED) throw std::runtime_error(name_ + ": cannot be mapped");
        try {
            barrier();
        } catch (...) {
            shm_unlink(name_.c_str());
            throw;
        }
        if (place.rank == 0) shm_unlink(name_.c_str());  // all have it: nothing is left, whatever happens
    }

    void barrier() {
        using namespace std::chrono;
        auto& arrived = *reinterpret_cast<std::atomic<uint64_t>*>(memory_);
        const uint64_t wanted = (arrived++ / place_.num_ranks + 1) * place_.num_ranks;
        const auto give_up = steady_clock::now() + seconds(60);
        while (arrived < wanted) {
            if (steady_clock::now() > give_up) throw std::runtime_error("60 s went by, and not all ranks have come");
            std::this_thread::sleep_for(microseconds(50));
        }
    }
    char* text(uint32_t rank) const { return memory_ + kTextBytes * (rank + 1); }
    char* heap(uint32_t rank) const { return memory_ + kHeadBytes + rank * heap_bytes_; }

    static constexpr size_t kTextBytes = 128, kHeadBytes = kTextBytes * 96;  // whole pages

private:
    const std::string name_;
    const Place place_;
    const size_t heap_bytes_;
    char* memory_ = nullptr;
};
