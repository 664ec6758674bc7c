// The engines that this one has met: where they are, whether they have answered, and what waits for that. The worker's.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fabric/domain.hpp"
#include "fabric/mailbox.hpp"
#include "fabric/messages.hpp"
#include "fabric/transfer.hpp"

namespace tracekern {

enum class PeerState { connecting, ready, refused };

struct Peer {
    uint32_t number = 0;  // counted in the order of meeting
    PeerState state = PeerState::connecting;
    std::vector<fi_addr_t> at;  // one a domain
    std::string why;            // refused
    std::chrono::steady_clock::time_point until;
    std::vector<std::shared_ptr<Transfer>> waiting;
};

class Peers {
public:
    // What becomes of a transfer that has waited.
    struct Hooks {
        std::function<void(const std::shared_ptr<Transfer>&)> start;
        std::function<void(const std::shared_ptr<Transfer>&, const std::string&)> fail;
    };

    Peers(uint64_t engine,
          const std::vector<std::unique_ptr<Domain>>& domains,
          const std::vector<DomainAddress>& addresses,
          std::chrono::nanoseconds connect_limit,
          Mailbox& mailbox,
          WorkerTrace& trace,
          Hooks hooks)
        : engine_(engine),
          domains_(domains),
          addresses_(addresses),
          connect_limit_(connect_limit),
          mailbox_(mailbox),
          trace_(trace),
          hooks_(std::move(hooks)),
          number_at_(domains.size()) {}

    // Starts a transfer once all its peers have answered.
    void start(const std::shared_ptr<Transfer>& transfer) {
        if (transfer->targets->looked_up != num_changes_) {
            if (Peer* peer = meet_all(*transfer->targets)) {
                if (peer->state == PeerState::refused) return hooks_.fail(transfer, peer->why);
                peer->waiting.push_back(transfer);
                return;
            }
        }
        hooks_.start(transfer);
    }
    // Tells hello to all engines that it has not met. Returns one that refuses, else one that has not answered yet;
    // nullptr: all are ready, and the ways to them are known.
    Peer* meet_all(Targets& targets) {
        Peer* found = nullptr;
        targets.ways.clear();
        for (const auto& memory : targets.memory) {
            Peer& peer = meet(memory);
            if (peer.state != PeerState::ready && (!found || found->state != PeerState::refused)) found = &peer;
            if (found) continue;
            for (size_t i = 0; i < peer.at.size(); ++i) {
                targets.ways.push_back({peer.at[i], peer.number, memory.ways[i].base, memory.ways[i].key});
            }
        }
        if (!found) targets.looked_up = num_changes_;
        return found;
    }

    void receive(const Message& message) {
        if (message.kind == MessageKind::hello) return welcome(message);
        const auto found = peers_.find(message.engine);
        if (found == peers_.end() || found->second.state != PeerState::connecting) return;
        if (message.kind == MessageKind::refusal) return refuse(found->second, message.text);
        make_ready(found->second);
    }

    void give_up_on_silent() {
        if (num_connecting_ == 0) return;
        const auto now = std::chrono::steady_clock::now();
        for (auto& [number, peer] : peers_) {
            if (peer.state == PeerState::connecting && !peer.waiting.empty() && now > peer.until) {
                refuse(peer, "the peer has not answered within the time limit");
            }
        }
    }
    // Tells a recording that has begun who is who.
    void introduce() const {
        for (const auto& [engine, peer] : peers_) trace_.introduce(peer.number, engine);
    }
    // Of the peer at an address of a domain; kNobody where it is not known.
    uint32_t number_at(uint32_t domain, fi_addr_t address) const {
        const auto& of_domain = number_at_[domain];
        return address < of_domain.size() ? of_domain[address] : kNobody;
    }

    void fail_waiting(const std::string& why) {
        for (auto& [number, peer] : peers_) {
            for (const auto& transfer : std::exchange(peer.waiting, {})) hooks_.fail(transfer, why);
        }
    }

private:
    static constexpr uint32_t kNobody = ~0u;

