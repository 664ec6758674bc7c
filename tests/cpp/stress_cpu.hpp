// What the attacking programs share on the CPU backend: heaps of ranks in one process, and planted faults.
#pragma once

#include <sstream>

#include "comm/communicator_cpu.hpp"
#include "stress_common.hpp"

namespace tracekern {

#ifdef TK_PLANTED_FAULTS
inline void plant(PlantedFault fault) {
    planted_fault = fault;
}
#endif

// Options that the programs of this backend have besides:
//   abort_at=N  another rank gives up just before look N at an abort word, counted from 0 over all ranks
//   delays=off  none, in a program that has them
inline OptionSetters cpu_setters() {
    OptionSetters setters;
#ifdef TK_PLANTED_FAULTS
    setters["abort_at"] = [](const std::string& value) { looks_until_abort = std::stoll(value); };
#endif
#ifdef TK_RANDOM_DELAYS
    setters["delays"] = [](const std::string& value) { has_delays = value != "off"; };
#endif
    return setters;
}

// Of each rank the number of its host, where hosts have so many ranks each.
inline std::vector<uint32_t> hosts_of(uint32_t num_ranks, uint32_t ranks_per_host) {
    std::vector<uint32_t> host_of(num_ranks);
    for (uint32_t rank = 0; rank < num_ranks; ++rank) host_of[rank] = rank / ranks_per_host;
    return host_of;
}
// The same of "3+5": three ranks on one host, five on the next.
inline std::vector<uint32_t> parse_hosts(const std::string& text) {
    std::vector<uint32_t> host_of;
    std::stringstream sizes(text);
    uint32_t host = 0;
    for (std::string size; std::getline(sizes, size, '+'); ++host) {
        host_of.insert(host_of.end(), StressOptions::number(size), host);
    }
    return host_of;
}

// The symmetric heap of all ranks in one process.
struct StressHeaps {
    StressHeaps(uint32_t num_ranks, uint64_t bytes) : memory(num_ranks) {
        for (auto& heap : memory) {
            heap.resize(bytes / sizeof(HeapControl) + 1);
            addresses.push_back(reinterpret_cast<uint64_t>(heap.data()));
        }
    }
    // As a rank sees them that maps those of its own host alone: 0 for all others.
    std::vector<uint64_t> of_host(uint32_t rank, const std::vector<uint32_t>& host_of) const {
        std::vector<uint64_t> mapped = addresses;
        for (uint32_t peer = 0; peer < mapped.size(); ++peer) {
            if (host_of[peer] != host_of[rank]) mapped[peer] = 0;
        }
        return mapped;
    }

    std::vector<std::vector<HeapControl>> memory;
    std::vector<uint64_t> addresses;
    SimulatedClock clock = SimulatedClock::draw(0, 0, 0);
};

}  // namespace tracekern
