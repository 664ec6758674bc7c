// The thread of a rank's host that writes over a network for the rank's kernels, and receives for them.
//
// Its turns take commands (comm/command.h), post each as a write with an immediate, and store what immediates of peers
// tell where kernels wait. No turn waits: each peer has a queue, and the completion queue is asked each time.
//
// An Inbox knows what the other immediates mean to the kernels, and stores it where they wait. The proxy itself knows
// words of HeapControl, and credits.
//
// A proxy may have so many writes on their way to a peer, or not yet applied there, as the peer's completion queue has
// room for: half of it, shared by all its peers; the other half is for the peer's own writes, and for credits. A peer
// tells how many it has applied when they are kCreditsAtOnce, or when it had nothing else to do for kIdleTurns.
//
// A write to a peer that is gone fails. To notice that, the proxy posts an empty credit every kBeat to each peer that
// nothing is on its way to. A peer that leaves says so before, in its last credit.
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/proxy_side.hpp"
#include "fabric/domain.hpp"
#include "fabric/proxy_trace.hpp"

namespace tracekern {

// What proxies tell each other before the first turn.
struct ProxyAddress {
    DomainAddress domain;
    uint64_t key, base;  // of its memory
    uint64_t number;     // of the proxy, on record
};

class Proxy {
public:
    static constexpr uint32_t kCreditsAtOnce = 64;
    static constexpr uint32_t kIdleTurns = 16;
    static constexpr auto kBeat = std::chrono::milliseconds(20);

    // What peers write to, and what is written to them. HeapControl comes first, the rest is the kernels'.
    struct Memory {
        char* begin;
        uint64_t bytes;
    };

    // comm: of its rank. ring: of its kernels. window: writes to a peer that are not applied yet; 0: as many as there
    // is room for.
    Proxy(const FabricLibrary& library,
          const Net& net,
          const CommArgs& comm,
          CommandRing ring,
          Memory memory,
          uint32_t window = 0)
        : comm_(comm), ring_(ring), memory_(memory), domain_(library, net, kSetupLimit), peers_(comm.num_ranks) {
        const uint32_t room = Domain::kNumCompletions / 2 / comm.num_ranks;
        window_ = window == 0 || window > room ? room : window;
        values_.resize(uint64_t{comm.num_ranks} * (window_ + 1));
        lower_words(control());
        registered_ = domain_.register_memory(memory.begin, memory.bytes, FI_WRITE | FI_REMOTE_WRITE);
        registered_values_ = domain_.register_memory(values_.data(), values_.size() * sizeof(uint64_t), FI_WRITE);
        operations_ = std::make_unique<Posted[]>(values_.size());
        for (size_t i = 0; i < values_.size(); ++i) free_.push_back(&operations_[i]);
    }
    Proxy(const Proxy&) = delete;
    ~Proxy() {
        domain_.close_endpoint();
        Domain::close_memory(registered_);
        Domain::close_memory(registered_values_);
    }

