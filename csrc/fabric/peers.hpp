// The engines that this one has met: what is asked and told before the first write, and who is dead. The worker's.
#pragma once

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fabric/clock_stamps.hpp"
#include "fabric/mailbox.hpp"
#include "fabric/messages.hpp"
#include "fabric/peer.hpp"
#include "fabric/transfer_queue.hpp"

namespace tracekern {

struct PeerLimits {
    std::chrono::nanoseconds connect;  // to answer what it is asked
    std::chrono::nanoseconds silence;  // then it is dead
};

class Peers {
public:
    // What users of this engine are told.
    struct Hooks {
        // Why the memory that a descriptor names cannot be written to; "": it can.
        std::function<std::string(const MemoryRegionDescriptor&)> check;
        std::function<void(const Peer&)> met;
        std::function<void(const Peer&)> left;  // with or without a word
        std::function<void(const Peer&)> died;
        std::function<void(const std::string&)> warn;
    };

    Peers(const EngineName& engine,
          const std::vector<std::unique_ptr<Domain>>& domains,
          const std::vector<DomainAddress>& addresses,
          PeerLimits limits,
          Mailbox& mailbox,
          TransferQueue& transfers,
          WorkerTrace& trace,
          Hooks hooks)
        : engine_(engine.number),
          secret_(engine.secret),
          domains_(domains),
          addresses_(addresses),
          limits_(limits),
          mailbox_(mailbox),
          transfers_(transfers),
          trace_(trace),
          hooks_(std::move(hooks)),
          num_imms_(domains.size()),
          number_at_(domains.size()),
          engine_at_(domains.size()) {}

    std::map<uint64_t, Peer>& all() { return peers_; }

    // Starts a transfer once all its peers say that the memory can be used.
    void start(const std::shared_ptr<Transfer>& transfer) {
        if (transfer->targets->looked_up != num_changes_) {
            const auto [why, asked] = look_up(*transfer->targets);
            if (!why.empty()) return refuse(transfer, why);
            if (asked) return asked->waiting.push_back(transfer);
        }
        transfers_.start(transfer);
    }
    // Asks for what it has not asked for. Returns why some of it cannot be used, or something that was not answered
    // yet.
    std::pair<std::string, RemoteRegion*> look_up(Targets& targets) {
        RemoteRegion* asked = nullptr;
        std::vector<Peer*> peers;
        std::vector<Targets::Way> ways;
        for (const auto& memory : targets.memory) {
            Peer& peer = meet(memory);
            if (peer.is_dead()) return {peer.why, nullptr};
            const auto [found, is_new] = peer.regions.try_emplace(memory.region);
            RemoteRegion& region = found->second;
            if (is_new) {
                region.descriptor = memory;
                ask(peer, region);
            } else if (!(region.descriptor == memory)) {
                return {"the descriptor is not the one that " + peer.name + " gave out", nullptr};
            }
            if (region.state == RemoteRegion::State::revoked) return {peer.name + ": " + kUnregistered, nullptr};
            if (region.state == RemoteRegion::State::asked) asked = &region;
            peers.push_back(&peer);
            for (size_t i = 0; i < peer.at.size(); ++i)
                ways.push_back({peer.at[i], memory.ways[i].base, memory.ways[i].key});
        }
        if (asked) return {"", asked};
        targets.peers = std::move(peers);
        targets.ways = std::move(ways);
        targets.looked_up = num_changes_;
        return {"", nullptr};
    }

    // A transfer from there waits for an answer of its peer.
    bool holds_one_from(const MemoryRegion& source) const {
        for (const auto& [engine, peer] : peers_) {
            for (const auto& [number, region] : peer.regions) {
                for (const auto& transfer : region.waiting) {
                    if (transfer->src.get() == &source) return true;
                }
            }
        }
        return false;
    }
    // Ends one that waits for an answer of its peer; false: there is none.
    bool cancel(uint64_t number) {
        for (auto& [engine, peer] : peers_) {
            for (auto& [key, region] : peer.regions) {
                for (auto& transfer : region.waiting) {
                    if (transfer->number != number) continue;
                    transfers_.end(*transfer, {Outcome::cancelled, "cancelled: nothing was posted"});
                    std::erase(region.waiting, std::shared_ptr<Transfer>(transfer));
                    return true;
                }
            }
        }
        return false;
    }

