// Memory that this engine takes back: peers are told, and it is closed when none of them can write there any more, and
// no provider reads it. The worker's.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fabric/farewells.hpp"
#include "fabric/peers.hpp"
#include "fabric/transfer_queue.hpp"

namespace tracekern {

class Revocations {
public:
    // Called with "" when the memory is free, else with why it is not.
    using OnFree = std::function<void(const std::string&)>;

    Revocations(Peers& peers, const TransferQueue& transfers, Farewells& farewells)
        : peers_(peers), transfers_(transfers), farewells_(farewells) {}

    // Tells all who were told that they can use it, also those that were given up: they may be silent only. Once more,
    // after a failure: those who have not confirmed.
    void start(const std::shared_ptr<MemoryRegion>& region, TimePoint until, OnFree on_free) {
        for (auto& [engine, peer] : peers_.all()) {
            if (peer.state >= Peer::State::leaving || !peer.told.contains(region->number)) continue;
            peers_.send(peer, MessageKind::revoke, region->number, 0, "");
        }
        all_.push_back({region, until, std::move(on_free)});
        look(std::chrono::steady_clock::now());
    }

    void look(TimePoint now) {
        std::erase_if(all_, [&](Revocation& one) {
            std::string held = who_writes_or_reads(*one.region);
            if (held.empty()) held = who_has_left_bytes(one);
            if (!held.empty() && now <= one.until) return false;
            one.on_free(held);
            return true;
        });
    }

    void fail_all(const std::string& why) {
        for (const Revocation& one : std::exchange(all_, {})) one.on_free(why);
    }

private:
    struct Revocation {
        std::shared_ptr<MemoryRegion> region;
        TimePoint until;
        OnFree on_free;
        bool is_closed = false;
    };

    std::string who_writes_or_reads(const MemoryRegion& region) {
        if (transfers_.is_reading(region) || peers_.holds_one_from(region)) return "writes from there have not ended";
        for (auto& [engine, peer] : peers_.all()) {
            if (peer.state == Peer::State::gone || !peer.told.contains(region.number)) continue;
            peer.is_suspect = true;  // its death would be an answer, too
            return peer.name + " may still write there: it has not confirmed";
        }
        return "";
    }
    // Those that have ended without a confirmation. Closed memory takes no further write; of those that had begun some
    // providers take the rest, from what is there already when all domains are asked once more, tcp also later.
    std::string who_has_left_bytes(Revocation& one) {
        const bool was_closed = std::exchange(one.is_closed, true);
        if (!was_closed) {
            for (auto& way : one.region->ways) Domain::close_memory(way);
        }
        for (auto& [engine, peer] : peers_.all()) {
            if (!peer.told.contains(one.region->number)) continue;
            const bool is_connected = !peers_.is_replaced(peer) && farewells_.is_connected(peer);
            if (is_connected || !was_closed) {
                return peer.name + " has ended, but what it had sent may still arrive";
            }
            peer.told.erase(one.region->number);
        }
        return "";
    }

    Peers& peers_;
    const TransferQueue& transfers_;
    Farewells& farewells_;
    std::vector<Revocation> all_;
};

}  // namespace tracekern
