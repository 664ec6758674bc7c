// The worker of an engine: one thread that owns one to four domains, posts what others submit, and takes what arrives.
//
// In every turn: new requests first, and the first write of each at once; then as many more as there is room for; then
// the completion queues. Nothing else touches a domain.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fabric/callbacks.hpp"
#include "fabric/imm_counters.hpp"
#include "fabric/messages.hpp"
#include "fabric/queue.hpp"
#include "fabric/transfer.hpp"

namespace tracekern {

using OnMessage = std::function<void(std::string)>;

class DomainGroup {
public:
    // pin_cpu: where the worker stays; -1: anywhere. Throws what opening the domains does.
    DomainGroup(const FabricLibrary& library,
                std::vector<Net> nets,
                int pin_cpu,
                uint64_t engine,
                std::chrono::nanoseconds connect_limit,
                CallbackThread& callbacks,
                ImmCounters& imms)
        : library_(library),
          nets_(std::move(nets)),
          pin_cpu_(pin_cpu),
          engine_(engine),
          connect_limit_(connect_limit),
          callbacks_(callbacks),
          imms_(imms) {
        std::promise<void> opened;
        auto is_open = opened.get_future();
        worker_ = std::thread([&] { run(opened); });
        try {
            is_open.get();
        } catch (...) {
            worker_.join();
            throw;
        }
    }
    DomainGroup(const DomainGroup&) = delete;
    ~DomainGroup() {
        is_stopping_.store(true, std::memory_order_release);
        if (worker_.joinable()) worker_.join();
    }

    const std::vector<DomainAddress>& addresses() const { return addresses_; }

    // ---- any thread ----

    std::shared_ptr<MemoryRegion> register_memory(uint64_t number, void* at, uint64_t bytes) {
        auto region = std::make_shared<MemoryRegion>();
        region->at = static_cast<char*>(at);
        region->bytes = bytes;
        call([&] {
            for (auto& domain : domains_) region->ways.push_back(domain->register_memory(at, bytes, number));
        });
        return region;
    }
    void unregister_memory(const std::shared_ptr<MemoryRegion>& region) {
        call([&] {
            for (auto& way : region->ways) Domain::close_memory(way);
        });
    }
    void submit(std::shared_ptr<Transfer> transfer) {
        requests_.put([this, transfer = std::move(transfer)] { start(transfer); });
    }
    void send(DomainAddress to, std::string payload, OnDone on_done) {
        requests_.put([this, to = std::move(to), payload = std::move(payload), on_done = std::move(on_done)] {
            try {
                send_message(domains_[0]->insert(to), {MessageKind::payload, engine_, {}, payload}, on_done);
            } catch (const std::runtime_error& error) {
                end_message(on_done, std::string("send: ") + error.what());
            }
        });
    }
    void on_message(OnMessage on_message) {
        call([&] { on_message_ = std::move(on_message); });
    }

private:
    enum class PeerState { connecting, ready, refused };
    struct Peer {
        PeerState state = PeerState::connecting;
        std::vector<fi_addr_t> at;  // one a domain
        std::string why;            // refused
        std::chrono::steady_clock::time_point until;
        std::vector<std::shared_ptr<Transfer>> waiting;
    };
    // A buffer that goes round, for messages in either direction.
    struct MessageBuffer {
        Operation operation{};
        bool is_recv = false;
        OnDone on_done;
        char* at = nullptr;
    };

    struct Unsent {
        fi_addr_t to;
        std::string bytes;
        OnDone on_done;
        std::chrono::steady_clock::time_point until;
    };

    static constexpr uint32_t kNumRecvs = 64, kNumSends = 64;
    static constexpr uint32_t kWindow = 256;  // writes under way in a domain

    // Runs on the worker; throws here what it throws there.
    void call(std::function<void()> what) {
        std::promise<void> done;
        requests_.put([&] {
            try {
                what();
                done.set_value();
            } catch (...) {
                done.set_exception(std::current_exception());
            }
        });
        done.get_future().get();
    }

    // ---- the worker ----

    void run(std::promise<void>& opened) {
        try {
            open();
            opened.set_value();
        } catch (...) {
            close();
            opened.set_exception(std::current_exception());
            return;
        }
        for (uint32_t idle_turns = 0;;) {
            const bool is_stopping = is_stopping_.load(std::memory_order_acquire);  // nothing is put behind it
            bool is_busy = false;
            while (const auto request = requests_.take()) {
                (*request)();
                is_busy = true;
            }
            is_busy |= send_more();
            is_busy |= post_more();
            for (uint32_t domain = 0; domain < domains_.size(); ++domain) is_busy |= poll(domain);
            if (is_stopping) {
                fail_what_waits();
                if (!is_busy && num_under_way_ == 0) break;
            }
            idle_turns = is_busy ? 0 : idle_turns + 1;
            if (idle_turns > kSpins) rest(idle_turns);
        }
        close();
    }