    // An immediate has come from an address. False: from nobody that this engine has met.
    bool count_imm(uint32_t domain, fi_addr_t source) {
        if (!domains_[domain]->tells_sources()) {
            is_count_known_ = false;
            return true;
        }
        if (number_at(domain, source) == kNobody) return false;
        auto& counts = num_imms_[domain];
        if (source >= counts.size()) counts.resize(source + 1);
        ++counts[source];
        return true;
    }

    void receive(const Message& message) {
        if (message.to != engine_ || message.secret != secret_) return answer_stranger(message);
        if (message.kind == MessageKind::hello) return welcome(message);
        const auto found = peers_.find(message.engine);
        if (found == peers_.end()) return;
        Peer& peer = found->second;
        peer.has_answered |= message.kind != MessageKind::gone;
        peer.is_heard = true;
        // Memory is asked for and given back also where one has given up the other, who may be silent only: writes of
        // both may still be under way.
        if (message.kind == MessageKind::revoke) return revoke(peer, message.region);
        if (message.kind == MessageKind::revoked) return void(peer.told.erase(message.region));
        if (peer.is_dead()) return answer_as_dead(peer, message);
        switch (message.kind) {
            case MessageKind::welcome:
                return make_usable(peer, message);
            case MessageKind::refusal:
                return refuse_region(peer, message);
            case MessageKind::ping:
                return send(peer, MessageKind::pong, 0, is_count_known_ ? num_counted(peer) : kUnknown, "");
            case MessageKind::pong:
                return compare_counts(peer, message.count);
            case MessageKind::ask_time:
                return send(peer, MessageKind::tell_time, 0, 0, ClockStamps::answer(message.text));
            case MessageKind::tell_time:
                return stamps_.take(peers_, peer, message.text);
            case MessageKind::bye:
                return let_go(peer);
            case MessageKind::gone:
                peer.is_replaced = true;
                return bury(peer, "it has ended, and another engine is at its address", Peer::State::gone);
            case MessageKind::given_up:
                return bury(peer, "it has given this engine up as dead", Peer::State::given_up);
            default:
                return;
        }
    }

    // Tells a recording that has begun who is who.
    void introduce_all() const {
        for (const auto& [engine, peer] : peers_) trace_.introduce(peer.number, engine);
    }
    // The engine at an address of a domain; 0 where it is not known.
    uint64_t engine_at(uint32_t domain, fi_addr_t address) const {
        const auto& engines = engine_at_[domain];
        return address < engines.size() ? engines[address] : 0;
    }
    // Of the peer there, on record; kNobody where it is not known.
    uint32_t number_at(uint32_t domain, fi_addr_t address) const {
        const auto& numbers = number_at_[domain];
        return address < numbers.size() ? numbers[address] : kNobody;
    }

    // Another engine is at an address of it.
    bool is_replaced(const Peer& peer) const {
        for (uint32_t domain = 0; domain < peer.at.size(); ++domain) {
            if (number_at(domain, peer.at[domain]) != peer.number) return true;
        }
        return peer.is_replaced;
    }

    // is_waited_for: somebody waits in vain for what a peer should raise.
    void look(TimePoint now, bool is_waited_for) {
        for (auto& [engine, peer] : peers_) {
            if (peer.state == Peer::State::leaving) see_off(peer, now);
            answer_revocations(peer);
            if (peer.state == Peer::State::given_up) look_for_death(peer, now);
            if (peer.is_dead()) continue;
            fail_late(peer, now);
            look_for_life(peer, now, is_waited_for);
        }
        stamps_.look(peers_, now);
    }

