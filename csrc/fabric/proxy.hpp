// The thread of a rank's host that writes over a network for the rank's kernels, and receives for them.
//
// Its turns take commands (comm/command.h), post each as a write with an immediate, and store what immediates of peers
// tell where kernels wait. No turn waits: each peer has a queue, and the completion queue is asked each time.
//
// A proxy may have so many writes on their way to a peer, or not yet applied there, as the peer's completion queue has
// room for: half of it, shared by all its peers; the other half is for the peer's own writes, and for credits. A peer
// tells how many it has applied when they are kCreditsAtOnce, or when it has nothing else to do.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/proxy_side.hpp"
#include "fabric/domain.hpp"

namespace tracekern {

// What proxies tell each other before the first turn.
struct ProxyAddress {
    DomainAddress domain;
    uint64_t key, base;  // of its inbox
};

class Proxy {
public:
    static constexpr uint32_t kCreditsAtOnce = 64;

    // comm: of its rank. ring: of its kernels. window: writes to a peer that are not applied yet; 0: as many as there
    // is room for.
    Proxy(const FabricLibrary& library, const Net& net, const CommArgs& comm, CommandRing ring, uint32_t window = 0)
        : comm_(comm), ring_(ring), domain_(library, net, kSetupLimit), peers_(comm.num_ranks) {
        const uint32_t room = Domain::kNumCompletions / 2 / comm.num_ranks;
        window_ = window == 0 || window > room ? room : window;
        inbox_.resize(uint64_t{comm.num_ranks} * kNumControlWords);
        values_.resize(uint64_t{comm.num_ranks} * (window_ + 1));
        inbox_memory_ = domain_.register_memory(inbox_.data(), bytes_of(inbox_), FI_REMOTE_WRITE);
        values_memory_ = domain_.register_memory(values_.data(), bytes_of(values_), FI_WRITE);
        operations_ = std::make_unique<Operation[]>(values_.size());
        for (size_t i = 0; i < values_.size(); ++i) free_.push_back(&operations_[i]);
    }
    Proxy(const Proxy&) = delete;
    ~Proxy() {
        domain_.close_endpoint();
        Domain::close_memory(inbox_memory_);
        Domain::close_memory(values_memory_);
    }

    ProxyAddress address() const { return {domain_.address(), inbox_memory_.key, inbox_memory_.base}; }
    // Before the first turn of any.
    void meet(uint32_t rank, const ProxyAddress& address) {
        Peer& peer = peers_[rank];
        peer.at = domain_.insert(address.domain);
        peer.key = address.key;
        peer.base = address.base;
        peer.room = window_;
        peer.is_met = true;
        for (uint64_t& epoch : peer.latest) epoch = kNeverEpoch;
        ranks_[peer.at] = rank;
    }

    // Returns whether there was something to do.
    bool turn() {
        bool is_busy = poll();
        is_busy |= take_commands();
        if (!has_told_abort_ && has_fault(*comm_.fault)) tell_abort();
        for (uint32_t rank = 0; rank < peers_.size(); ++rank) is_busy |= post_to(rank);
        for (uint32_t rank = 0; rank < peers_.size(); ++rank) is_busy |= give_credit(rank, is_busy);
        return is_busy;
    }

private:
    static constexpr auto kSetupLimit = std::chrono::seconds(10);
    static constexpr uint32_t kMostCommandsATurn = 64;

    struct Peer {
        bool is_met = false;
        fi_addr_t at = FI_ADDR_UNSPEC;
        uint64_t key = 0, base = 0;
        std::deque<Command> queue;          // not posted yet
        uint32_t room = 0;                  // writes that may be posted
        uint32_t applied = 0;               // of its writes, of which it was not told
        uint64_t latest[kNumControlWords];  // epochs
    };

    template <class T>
    static uint64_t bytes_of(const std::vector<T>& values) {
        return values.size() * sizeof(T);
    }

    // ---- what kernels ask for ----