    // Memory comes after the pinning, so that it is near.
    void open() {
        if (pin_cpu_ >= 0) {
            cpu_set_t cpus;
            CPU_ZERO(&cpus);
            CPU_SET(static_cast<size_t>(pin_cpu_), &cpus);
            pthread_setaffinity_np(pthread_self(), sizeof(cpus), &cpus);
        }
        for (const Net& net : nets_) {
            domains_.push_back(std::make_unique<Domain>(library_, net));
            addresses_.push_back(domains_.back()->address());
        }
        under_way_.assign(domains_.size(), 0);
        message_memory_.resize((kNumRecvs + kNumSends) * kMaxMessageBytes);
        message_region_ =
            domains_[0]->register_memory(message_memory_.data(), message_memory_.size(), ~uint64_t{0} >> 1);
        messages_ = std::vector<MessageBuffer>(kNumRecvs + kNumSends);
        for (uint32_t i = 0; i < messages_.size(); ++i) {
            messages_[i].at = message_memory_.data() + i * kMaxMessageBytes;
            messages_[i].is_recv = i < kNumRecvs;
            messages_[i].operation.index = i;
            if (i < kNumRecvs) {
                post_recv(messages_[i]);
            } else {
                free_sends_.push_back(&messages_[i]);
            }
        }
    }
    void close() {
        Domain::close_memory(message_region_);
        domains_.clear();
    }