    // This engine ends. Peers are told, and go on until they have said the same: where two engines share a process, a
    // provider may still use the memory of one that has closed.
    void say_goodbye() {
        for (auto& [engine, peer] : peers_) {
            for (auto& [key, region] : peer.regions) fail_waiting(region, "the engine was stopped");
            if (!peer.is_dead() && !peer.is_told_goodbye) tell_goodbye(peer);
        }
    }
    // All have said goodbye, or are dead, or have not answered in time.
    bool are_gone() const {
        return std::all_of(peers_.begin(), peers_.end(), [&](const auto& one) {
            const Peer& peer = one.second;
            const bool is_nobody = peer.state == Peer::State::connecting && peer.regions.empty();
            return is_nobody || (peer.is_dead() && peer.state != Peer::State::leaving);
        });
    }
    void fail_all(const std::string& why) {
        for (auto& [engine, peer] : peers_) {
            for (auto& [key, region] : peer.regions) fail_waiting(region, why);
        }
    }

    void send(Peer& peer, MessageKind kind, uint64_t region, uint64_t count, const std::string& text) {
        Message message{kind, engine_, peer.engine, peer.secret, 0, region, count};
        message.text = text;
        send(peer, message);
    }

private:
    static constexpr uint32_t kMaxStrangers = 64;  // that are answered: a provider has room for few addresses
    static constexpr uint32_t kPings = 4;          // within the limit
    static constexpr uint32_t kNobody = ~0u;
    static constexpr uint64_t kUnknown = ~uint64_t{0};  // and never less than was confirmed
    static constexpr char kUnregistered[] = "the memory was unregistered";

    void send(Peer& peer, const Message& message) {
        if (peer.at.empty()) return;
        mailbox_.send(peer.at[0], message, [&peer](const std::string& error) { peer.is_suspect |= !error.empty(); });
    }
    void refuse(const std::shared_ptr<Transfer>& transfer, const std::string& why) {
        transfers_.end(*transfer, {Outcome::failed, why});
    }
    void fail_waiting(RemoteRegion& region, const std::string& why) {
        for (const auto& transfer : std::exchange(region.waiting, {})) refuse(transfer, why);
    }

    // ---- meeting ----

    // The engine that a descriptor is of. A damaged one may have had it sought somewhere else, in vain.
    Peer& meet(const MemoryRegionDescriptor& descriptor) {
        std::vector<DomainAddress> addresses;
        for (const auto& way : descriptor.ways) addresses.push_back(way.address);
        const auto [found, is_new] = peers_.try_emplace(descriptor.engine);
        Peer& peer = found->second;
        const bool is_sought = peer.has_answered || !peer.regions.empty() || peer.addresses == addresses;
        if (is_new || !is_sought) make_known(peer, {descriptor.engine, descriptor.secret}, addresses);
        return peer;
    }
    // One whose address a provider does not take is as good as dead.
    void make_known(Peer& peer, const EngineName& engine, const std::vector<DomainAddress>& addresses) {
        for (auto& [number, region] : peer.regions) fail_waiting(region, "the engine is at another address");
        peer = {};
        peer.addresses = addresses;
        try {
            introduce(peer, engine, addresses);
        } catch (const std::runtime_error& error) {
            peer.state = Peer::State::gone;
            peer.why = error.what();
            hooks_.warn(peer.why);
        }
    }
    void introduce(Peer& peer, const EngineName& engine, const std::vector<DomainAddress>& addresses) {
        std::vector<fi_addr_t> at;
        for (size_t i = 0; i < addresses.size(); ++i) at.push_back(domains_.at(i)->insert(addresses[i]));
        peer.at = std::move(at);
        peer.engine = engine.number;
        peer.secret = engine.secret;
        peer.number = ++num_introduced_;
        trace_.introduce(peer.number, engine.number);
        for (size_t i = 0; i < peer.at.size(); ++i) {
            auto& numbers = number_at_[i];
            if (numbers.size() <= peer.at[i]) numbers.resize(peer.at[i] + 1, kNobody);
            numbers[peer.at[i]] = peer.number;
            auto& engines = engine_at_[i];
            engines.resize(numbers.size());
            engines[peer.at[i]] = peer.engine;
        }
        peer.first_imm.assign(peer.at.size(), 0);
        peer.first_imm = counts_of(peer);
        peer.liveness = Liveness(*domains_[0], addresses[0]);
        char number[2 * sizeof(peer.engine) + 1];
        std::snprintf(number, sizeof(number), "%016" PRIx64, peer.engine);
        peer.name = std::string("engine ") + number + " at " + domains_[0]->name_of(addresses[0]);
        peer.next_ping = std::chrono::steady_clock::now() + limits_.silence / kPings;
        hooks_.met(peer);
    }
    void ask(Peer& peer, RemoteRegion& region) {
        region.state = RemoteRegion::State::asked;
        region.until = std::chrono::steady_clock::now() + limits_.connect;
        region.question = ++num_questions_;
        const auto& descriptor = region.descriptor;
        Message hello{MessageKind::hello, engine_, peer.engine, descriptor.secret, secret_, descriptor.region};
        hello.count = region.question;
        hello.addresses = addresses_;
        hello.text = pack(descriptor);
        mailbox_.send(peer.at[0], hello, [&peer, number = descriptor.region](const std::string& error) {
            const auto asked = peer.regions.find(number);
            if (error.empty() || asked == peer.regions.end()) return;
            peer.is_suspect = true;
            asked->second.why = error;
            asked->second.until = {};
        });
    }

