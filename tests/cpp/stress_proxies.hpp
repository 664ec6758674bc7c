// Ranks that a network lies between, in one process: each has a proxy, which runs in a thread of its own.
#pragma once

#include <thread>

#include "comm/heap.h"
#include "fabric/proxy.hpp"
#include "stress_cpu.hpp"

namespace tracekern {

struct NetworkOptions {
    std::string library, provider;  // of libfabric; "in_process" is a library of the tests
    uint32_t num_commands = 64;     // that a ring has room for
    uint32_t window = 0;            // writes to a peer that are not applied yet; 0: what there is room for

    // library=PATH provider=NAME commands=N window=N
    void add_setters(OptionSetters& setters) {
        setters["library"] = [this](const std::string& value) { library = value; };
        setters["provider"] = [this](const std::string& value) { provider = value; };
        setters["commands"] = [this](const std::string& value) { num_commands = StressOptions::number(value); };
        setters["window"] = [this](const std::string& value) { window = StressOptions::number(value); };
    }
};

// What a rank has for its network: memory that the proxy registers, the ring of commands, and the proxy.
class RankNetwork {
public:
    RankNetwork(const NetworkOptions& options, uint64_t far_bytes)
        : options_(options), memory_(far_bytes / sizeof(HeapControl) + 1), commands_(options.num_commands) {}

    char* far_heap() { return reinterpret_cast<char*>(memory_.data()); }
    CommandRing& ring() { return ring_; }

    void open(const FabricLibrary& library, const CommArgs& comm, Inbox inbox = {}) {
        const Net net{options_.provider, options_.provider == "tcp" ? "127.0.0.1" : "", ""};
        const Proxy::Memory memory{far_heap(), memory_.size() * sizeof(HeapControl)};
        proxy_ = std::make_unique<Proxy>(library, net, comm, ring_, memory, std::move(inbox), options_.window);
    }
    void start() {
        thread_ = std::jthread([this](const std::stop_token& stop) {
            for (uint32_t spins = 0; !stop.stop_requested();) proxy_->turn() ? void(spins = 0) : relax_thread(spins);
        });
    }
    void close() { proxy_.reset(); }

    // Every proxy meets those of other hosts.
    static void meet_all(std::vector<std::unique_ptr<RankNetwork>>& ranks, const std::vector<uint32_t>& host_of) {
        for (uint32_t rank = 0; rank < ranks.size(); ++rank) {
            for (uint32_t peer = 0; peer < ranks.size(); ++peer) {
                if (host_of[rank] != host_of[peer]) ranks[rank]->proxy_->meet(peer, ranks[peer]->proxy_->address());
            }
        }
    }

private:
    const NetworkOptions& options_;
    std::vector<HeapControl> memory_;
    std::vector<Command> commands_;
    uint64_t num_claimed_ = 0, num_taken_ = 0, num_completed_[kNumTags] = {};
    CommandRing ring_{
        commands_.data(), static_cast<uint32_t>(commands_.size()), &num_claimed_, &num_taken_, num_completed_};
    std::unique_ptr<Proxy> proxy_;
    std::jthread thread_;  // ends first
};

}  // namespace tracekern