    // A worker that finds nothing to do for long lets others have the core.
    static constexpr uint32_t kSpins = 2000;
    static void rest(uint32_t idle_turns) {
        if (idle_turns < 2 * kSpins) {
            sched_yield();
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }

    // ---- transfers ----

    void start(const std::shared_ptr<Transfer>& transfer) {
        Peer& peer = peer_of(transfer->dst);
        if (peer.state == PeerState::refused) return end(transfer, peer.why);
        if (peer.state == PeerState::connecting) {
            peer.waiting.push_back(transfer);
            return;
        }
        active_.push_back(transfer);
        post_one(transfer, peer);  // at once: others may have thousands to go
    }

    // The engine that a descriptor is of; the first time it is told hello.
    Peer& peer_of(const MemoryRegionDescriptor& descriptor) {
        const auto found = peers_.find(descriptor.engine);
        if (found != peers_.end()) return found->second;
        std::vector<DomainAddress> addresses;
        for (const auto& way : descriptor.ways) addresses.push_back(way.address);
        Peer& peer = peers_[descriptor.engine];
        try {
            insert(peer, addresses);
        } catch (const std::runtime_error& error) {
            peer.state = PeerState::refused;
            peer.why = error.what();
            return peer;
        }
        peer.until = std::chrono::steady_clock::now() + connect_limit_;
        send_message(peer.at[0], {MessageKind::hello, engine_, addresses_, ""}, [](const std::string&) {});
        ++num_connecting_;
        return peer;
    }
    void insert(Peer& peer, const std::vector<DomainAddress>& addresses) {
        peer.at.clear();
        for (size_t i = 0; i < addresses.size(); ++i) peer.at.push_back(domains_.at(i)->insert(addresses[i]));
    }

    // Posts the next write of a transfer; false: no room now, or none is left.
    bool post_one(const std::shared_ptr<Transfer>& transfer, const Peer& peer) {
        if (transfer->num_posted == transfer->pieces.size() || !transfer->error.empty()) return false;
        const TransferPiece& piece = transfer->pieces[transfer->num_posted];
        if (under_way_[piece.domain] == kWindow) return false;
        const auto& way = transfer->dst.ways[piece.domain];
        const MemoryRegion* src = transfer->src.get();
        Operation* operation = take_operation();
        operation->owner = transfer.get();
        operation->index = piece.domain;
        const WritePiece write{src ? src->at + piece.src : nullptr,
                               piece.bytes,
                               src ? src->ways[piece.domain].local : nullptr,
                               peer.at[piece.domain],
                               way.base + piece.dst,
                               way.key,
                               transfer->imm.has_value(),
                               transfer->imm.value_or(0)};
        const int64_t result = domains_[piece.domain]->post_write(write, operation);
        if (result != 0) {
            give_back(operation);
            if (result == -FI_EAGAIN) return false;
            transfer->error = library_.describe("write", result);
            end_if_over(transfer);
            return false;
        }
        if (transfer->num_posted++ == 0) transfers_[transfer.get()] = transfer;
        ++under_way_[piece.domain];
        ++num_under_way_;
        return true;
    }

    bool post_more() {
        bool is_busy = false;
        for (size_t turn = active_.size(); turn > 0; --turn) {
            const auto transfer = std::move(active_.front());
            active_.pop_front();
            const Peer& peer = peers_.at(transfer->dst.engine);
            while (post_one(transfer, peer)) is_busy = true;
            if (transfer->num_posted < transfer->pieces.size() && transfer->error.empty()) active_.push_back(transfer);
        }
        if (num_connecting_) give_up_on_silent_peers();
        return is_busy;
    }

    void end(const std::shared_ptr<Transfer>& transfer, const std::string& error) {
        callbacks_.put([on_done = std::move(transfer->on_done), error] { on_done(error); });
    }
    void end_if_over(const std::shared_ptr<Transfer>& transfer) {
        if (!transfer->is_over()) return;
        end(transfer, transfer->error);
        transfers_.erase(transfer.get());
    }

    // ---- completions ----

    bool poll(uint32_t domain) {
        const auto on_imm = [&](uint32_t imm, fi_addr_t) {
            if (auto reached = imms_.add(imm)) callbacks_.put(std::move(reached));
        };
        const auto on_done = [&](Operation* operation, uint64_t bytes) { take_done(operation, bytes, ""); };
        const auto on_error = [&](Operation* operation, const std::string& error) { take_done(operation, 0, error); };
        return domains_[domain]->poll(on_imm, on_done, on_error) != 0;
    }

    void take_done(Operation* operation, uint64_t bytes, const std::string& error) {
        if (!operation) return;
        if (is_message(operation)) return take_message(messages_[operation->index], bytes, error);
        const auto transfer = transfers_.at(static_cast<Transfer*>(operation->owner));
        --under_way_[operation->index];
        --num_under_way_;
        give_back(operation);
        ++transfer->num_ended;
        if (!error.empty() && transfer->error.empty()) transfer->error = "write: " + error;
        end_if_over(transfer);
    }

    Operation* take_operation() {
        if (!free_operations_) {
            operations_.push_back(std::make_unique<Operation>());
            return operations_.back().get();
        }
        return std::exchange(free_operations_, free_operations_->next);
    }
    void give_back(Operation* operation) {
        operation->owner = nullptr;
        operation->next = std::exchange(free_operations_, operation);
    }

    // ---- messages ----

    bool is_message(const Operation* operation) const {
        return operation->index < messages_.size() && operation == &messages_[operation->index].operation;
    }
    void post_recv(MessageBuffer& buffer) {
        library_.require(domains_[0]->post_recv(buffer.at, kMaxMessageBytes, message_region_.local, &buffer.operation),
                         "recv");
    }

    void send_message(fi_addr_t to, const Message& message, OnDone on_done) {
        unsent_.push_back({to, pack(message), std::move(on_done), std::chrono::steady_clock::now() + connect_limit_});
        send_more();
    }

    // Sends what there is room for. A provider that is still making the connection has none.
    bool send_more() {
        bool is_busy = false;
        for (size_t turn = unsent_.size(); turn > 0; --turn) {
            Unsent unsent = std::move(unsent_.front());
            unsent_.pop_front();
            const int64_t result = post_send(unsent);
            if (result == 0) {
                is_busy = true;
            } else if (result != -FI_EAGAIN) {
                end_message(std::move(unsent.on_done), library_.describe("send", result));
            } else if (std::chrono::steady_clock::now() > unsent.until) {
                end_message(std::move(unsent.on_done), "send: the peer was not reached within the time limit");
            } else {
                unsent_.push_back(std::move(unsent));
            }
        }
        return is_busy;
    }
    int64_t post_send(Unsent& unsent) {
        if (free_sends_.empty()) return -FI_EAGAIN;
        MessageBuffer& buffer = *free_sends_.back();
        std::copy(unsent.bytes.begin(), unsent.bytes.end(), buffer.at);
        const int64_t result =
            domains_[0]->post_send(buffer.at, unsent.bytes.size(), message_region_.local, unsent.to, &buffer.operation);
        if (result != 0) return result;
        free_sends_.pop_back();
        buffer.on_done = std::move(unsent.on_done);
        ++num_under_way_;
        return 0;
    }
    void end_message(OnDone on_done, const std::string& error) {
        callbacks_.put([on_done = std::move(on_done), error] { on_done(error); });
    }

    void take_message(MessageBuffer& buffer, uint64_t bytes, const std::string& error) {
        if (!buffer.is_recv) {
            --num_under_way_;
            free_sends_.push_back(&buffer);
            end_message(std::exchange(buffer.on_done, {}), error.empty() ? "" : "send: " + error);
            return;
        }
        if (error.empty()) {
            try {
                receive(unpack_message({buffer.at, bytes}));
            } catch (const std::exception&) {
                // Not from an engine, or with addresses of another network: nobody to answer.
            }
        }
        post_recv(buffer);
    }

    void receive(const Message& message) {
        if (message.kind == MessageKind::hello) return welcome(message);
        if (message.kind == MessageKind::payload) {
            if (on_message_) callbacks_.put([on_message = on_message_, text = message.text] { on_message(text); });
            return;
        }
        const auto found = peers_.find(message.engine);
        if (found == peers_.end() || found->second.state != PeerState::connecting) return;
        if (message.kind == MessageKind::refusal) return refuse(found->second, message.text);
        make_ready(found->second);
    }

    // Both sides must know each other's addresses before the first write.
    void welcome(const Message& hello) {
        const size_t theirs = hello.addresses.size();
        if (theirs == 0) return;
        const fi_addr_t to = domains_[0]->insert(hello.addresses[0]);
        const auto ignore = [](const std::string&) {};
        if (theirs != domains_.size()) {
            const std::string why = "the peer has " + std::to_string(domains_.size()) + " domains, this engine " +
                                    std::to_string(theirs) + "; wanted as many on each side";
            return send_message(to, {MessageKind::refusal, engine_, {}, why}, ignore);
        }
        Peer& peer = peers_[hello.engine];  // it knows this engine's addresses already
        if (peer.at.empty()) {
            insert(peer, hello.addresses);
            peer.state = PeerState::ready;
        } else if (peer.state == PeerState::connecting) {
            make_ready(peer);
        }
        send_message(to, {MessageKind::welcome, engine_, addresses_, ""}, ignore);
    }

    void make_ready(Peer& peer) {
        --num_connecting_;
        peer.state = PeerState::ready;
        for (const auto& transfer : std::exchange(peer.waiting, {})) {
            active_.push_back(transfer);
            post_one(transfer, peer);
        }
    }
    void refuse(Peer& peer, const std::string& why) {
        --num_connecting_;
        peer.state = PeerState::refused;
        peer.why = why;
        for (const auto& transfer : std::exchange(peer.waiting, {})) end(transfer, why);
    }
    void give_up_on_silent_peers() {
        const auto now = std::chrono::steady_clock::now();
        for (auto& [number, peer] : peers_) {
            if (peer.state == PeerState::connecting && !peer.waiting.empty() && now > peer.until) {
                refuse(peer, "the peer has not answered within the time limit");
            }
        }
    }
    void fail_what_waits() {
        for (auto& [number, peer] : peers_) {
            for (const auto& transfer : std::exchange(peer.waiting, {})) end(transfer, "the engine was stopped");
        }
        for (Unsent& unsent : std::exchange(unsent_, {})) {
            end_message(std::move(unsent.on_done), "the engine was stopped");
        }
        for (const auto& transfer : std::exchange(active_, {})) {
            if (transfer->error.empty()) transfer->error = "the engine was stopped";
            end_if_over(transfer);
        }
    }

    const FabricLibrary& library_;
    const std::vector<Net> nets_;
    const int pin_cpu_;
    const uint64_t engine_;
    const std::chrono::nanoseconds connect_limit_;
    CallbackThread& callbacks_;
    ImmCounters& imms_;
    Queue<std::function<void()>> requests_;
    std::atomic<bool> is_stopping_ = false;

    // The worker's, but for addresses_, which stay as they are.
    std::vector<DomainAddress> addresses_;
    std::vector<std::unique_ptr<Domain>> domains_;
    std::map<uint64_t, Peer> peers_;  // by engine
    uint32_t num_connecting_ = 0;
    std::deque<std::shared_ptr<Transfer>> active_;  // that have writes left to post
    std::unordered_map<Transfer*, std::shared_ptr<Transfer>> transfers_;
    std::vector<uint32_t> under_way_;  // writes in each domain
    uint64_t num_under_way_ = 0;       // writes and sends
    std::vector<std::unique_ptr<Operation>> operations_;
    Operation* free_operations_ = nullptr;
    std::vector<char> message_memory_;
    DomainMemory message_region_;
    std::vector<MessageBuffer> messages_;
    std::vector<MessageBuffer*> free_sends_;
    std::deque<Unsent> unsent_;
    OnMessage on_message_;
    std::thread worker_;
};

}  // namespace tracekern