    // Both sides must know each other's addresses before the first write.
    void welcome(const Message& hello) {
        const size_t theirs = hello.addresses.size();
        if (theirs == 0) return;
        if (theirs != domains_.size()) {
            const std::string why = "the peer has " + std::to_string(domains_.size()) + " domains, this engine " +
                                    std::to_string(theirs) + "; wanted as many on each side";
            return answer(hello, MessageKind::refusal, engine_, why);
        }
        Peer& peer = peers_[hello.engine];
        if (!peer.has_answered && peer.addresses != hello.addresses) {
            make_known(peer, {hello.engine, hello.own_secret}, hello.addresses);
        }
        peer.has_answered = true;
        peer.secret = hello.own_secret;
        if (peer.is_dead()) return answer_as_dead(peer, hello);
        peer.state = Peer::State::ready;
        peer.is_heard = true;
        const std::string why = hooks_.check(unpack_descriptor(hello.text));
        if (why.empty()) peer.told.insert(hello.region);
        send(peer, why.empty() ? MessageKind::welcome : MessageKind::refusal, hello.region, hello.count, why);
    }
    // As the engine that the message was for, to an engine that is no peer.
    void answer(const Message& to, MessageKind kind, uint64_t as, const std::string& text) {
        const fi_addr_t at = domains_[0]->insert(to.addresses.at(0));
        Message message{kind, as, to.engine, to.own_secret, 0, to.region, to.count};
        message.text = text;
        mailbox_.send(at, message, [](const std::string&) {});
    }
    // Who was told another secret, or means an engine that was at this address before.
    void answer_stranger(const Message& message) {
        if (message.kind != MessageKind::hello) return;
        if (!domains_[0]->knows(message.addresses.at(0)) && num_strangers_++ >= kMaxStrangers) return;
        message.to == engine_ ? answer(message, MessageKind::refusal, engine_, kNotOurs)
                              : answer(message, MessageKind::gone, message.to, "");
    }

    // The region that an answer is about; nullptr: it comes too late.
    static RemoteRegion* find_asked(Peer& peer, const Message& answer) {
        const auto found = peer.regions.find(answer.region);
        if (found == peer.regions.end()) return nullptr;
        RemoteRegion& region = found->second;
        const bool is_asked = region.state == RemoteRegion::State::asked && region.question == answer.count;
        return is_asked ? &region : nullptr;
    }
    void make_usable(Peer& peer, const Message& welcome) {
        RemoteRegion* region = find_asked(peer, welcome);
        if (!region) return;
        peer.state = Peer::State::ready;
        peer.secret = region->descriptor.secret;  // another descriptor may have had a wrong one
        region->state = RemoteRegion::State::usable;
        for (const auto& transfer : std::exchange(region->waiting, {})) start(transfer);
    }
    // Nothing is kept of it: the next transfer asks again.
    void refuse_region(Peer& peer, const Message& refusal) {
        RemoteRegion* region = find_asked(peer, refusal);
        if (!region) return;
        fail_waiting(*region, peer.name + ": " + refusal.text);
        peer.regions.erase(refusal.region);
    }

