// Memory that this engine takes back: peers are told, and it is closed when none of them can write there any more, and
// no provider reads it. The worker's.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fabric/peers.hpp"
#include "fabric/transfer_queue.hpp"

namespace tracekern {

class Revocations {
public:
    // Called with "" when the memory is free, else with why it is not.
    using OnFree = std::function<void(const std::string&)>;

    Revocations(Peers& peers, const TransferQueue& transfers) : peers_(peers), transfers_(transfers) {}

    // Tells all who were told that they can use it. Once more, after a failure: those who have not confirmed.
    void start(const std::shared_ptr<MemoryRegion>& region, TimePoint until, OnFree on_free) {
        for (auto& [engine, peer] : peers_.all()) {
            if (peer.state == Peer::State::dead || !peer.told.contains(region->number)) continue;
            peers_.send(peer, MessageKind::revoke, region->number, 0, "");
        }
        all_.push_back({region, until, std::move(on_free)});
        look(std::chrono::steady_clock::now());
    }

    void look(TimePoint now) {
        std::erase_if(all_, [&](const Revocation& one) {
            const std::string held = who_holds(*one.region);
            if (!held.empty() && now <= one.until) return false;
            if (held.empty()) {
                for (auto& way : one.region->ways) Domain::close_memory(way);
            }
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
    };

    std::string who_holds(const MemoryRegion& region) {
        if (transfers_.is_reading(region) || peers_.holds_one_from(region)) return "writes from there have not ended";
        for (auto& [engine, peer] : peers_.all()) {
            if (peer.is_gone) peer.told.erase(region.number);
            if (!peer.told.contains(region.number)) continue;
            peer.is_suspect = true;  // its death would be an answer, too
            return peer.name + " may still write there: it has not confirmed";
        }
        return "";
    }

    Peers& peers_;
    const TransferQueue& transfers_;
    std::vector<Revocation> all_;
};

}  // namespace tracekern