    Peer& add(uint64_t engine) {
        Peer& peer = peers_[engine];
        peer.number = static_cast<uint32_t>(peers_.size());
        trace_.introduce(peer.number, engine);
        return peer;
    }
    // The engine that a descriptor is of; the first time it is told hello.
    Peer& meet(const MemoryRegionDescriptor& descriptor) {
        const auto found = peers_.find(descriptor.engine);
        if (found != peers_.end()) return found->second;
        std::vector<DomainAddress> addresses;
        for (const auto& way : descriptor.ways) addresses.push_back(way.address);
        Peer& peer = add(descriptor.engine);
        try {
            place(peer, insert(addresses));
        } catch (const std::runtime_error& error) {
            peer.state = PeerState::refused;
            peer.why = error.what();
            return peer;
        }
        peer.until = std::chrono::steady_clock::now() + connect_limit_;
        mailbox_.send(peer.at[0], {MessageKind::hello, engine_, addresses_, ""}, {});
        return peer;
    }
    std::vector<fi_addr_t> insert(const std::vector<DomainAddress>& addresses) {
        std::vector<fi_addr_t> at;
        for (size_t i = 0; i < addresses.size(); ++i) at.push_back(domains_.at(i)->insert(addresses[i]));
        return at;
    }
    void place(Peer& peer, std::vector<fi_addr_t> at) {
        for (size_t i = 0; i < at.size(); ++i) {
            auto& numbers = number_at_[i];
            if (numbers.size() <= at[i]) numbers.resize(at[i] + 1, kNobody);
            numbers[at[i]] = peer.number;
        }
        peer.at = std::move(at);
        ++num_connecting_;
    }

    // Both sides must know each other's addresses before the first write.
    void welcome(const Message& hello) {
        const size_t theirs = hello.addresses.size();
        if (theirs == 0) return;
        const fi_addr_t to = domains_[0]->insert(hello.addresses[0]);
        if (theirs != domains_.size()) {
            const std::string why = "the peer has " + std::to_string(domains_.size()) + " domains, this engine " +
                                    std::to_string(theirs) + "; wanted as many on each side";
            return mailbox_.send(to, {MessageKind::refusal, engine_, {}, why}, {});
        }
        auto at = insert(hello.addresses);
        const auto found = peers_.find(hello.engine);
        Peer& peer = found == peers_.end() ? add(hello.engine) : found->second;  // it knows this engine's addresses
        if (peer.at.empty()) place(peer, std::move(at));
        if (peer.state == PeerState::connecting) {
            if (domains_[0]->takes_no_answer(hello.addresses[0])) {
                refuse(peer,
                       "shm: both engines are in this process, and the peer met this one first: libfabric takes "
                       "writes in one direction only; use tcp");
            } else {
                make_ready(peer);
            }
        }
        mailbox_.send(to, {MessageKind::welcome, engine_, addresses_, ""}, {});
    }

    void make_ready(Peer& peer) {
        --num_connecting_;
        peer.state = PeerState::ready;
        for (const auto& transfer : std::exchange(peer.waiting, {})) start(transfer);
    }
    void refuse(Peer& peer, const std::string& why) {
        --num_connecting_;
        peer.state = PeerState::refused;
        peer.why = why;
        for (const auto& transfer : std::exchange(peer.waiting, {})) hooks_.fail(transfer, why);
    }

    const uint64_t engine_;
    const std::vector<std::unique_ptr<Domain>>& domains_;
    const std::vector<DomainAddress>& addresses_;  // of this engine
    const std::chrono::nanoseconds connect_limit_;
    Mailbox& mailbox_;
    WorkerTrace& trace_;
    const Hooks hooks_;
    std::vector<std::vector<uint32_t>> number_at_;  // by domain and address
    std::map<uint64_t, Peer> peers_;                // by engine
    uint32_t num_connecting_ = 0;
    uint64_t num_changes_ = 1;  // of ways that may have been looked up
};

}  // namespace tracekern