    // ---- memory that its owner takes back ----

    void revoke(Peer& peer, uint64_t number) {
        ++num_changes_;
        RemoteRegion& region = peer.regions[number];
        region.state = RemoteRegion::State::revoked;
        fail_waiting(region, peer.name + ": " + kUnregistered);
        transfers_.fail_unposted(peer, number, kUnregistered);
        answer_revocations(peer);
    }
    // Once nothing is under way there.
    void answer_revocations(Peer& peer) {
        std::erase_if(peer.regions, [&](const auto& one) {
            const auto& [number, region] = one;
            if (region.state != RemoteRegion::State::revoked || transfers_.is_writing_to(peer, number)) return false;
            send(peer, MessageKind::revoked, number, 0, "");
            return true;
        });
    }

    // ---- life and death ----

    void fail_late(Peer& peer, TimePoint now) {
        for (auto& [number, region] : peer.regions) {
            if (region.state != RemoteRegion::State::asked) continue;
            const bool is_late = now > region.until;
            const std::string why = region.why.empty() ? "has not answered within the time limit" : region.why;
            for (auto& transfer : std::exchange(region.waiting, {})) {
                if (is_late || now > transfer->until) {
                    refuse(transfer, peer.name + " " + why + ": nothing was posted");
                } else {
                    region.waiting.push_back(std::move(transfer));
                }
            }
        }
        // The next transfer asks once more.
        std::erase_if(peer.regions, [&](const auto& region) {
            return region.second.state == RemoteRegion::State::asked && now > region.second.until;
        });
    }

    void look_for_life(Peer& peer, TimePoint now, bool is_waited_for) {
        const uint64_t num_imms = num_counted(peer);
        if (std::exchange(peer.is_heard, false) | (std::exchange(peer.num_seen_imms, num_imms) != num_imms)) {
            peer.num_unanswered = 0;
            peer.is_suspect = false;
        }
        const bool is_suspect = peer.is_suspect || is_waited_for || peer.state == Peer::State::connecting;
        if (peer.liveness.is_gone(is_suspect, now)) return bury(peer, "it has ended", Peer::State::gone);
        if (peer.state != Peer::State::ready || now < peer.next_ping) return;
        if (peer.num_unanswered == kPings - 1) {
            const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(limits_.silence).count();
            return bury(peer, "nothing was heard from it for " + std::to_string(limit) + " ms", Peer::State::given_up);
        }
        // A process that was stopped itself finds few pings unanswered, however long it was.
        ++peer.num_unanswered;
        peer.is_suspect = true;
        peer.next_ping = now + limits_.silence / kPings;
        peer.num_confirmed_at_ping = peer.num_confirmed_imms;
        send(peer, MessageKind::ping, 0, 0, "");
    }