    bool take_commands() {
        Command command;
        uint32_t count = 0;
        while (count < kMostCommandsATurn && take_command(ring_, num_taken_, command)) {
            ++num_taken_;
            ++count;
            peers_.at(command.peer).queue.push_back(command);
        }
        return count != 0;
    }
    // All peers give up with this rank: see raise_fault().
    void tell_abort() {
        has_told_abort_ = true;
        const uint64_t aborted_by = comm_.fault->aborted_by | uint64_t{comm_.fault->refusal} << 32;
        for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
            const Command command = word_command(comm_.rank, rank, ControlWord::aborted_by, aborted_by);
            if (peers_[rank].is_met) peers_[rank].queue.push_front(command);
        }
    }
    bool post_to(uint32_t rank) {
        Peer& peer = peers_[rank];
        bool has_posted = false;
        while (!peer.queue.empty() && peer.room != 0 && post_write(rank, peer.queue.front())) {
            peer.queue.pop_front();
            --peer.room;
            has_posted = true;
        }
        return has_posted;
    }
    // What this rank has applied of the peer's writes.
    bool give_credit(uint32_t rank, bool is_busy) {
        Peer& peer = peers_[rank];
        if (peer.applied == 0 || (is_busy && peer.applied < kCreditsAtOnce)) return false;
        Command command{};
        command.imm = pack_immediate({.kind = PutKind::credit, .n = peer.applied});
        if (!post_write(rank, command)) return false;
        peer.applied = 0;
        return true;
    }
    // False: later.
    bool post_write(uint32_t rank, const Command& command) {
        if (free_.empty()) return false;
        const Peer& peer = peers_[rank];
        Operation* const operation = free_.back();
        operation->index = rank;
        const auto cell = static_cast<size_t>(operation - operations_.get());
        Write write{};
        write.peer = peer.at;
        write.num_pieces = 1;
        write.has_imm = true;
        write.imm = command.imm;
        write.dst[0] = {peer.base + command.dst, command.bytes, peer.key};
        if (command.bytes != 0) {
            values_[cell] = command.src;
            write.src[0] = {&values_[cell], command.bytes};
            write.local = values_memory_.local;
        }
        const int64_t result = domain_.post_write(write, operation);
        if (result == -FI_EAGAIN) return false;
        if (result != 0)
            throw std::runtime_error("proxy of rank " + std::to_string(comm_.rank) + ": write to rank " +
                                     std::to_string(rank) + ": " + std::to_string(result));
        free_.pop_back();
        return true;
    }

    // ---- what peers tell ----

    bool poll() {
        return domain_.poll([this](uint32_t imm, fi_addr_t source) { receive(unpack_immediate(imm), source); },
                            [this](Operation* operation, uint64_t) { free_.push_back(operation); },
                            [this](Operation* operation, const std::string& why) { lose(operation, why); }) != 0;
    }
    void receive(const Immediate& imm, fi_addr_t source) {
        const auto found = ranks_.find(source);
        if (found == ranks_.end()) return;  // a stranger's
        Peer& peer = peers_[found->second];
        if (imm.kind == PutKind::credit) {
            if (imm.n > window_ - peer.room) return give_up(found->second);
            peer.room += imm.n;
            return;
        }
        ++peer.applied;
        if (imm.kind != PutKind::word || imm.which >= kNumControlWords) return give_up(found->second);
        apply(found->second, imm);
    }
    void apply(uint32_t source, const Immediate& imm) {
        const auto which = static_cast<ControlWord>(imm.which);
        HeapControl& control = comm_.control(comm_.rank);
        if (which == ControlWord::barrier) {
            uint64_t& latest = peers_[source].latest[imm.which];
            const uint64_t epoch = nearest_epoch(latest, imm.epoch);
            if (epoch == kNeverEpoch) return give_up(source);
            if (is_ahead(make_flag(epoch, 0), make_flag(latest, 0))) latest = epoch;
            return raise_flag(control.word(which, source, epoch), make_flag(epoch, imm.n));
        }
        const uint64_t word = inbox_[inbox_place(source, which) / sizeof(uint64_t)];
        which == ControlWord::aborted_by ? abort_rank(control, word) : pass_on_word(control.word(which, source), word);
    }

    // A peer that is dead, or does not keep to the protocol: all waits of this rank end, and name it.
    void give_up(uint32_t rank) { abort_rank(comm_.control(comm_.rank), uint64_t{rank} + 1); }
    void lose(Operation* operation, const std::string&) {
        const auto rank = static_cast<uint32_t>(operation->index);
        free_.push_back(operation);
        peers_[rank].queue.clear();
        peers_[rank].room = 0;
        peers_[rank].applied = 0;
        give_up(rank);
    }

    const CommArgs& comm_;
    const CommandRing ring_;
    Domain domain_;
    std::vector<Peer> peers_;
    std::map<fi_addr_t, uint32_t> ranks_;
    std::vector<uint64_t> inbox_;   // [rank][ControlWord] words that came with a write
    std::vector<uint64_t> values_;  // one for each operation: what it writes
    std::unique_ptr<Operation[]> operations_;
    std::vector<Operation*> free_;
    DomainMemory inbox_memory_, values_memory_;
    uint32_t window_ = 0;
    uint64_t num_taken_ = 0;
    bool has_told_abort_ = false;
};

}  // namespace tracekern
