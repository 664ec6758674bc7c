// An engine that this one has met, and what is known of it. The worker's.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "fabric/liveness.hpp"
#include "fabric/transfer.hpp"

namespace tracekern {

constexpr char kNotOurs[] = "the descriptor is not the one that this engine gave out";

// Memory of a peer. Its owner is asked before the first write there, and tells when it must not be used any more.
struct RemoteRegion {
    enum class State { asked, usable, revoked };  // revoked: until nothing is under way there
    State state = State::asked;
    MemoryRegionDescriptor descriptor;  // that the owner was asked about
    TimePoint until;                    // asked: for an answer
    uint64_t question = 0;              // asked: its number; answers to earlier ones may still come
    std::string why;                    // asked: the question was not sent
    std::vector<std::shared_ptr<Transfer>> waiting;
};

struct Peer {
    enum class State {
        connecting,
        ready,
        // dead:
        given_up,  // it may be silent only, and go on later
        leaving,   // it was stopped, and waits for what is under way to it, and for a goodbye
        gone,      // for certain
    };
    uint64_t engine = 0;
    uint64_t secret = 0;
    uint32_t number = 0;  // on record
    State state = State::connecting;
    std::string name;  // for people
    std::vector<DomainAddress> addresses;
    std::vector<fi_addr_t> at;  // one a domain; none where a provider does not take its address
    bool has_answered = false;  // else nobody knows whether it is at its addresses
    std::string why;            // dead
    bool is_replaced = false;   // gone: another engine is at its address
    bool is_told_goodbye = false;
    std::map<uint64_t, RemoteRegion> regions;
    std::set<uint64_t> told;  // regions of this engine that it was told it can use

    // Signs of life: whatever comes from it.
    Liveness liveness;
    bool is_heard = false;    // since the last look
    bool is_suspect = false;  // something failed, or waits for it, since it was heard
    uint32_t num_unanswered = 0;
    TimePoint next_ping;

    uint32_t num_under_way = 0;       // writes to it
    uint64_t num_confirmed_imms = 0;  // that it should have counted
    uint64_t num_confirmed_at_ping = 0;
    uint64_t num_seen_imms = 0;       // that it has sent, at the last look
    std::vector<uint64_t> first_imm;  // in each domain, what its address had sent before this engine was there
    uint64_t num_missing = 0;         // of the confirmed: seen once
    uint64_t num_lost = 0;            // of the confirmed: reported

    bool is_dead() const { return state >= State::given_up; }
};

}  // namespace tracekern