    // One that was given up, and in whose hands memory is that its owner wants back, may have ended since.
    void look_for_death(Peer& peer, TimePoint now) {
        if (peer.told.empty()) return void(peer.liveness = {});
        const bool is_suspect = std::exchange(peer.is_suspect, false);
        if (peer.liveness.is_gone(is_suspect, now)) set_gone(peer);
    }
    void set_gone(Peer& peer) {
        peer.state = Peer::State::gone;
        peer.liveness = {};
    }
    void bury(Peer& peer, const std::string& what, Peer::State as) {
        set_dead(peer, what, as);
        if (as == Peer::State::gone) set_gone(peer);
        if (!peer.is_told_goodbye) hooks_.died(peer);
        transfers_.give_up_on(peer, what);
        mailbox_.give_up_on(peer.at[0], peer.engine, peer.why);
    }
    void set_dead(Peer& peer, const std::string& what, Peer::State as) {
        if (peer.is_dead()) return;
        ++num_changes_;
        peer.state = as;
        peer.why = peer.name + " is dead: " + what;
        hooks_.left(peer);
        for (auto& [number, region] : std::exchange(peer.regions, {})) fail_waiting(region, peer.why);
    }
    // It was stopped, and waits until nothing is under way to it.
    void let_go(Peer& peer) {
        const std::string what = "it was stopped";
        set_dead(peer, what, Peer::State::leaving);
        transfers_.fail_unposted_to(peer, what);
        see_off(peer, std::chrono::steady_clock::now());
    }
    void see_off(Peer& peer, TimePoint now) {
        if (peer.liveness.is_gone(peer.is_suspect, now)) return bury(peer, "it has ended", Peer::State::gone);
        if (peer.num_under_way != 0) return;
        if (!peer.is_told_goodbye) tell_goodbye(peer);
        set_gone(peer);
    }
    void tell_goodbye(Peer& peer) {
        peer.is_told_goodbye = true;
        send(peer, MessageKind::bye, 0, 0, "");
    }
    // It was only silent. What it asks for is not done, and it must know; or it ends, and sends nothing more.
    void answer_as_dead(Peer& peer, const Message& message) {
        switch (message.kind) {
            case MessageKind::bye:
                if (peer.state != Peer::State::leaving) set_gone(peer);
                if (!peer.is_told_goodbye) tell_goodbye(peer);
                return;
            case MessageKind::hello:
            case MessageKind::ping:
                if (!peer.is_told_goodbye) send(peer, MessageKind::given_up, message.region, 0, "");
                return;
            default:
                return;
        }
    }

    // ---- writes that were confirmed, and counted ----

    std::vector<uint64_t> counts_of(const Peer& peer) const {
        std::vector<uint64_t> counts;
        for (size_t i = 0; i < peer.at.size(); ++i) {
            const auto& in_domain = num_imms_[i];
            counts.push_back(peer.at[i] < in_domain.size() ? in_domain[peer.at[i]] - peer.first_imm[i] : 0);
        }
        return counts;
    }
    uint64_t num_counted(const Peer& peer) const {
        uint64_t sum = 0;
        for (const uint64_t count : counts_of(peer)) sum += count;
        return sum;
    }
    // Where nothing is under way, a confirmed write that the peer has not counted twice in a row has not arrived.
    void compare_counts(Peer& peer, uint64_t counted) {
        const uint64_t wanted = peer.num_confirmed_imms - peer.num_lost;
        const bool is_quiet = peer.num_under_way == 0 && peer.num_confirmed_imms == peer.num_confirmed_at_ping;
        const uint64_t missing = is_quiet && counted < wanted ? wanted - counted : 0;
        if (std::exchange(peer.num_missing, missing) == missing && missing != 0) {
            peer.num_lost += missing;
            peer.num_missing = 0;
            hooks_.warn(std::to_string(missing) + " writes were confirmed by " + peer.name +
                        " that it has not counted: they are lost");
        }
    }

    const uint64_t engine_, secret_;
    const std::vector<std::unique_ptr<Domain>>& domains_;
    const std::vector<DomainAddress>& addresses_;  // of this engine
    const PeerLimits limits_;
    Mailbox& mailbox_;
    TransferQueue& transfers_;
    WorkerTrace& trace_;
    ClockStamps stamps_{
        trace_, [this](Peer& peer, MessageKind kind, const std::string& text) { send(peer, kind, 0, 0, text); }};
    const Hooks hooks_;
    uint32_t num_introduced_ = 0;
    uint64_t num_questions_ = 0;
    uint32_t num_strangers_ = 0;
    std::map<uint64_t, Peer> peers_;                // by engine; none is ever taken out, transfers point to them
    bool is_count_known_ = true;                    // of each immediate, who sent it
    std::vector<std::vector<uint64_t>> num_imms_;   // of each domain, by the source's address
    std::vector<std::vector<uint32_t>> number_at_;  // the same
    std::vector<std::vector<uint64_t>> engine_at_;  // the same
    uint64_t num_changes_ = 1;                      // of memory that could be used
};

}  // namespace tracekern
