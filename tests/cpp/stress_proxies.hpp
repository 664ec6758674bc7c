// Ranks that a network lies between, in one process: each has a proxy.
#pragma once

#include "comm/heap.h"
#include "fabric/rank_proxy.hpp"
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

    std::unique_ptr<RankProxy> open(std::shared_ptr<const FabricLibrary> fabric,
                                    const CommArgs& comm,
                                    uint64_t far_bytes) const {
        const Net net{provider, provider == "tcp" ? "127.0.0.1" : "", "", 0};
        return std::make_unique<RankProxy>(
            std::move(fabric), net, comm, RankProxyOptions{far_bytes, num_commands, window});
    }
};

// Every proxy meets those of other hosts.
inline void meet_all(std::vector<std::unique_ptr<RankProxy>>& proxies, const std::vector<uint32_t>& host_of) {
    for (uint32_t rank = 0; rank < proxies.size(); ++rank) {
        for (uint32_t peer = 0; peer < proxies.size(); ++peer) {
            if (host_of[rank] != host_of[peer]) proxies[rank]->proxy().meet(peer, proxies[peer]->proxy().address());
        }
    }
}

}  // namespace tracekern