    ProxyAddress address() const { return {domain_.address(), registered_.key, registered_.base, number_}; }
    // Where kernels of this rank wait for words of ranks of other hosts.
    HeapControl& control() const { return *reinterpret_cast<HeapControl*>(memory_.begin); }
    // Else immediates come from nobody that the proxy knows.
    bool tells_sources() const { return domain_.tells_sources(); }
    // Of one command.
    uint64_t max_bytes() const { return domain_.max_write_bytes(); }
    // The state before the first turn, as kernels know it: what is under way of before is dropped where it arrives.
    // inbox, completed: what immediates mean from now on. Without them also the communicator begins anew: its own
    // words.
    void reset(Inbox inbox = {}, Completed completed = {}) {
        const bool is_of_communicator = !inbox;
        if (is_of_communicator) lower_words(control());
        inbox_ = std::move(inbox);
        completed_ = std::move(completed);
        generation_ = (generation_ + 1) & kGenerationMask;
        num_taken_ = 0;
        has_told_abort_ = false;
        for (Peer& peer : peers_) {
            if (!peer.is_met) continue;
            peer.queue.clear();
            peer.room = window_;
            peer.applied = 0;
            peer.is_lost = false;
            if (!is_of_communicator) continue;
            for (uint64_t& epoch : peer.latest) epoch = kNeverEpoch;
        }
    }
    // Tells all peers that this rank leaves; false: again in a later turn. Drained before.
    bool say_farewell() {
        for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
            Peer& peer = peers_[rank];
            if (!peer.is_met || peer.has_left || peer.is_lost || peer.was_told) continue;
            if (!post_credit(rank, 0, kFarewell)) return false;
            peer.was_told = true;
        }
        return true;
    }
    // Whether all that kernels asked for has arrived, and their peers know it.
    bool is_drained() const {
        const auto is_empty = [](const Peer& peer) { return peer.queue.empty() && peer.applied == 0; };
        return free_.size() == values_.size() && std::all_of(peers_.begin(), peers_.end(), is_empty);
    }
    // Before the first turn of any.
    void meet(uint32_t rank, const ProxyAddress& address) {
        Peer& peer = peers_[rank];
        peer.at = domain_.insert(address.domain);
        peer.key = address.key;
        peer.base = address.base;
        peer.number = address.number;
        peer.room = window_;
        peer.is_met = true;
        for (uint64_t& epoch : peer.latest) epoch = kNeverEpoch;
        if (ranks_.size() <= peer.at) ranks_.resize(peer.at + 1, kNobody);
        ranks_[peer.at] = rank;
    }

    // Tells all peers which rank this is; false: again in a later turn.
    bool say_hello() {
        for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
            Peer& peer = peers_[rank];
            if (!peer.is_met || peer.was_greeted) continue;
            if (!post_credit(rank, comm_.rank, kHello)) return false;
            peer.was_greeted = true;
        }
        return true;
    }
    // Whether all peers have said hello.
    bool knows_all() const {
        return std::all_of(
            peers_.begin(), peers_.end(), [](const Peer& peer) { return !peer.is_met || peer.is_known; });
    }
    // Whether one of them was not who the provider said.
    bool is_mistaken() const { return is_mistaken_; }

    // Between turns. The region has the tracks of ProxyTrack.
    void start_trace(const LaunchDescriptor& launch) {
        trace_.start(launch, number_);
        for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
            if (peers_[rank].is_met) trace_.introduce(rank, peers_[rank].number);
        }
    }
    void stop_trace() { trace_.stop(); }

    // Returns whether there was something to do.
    bool turn() {
        bool is_busy = poll();
        is_busy |= take_commands();
        if (!has_told_abort_ && has_fault(*comm_.fault)) tell_abort();
        for (uint32_t rank = 0; rank < peers_.size(); ++rank) is_busy |= post_to(rank);
        num_idle_turns_ = is_busy ? 0 : num_idle_turns_ + 1;
        const bool is_idle = num_idle_turns_ >= kIdleTurns;
        for (uint32_t rank = 0; rank < peers_.size(); ++rank) is_busy |= give_credit(rank, is_idle);
        if (is_idle) look_for_lost();
        return is_busy;
    }

