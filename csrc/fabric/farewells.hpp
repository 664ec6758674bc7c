// The last bytes of peers that have ended. What a process gave to a socket still comes after its death, and tcp takes
// the rest of a write into memory that was closed meanwhile: it looks memory up once, where the write begins. It has no
// call that closes a connection. But there is one at most to a peer, for both directions, and nothing can be posted
// where there is none: so this engine posts writes of no bytes until that is refused. The host of a peer that has ended
// answers them by breaking the connection. The worker's.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "fabric/domain.hpp"
#include "fabric/peer.hpp"

namespace tracekern {

class Farewells {
public:
    explicit Farewells(const std::vector<std::unique_ptr<Domain>>& domains) : domains_(domains) {}

    // Whether a connection to this peer is still there. False once: what comes now is a new write. Asked again and
    // again.
    bool is_connected(const Peer& peer) {
        bool is_so = false;
        for (size_t domain = 0; domain < peer.at.size(); ++domain) is_so |= is_connected(peer, domain);
        return is_so;
    }

    bool owns(const Operation* operation) const { return operation->owner == this; }
    // Takes one that has ended. That does not say much: it also fails where bytes are still to be read.
    void take(const Operation* operation) {
        std::erase_if(under_way_, [&](const auto& one) { return &one.second == operation; });
    }

private:
    static constexpr uint64_t kNoKey = ~uint64_t{0};  // of any memory

    bool is_connected(const Peer& peer, size_t domain) {
        Domain& through = *domains_[domain];
        if (through.net().provider != "tcp") return false;  // others take nothing into memory that is closed
        const auto [found, is_new] = under_way_.try_emplace({peer.at[domain], domain});
        if (!is_new) return true;
        Operation& farewell = found->second;
        farewell.owner = this;
        Write nothing{};
        nothing.peer = peer.at[domain];
        nothing.num_pieces = 1;
        nothing.dst[0].key = kNoKey;
        if (through.post_write(nothing, &farewell) == 0) return true;
        under_way_.erase(found);
        return false;
    }

    const std::vector<std::unique_ptr<Domain>>& domains_;
    std::map<std::pair<fi_addr_t, size_t>, Operation> under_way_;  // by address and domain
};

}  // namespace tracekern