private:
    static constexpr auto kSetupLimit = std::chrono::seconds(10);
    static constexpr uint32_t kMostCommandsATurn = 64;
    static constexpr uint32_t kNobody = ~0u;
    // `which` of a credit: the last of a source, and its first, of which n is its rank.
    static constexpr uint32_t kFarewell = 1, kHello = 2;

    struct Asked {
        Command command;
        ProxyTrace::Put put;
    };
    struct Posted : Operation {
        ProxyTrace::Put put;
        uint32_t rank;
        uint32_t imm;
        uint32_t tag;
        uint32_t generation;
        bool is_credit;
    };
    struct Peer {
        bool is_met = false;
        fi_addr_t at = FI_ADDR_UNSPEC;
        uint64_t key = 0, base = 0, number = 0;
        std::deque<Asked> queue;            // not posted yet
        uint32_t room = 0;                  // writes that may be posted
        uint32_t applied = 0;               // of its writes, of which it was not told
        uint32_t under_way = 0;             // writes that are not completed
        bool has_left = false;              // as it said
        bool was_told = false;              // that this rank leaves
        bool was_greeted = false;           // by this rank
        bool is_known = false;              // its hello came
        bool is_lost = false;               // a credit did not reach it
        uint64_t latest[kNumControlWords];  // epochs
    };

    // ---- what kernels ask for ----

    bool take_commands() {
        Command command;
        uint32_t count = 0;
        while (count < kMostCommandsATurn && take_command(ring_, num_taken_, command)) {
            ++num_taken_;
            ++count;
            std::deque<Asked>& queue = peers_.at(command.peer).queue;
            queue.push_back({command, trace_.take(command, queue.size())});
        }
        return count != 0;
    }
    // All peers give up with this rank: see raise_fault().
    void tell_abort() {
        has_told_abort_ = true;
        const uint64_t aborted_by = comm_.fault->aborted_by | uint64_t{comm_.fault->refusal} << 32;
        for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
            const Command command = word_command(comm_.rank, rank, ControlWord::aborted_by, aborted_by);
            if (peers_[rank].is_met) peers_[rank].queue.push_front({command, trace_.take(command, 0)});
        }
    }
    bool post_to(uint32_t rank) {
        Peer& peer = peers_[rank];
        bool has_posted = false;
        while (!peer.queue.empty() && peer.room != 0 && post_write(rank, peer.queue.front())) {
            peer.queue.pop_front();
            if (takes_room()) --peer.room;
            has_posted = true;
        }
        return has_posted;
    }
    // What this rank has applied of the peer's writes.
    bool give_credit(uint32_t rank, bool is_idle) {
        Peer& peer = peers_[rank];
        if (peer.applied == 0 || (!is_idle && peer.applied < kCreditsAtOnce)) return false;
        if (!post_credit(rank, peer.applied)) return false;
        peer.applied = 0;
        return true;
    }
    bool post_credit(uint32_t rank, uint32_t n, uint32_t which = 0) {
        Command command{};
        command.imm = pack_immediate({.kind = PutKind::credit, .which = which, .n = n});
        command.peer = static_cast<uint16_t>(rank);
        return !free_.empty() && post_write(rank, {command, trace_.take(command, 0)}, true);
    }
    // False: later.
    bool post_write(uint32_t rank, const Asked& asked, bool is_credit = false) {
        if (free_.empty()) return false;
        const Command& command = asked.command;
        Peer& peer = peers_[rank];
        Posted* const operation = free_.back();
        operation->rank = rank;
        operation->imm = command.imm;
        operation->tag = command.tag;
        operation->generation = generation_;
        operation->is_credit = is_credit;
        const auto cell = static_cast<size_t>(operation - operations_.get());
        Write write{};
        write.peer = peer.at;
        write.num_pieces = 1;
        write.has_imm = true;
        write.imm = of_generation(command.imm, generation_);
        write.dst[0] = {peer.base + command.dst, command.bytes, peer.key};
        if (command.carries_value) {
            values_[cell] = command.src;
            write.src[0] = {&values_[cell], command.bytes};
            write.local = registered_values_.local;
        } else if (command.bytes != 0) {
            write.src[0] = {memory_.begin + command.src, command.bytes};
            write.local = registered_.local;
        }
        const uint64_t at = trace_.now();
        const int64_t result = domain_.post_write(write, operation);
        if (result == -FI_EAGAIN) return false;
        if (result != 0)
            throw std::runtime_error("proxy of rank " + std::to_string(comm_.rank) + ": write to rank " +
                                     std::to_string(rank) + ": " + std::to_string(result));
        trace_.post(asked.put, at);
        operation->put = asked.put;
        free_.pop_back();
        ++peer.under_way;
        return true;
    }

    void complete(Posted* operation) {
        trace_.complete(operation->put);
        free_.push_back(operation);
        --peers_[operation->rank].under_way;
        if (operation->tag == 0 || operation->generation != generation_) return;
        count_completed(ring_, operation->tag);
        if (completed_) completed_(operation->rank, unpack_immediate(operation->imm));
    }

    // ---- what peers tell ----

    bool poll() {
        return domain_.poll(
                   [this](uint32_t imm, fi_addr_t source) { receive(unpack_immediate(imm), source); },
                   [this](Operation* operation, uint64_t) { complete(static_cast<Posted*>(operation)); },
                   [this](Operation* operation, const std::string&) { lose(*static_cast<Posted*>(operation)); }) != 0;
    }
    void receive(const Immediate& imm, fi_addr_t source) {
        const uint32_t rank = source < ranks_.size() ? ranks_[source] : kNobody;
        if (rank == kNobody || imm.generation != generation_) return;  // a stranger's, or of before a reset
        Peer& peer = peers_[rank];
        trace_.arrive(rank, imm);
        if (imm.kind == PutKind::credit && imm.which == kHello) {
            peer.is_known = true;
            is_mistaken_ |= imm.n != rank;
            return;
        }
        if (imm.kind == PutKind::credit) {
            if (imm.n > window_ - peer.room) return give_up(rank);
            peer.room += imm.n;
            peer.has_left |= imm.which != 0;
            return;
        }
        ++peer.applied;
        if (imm.kind == PutKind::word && imm.which < kNumControlWords) return apply(rank, imm);
        if (!inbox_ || !inbox_(rank, imm)) give_up(rank);
    }
    void apply(uint32_t source, const Immediate& imm) {
        const auto which = static_cast<ControlWord>(imm.which);
        if (which == ControlWord::barrier) {
            uint64_t& latest = peers_[source].latest[imm.which];
            const uint64_t epoch = take_epoch(latest, imm);
            if (epoch == kNeverEpoch) return give_up(source);
            return raise_flag<CommChannel::barrier>(control().word(which, source, epoch), make_flag(epoch, imm.n));
        }
        const uint64_t word = *reinterpret_cast<const uint64_t*>(memory_.begin + inbox_place(source, which));
        if (which == ControlWord::aborted_by) return abort_rank(control(), word);
        pass_on_word(control().word(which, source), word);
    }

    // Names a peer that is gone and did not say that it leaves; what it said has been taken. Asks those that are
    // silent.
    void look_for_lost() {
        const auto now = std::chrono::steady_clock::now();
        const bool asks = now >= next_beat_;
        if (asks) next_beat_ = now + kBeat;
        for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
            Peer& peer = peers_[rank];
            if (!peer.is_met || peer.has_left) continue;
            if (peer.is_lost) {
                give_up(rank);
            } else if (asks && peer.under_way == 0) {
                post_credit(rank, 0);
            }
        }
    }
    // A peer that is dead, or does not keep to the protocol: all waits of this rank end, and name it.
    void give_up(uint32_t rank) { abort_rank(control(), uint64_t{rank} + 1); }
    void lose(Posted& operation) {
        Peer& peer = peers_[operation.rank];
        free_.push_back(&operation);
        --peer.under_way;
        if (operation.generation != generation_) return;
        if (operation.is_credit) {  // its farewell may have come, and is taken later
            peer.is_lost = true;
            return;
        }
        peer.queue.clear();
        peer.room = 0;
        peer.applied = 0;
        give_up(operation.rank);
    }

    const CommArgs& comm_;
    const CommandRing ring_;
    const Memory memory_;
    Inbox inbox_;
    Completed completed_;
    Domain domain_;
    std::vector<Peer> peers_;
    std::vector<uint32_t> ranks_;   // [fi_addr_t], which counts from 0
    std::vector<uint64_t> values_;  // one for each operation: what it writes
    ProxyTrace trace_;
    std::unique_ptr<Posted[]> operations_;
    std::vector<Posted*> free_;
    DomainMemory registered_, registered_values_;
    const uint64_t number_ = draw_number();
    uint32_t window_ = 0;
    uint32_t generation_ = 0;
    uint32_t num_idle_turns_ = 0;
    std::chrono::steady_clock::time_point next_beat_{};
    uint64_t num_taken_ = 0;
    bool has_told_abort_ = false;
    bool is_mistaken_ = false;
};

}  // namespace tracekern
