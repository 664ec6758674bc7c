// The worker of an engine: one thread that owns one to four domains, posts what others submit, and takes what arrives.
//
// In every turn: new requests first, and the first write of each at once; then as many more as there is room for; then
// the completion queues. Nothing else touches a domain.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fabric/callbacks.hpp"
#include "fabric/farewells.hpp"
#include "fabric/imm_counters.hpp"
#include "fabric/mailbox.hpp"
#include "fabric/peers.hpp"
#include "fabric/queue.hpp"
#include "fabric/revocations.hpp"
#include "fabric/shared_loop.hpp"
#include "fabric/transfer_queue.hpp"
#include "fabric/user_messages.hpp"

namespace tracekern {

// Called with what is wrong with a peer: it is dead, or has lost writes.
using OnPeer = std::function<void(const std::string&)>;

class DomainGroup {
public:
    // pin_cpu: where the worker stays; -1: anywhere. Throws what opening the domains does.
    DomainGroup(const FabricLibrary& library,
                std::vector<Net> nets,
                int pin_cpu,
                const EngineName& engine,
                PeerLimits limits,
                CallbackThread& callbacks,
                ImmCounters& imms,
                SharedLoop& loop)
        : library_(library),
          nets_(std::move(nets)),
          pin_cpu_(pin_cpu),
          engine_(engine),
          limits_(limits),
          callbacks_(callbacks),
          imms_(imms),
          loop_(loop) {
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
    ~DomainGroup() { end(); }

    // Ends what is under way. Calls that other threads make meanwhile end or are refused. One thread.
    void end() {
        is_stopping_.store(true, std::memory_order_seq_cst);
        loop_.wake();
        if (worker_.joinable()) worker_.join();
    }

    const std::vector<DomainAddress>& addresses() const { return addresses_; }
    uint64_t max_write_bytes() const { return max_write_bytes_; }

    // ---- any thread ----

    void register_memory(const std::shared_ptr<MemoryRegion>& region) {
        call([&] {
            try {
                for (auto& domain : domains_) {
                    region->ways.push_back(domain->register_memory(region->at, region->bytes, kAccess));
                }
            } catch (...) {
                for (auto& way : region->ways) Domain::close_memory(way);
                throw;
            }
            regions_[region->number] = region;
        });
    }
    // Returns "" when nobody can write there or read from there any more; else who may still, after the limit.
    std::string unregister_memory(const std::shared_ptr<MemoryRegion>& region, std::chrono::nanoseconds limit) {
        const auto freed = std::make_shared<std::promise<std::string>>();
        auto outcome = freed->get_future();
        put([this, region, limit, freed] {
            if (is_broken()) return freed->set_value("");
            region->is_revoked = true;
            revocations_->start(
                region, std::chrono::steady_clock::now() + limit, [this, region, freed](const std::string& held) {
                    if (held.empty()) regions_.erase(region->number);
                    freed->set_value(held);
                });
        });
        rule::before_waiting();
        return outcome.get();
    }
    // Their engines are to answer before the first transfer comes.
    void meet(std::shared_ptr<Targets> targets) {
        put([this, targets = std::move(targets)] {
            if (!is_broken()) peers_->look_up(*targets);
        });
    }
    // A short write is posted here and now where the worker has a moment: it would cost a change of threads.
    void submit(std::shared_ptr<Transfer> transfer) {
        // Relaxed: one that is submitted as the recording begins may miss its own time, and gets the worker's.
        if (is_recording_.load(std::memory_order_relaxed)) transfer->submitted = HostTrack::now();
        if (transfer->is_short() && start_here(transfer)) return loop_.wake(SharedLoop::Sleep::asleep);
        put([this, transfer = std::move(transfer)] { start(transfer); });
    }
    void cancel(uint64_t transfer) {
        put([this, transfer] {
            if (!is_broken() && !peers_->cancel(transfer)) transfers_->cancel(transfer);
        });
    }
    void send(EngineAddress to, std::string payload, OnDone on_done) {
        put([this, to = std::move(to), payload = std::move(payload), on_done = std::move(on_done)]() mutable {
            if (is_broken()) return on_done.tell({Outcome::failed, broken_}, callbacks_);
            messages_->send(to, payload, std::move(on_done));
        });
    }
    void lend_messages_to(uint64_t bytes, uint32_t count, OnMessage on_message) {
        call([this, bytes, count, on_message = std::move(on_message)] {
            messages_->lend_to(bytes, count, std::move(on_message));
        });
    }
    // The region has a track for each EngineTrack and domain.
    void start_trace(const LaunchDescriptor& launch) {
        call([&] {
            trace_.start(launch, static_cast<uint32_t>(domains_.size()), engine_.number);
            peers_->introduce_all();
        });
        is_recording_.store(true, std::memory_order_relaxed);
    }
    void stop_trace() {
        is_recording_.store(false, std::memory_order_relaxed);
        call([&] { trace_.stop(); }, true);  // where it is refused, the worker has done it
    }
    void on_peer(OnPeer on_peer) {
        call([&] { on_peer_ = std::move(on_peer); });
    }

private:
    // How long an engine that ends waits for writes of which none ends, and then for peers to stop theirs.
    static constexpr std::chrono::seconds kStopLimit{2}, kGoodbyeLimit{1};
    static constexpr char kStopped[] = "the engine was stopped";
    static constexpr uint64_t kAccess = FI_WRITE | FI_REMOTE_WRITE;  // of users' memory

    void start(const std::shared_ptr<Transfer>& transfer) {
        transfers_->admit(*transfer);
        if (is_broken()) return transfers_->end(*transfer, {Outcome::failed, broken_});
        // Another thread was faster than the one that submitted this.
        const bool is_readable = !transfer->src || !transfer->src->is_revoked;
        if (is_readable) return peers_->start(transfer);
        transfers_->end(*transfer, {Outcome::failed, "the source's memory was unregistered"});
    }
    // False: the worker has no time, or other requests before this.
    bool start_here(const std::shared_ptr<Transfer>& transfer) {
        bool is_started = false;
        loop_.try_between([&] {
            if (requests_.has_new()) return;
            safely([&] { start(transfer); });
            is_started = true;
            if (transfer->num_posted == 0) loop_.wake();
        });
        return is_started;
    }
    // False: the engine was stopped.
    bool try_put(std::function<void()> request) {
        if (!requests_.put(std::move(request))) return false;
        loop_.wake();
        return true;
    }
    void put(std::function<void()> request) {
        if (!try_put(std::move(request))) throw std::runtime_error(kStopped);
    }
    // Runs between two turns; throws here what it throws there. even_broken: also where all is closed, or has ended.
    void call(std::function<void()> what, bool even_broken = false) {
        const auto done = std::make_shared<std::promise<void>>();  // the worker may use it for longer than the waiter
        auto is_done = done->get_future();
        const bool is_put = try_put([this, what = std::move(what), done, even_broken] {
            try {
                if (is_broken() && !even_broken) throw std::runtime_error(broken_);
                what();
                done->set_value();
            } catch (...) {
                done->set_exception(std::current_exception());
            }
        });
        rule::before_waiting();
        if (is_put) return is_done.get();
        if (!even_broken) throw std::runtime_error(kStopped);
    }

    // ---- the worker ----

    void run(std::promise<void>& opened) {
        try {
            open();
            opened.set_value();
        } catch (...) {
            close("");
            opened.set_exception(std::current_exception());
            return;
        }
        loop_.work([this](bool has_slept) { return turn(has_slept); },
                   [this] { return is_over_; },
                   [this] { return may_sleep(); },
                   [this] { return requests_.has_new() || is_stopping_.load(std::memory_order_seq_cst); },
                   descriptors_);
        if (!is_broken()) broken_ = kStopped;
        close(kStopped);
        trace_.stop();
        do {
            while (const auto request = requests_.take()) (*request)();  // that came too late, and is told so
        } while (!requests_.try_close());
        forget();
    }
    // What users have given, and memory: the engine may stay for long after it was stopped.
    void forget() {
        revocations_.reset();
        farewells_.reset();
        peers_.reset();
        transfers_.reset();
        messages_.reset();
        mailbox_.reset();
        on_peer_ = {};
    }

    // What fails in a turn breaks the engine, whoever does the turn.
    template <class What>
    void safely(What&& what) {
        try {
            what();
        } catch (const std::exception& error) {
            break_down(error.what());
        }
    }
    // Returns whether it found something to do.
    bool turn(bool has_slept) {
        bool is_busy = false;
        safely([&] { is_over_ = take_turn(has_slept, is_busy); });
        if (is_broken() && !is_over_) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // nothing else can
        return is_busy;
    }
    bool may_sleep() const {
        for (const auto& domain : domains_) {
            if (!domain->may_sleep()) return false;
        }
        return true;
    }

    // Returns whether it was the last.
    bool take_turn(bool has_slept, bool& is_busy) {
        const bool is_stopping = is_stopping_.load(std::memory_order_acquire);
        while (const auto request = requests_.take()) {
            (*request)();
            is_busy = true;
        }
        if (is_broken()) return is_stopping;
        if (mailbox_->has_unsent()) is_busy |= mailbox_->send_more();
        if (transfers_->has_active()) is_busy |= transfers_->post_more();
        for (uint32_t domain = 0; domain < domains_.size(); ++domain) is_busy |= poll(domain);
        look_around(has_slept);
        return is_stopping && finish(is_busy);
    }

    // At peers, deadlines, and memory that is taken back: many times a second, but not in every turn.
    void look_around(bool has_slept) {
        if (++num_turns_ % 64 != 0 && !has_slept) return;  // a look at the clock costs time
        const auto now = std::chrono::steady_clock::now();
        if (now < next_look_) return;
        next_look_ = now + std::chrono::milliseconds(5);
        transfers_->end_late(now);
        peers_->look(now, imms_.long_waits().is_any());
        messages_->look(now);
        revocations_->look(now);
        if (now >= next_close_on_exec_ && now < close_on_exec_until_) {
            Connections::close_on_exec();
            next_close_on_exec_ = now + std::chrono::seconds(1);
        }
    }

    // Returns whether the engine can end: what is posted has ended, or its time is over, and peers are told.
    bool finish(bool is_busy) {
        const auto now = std::chrono::steady_clock::now();
        transfers_->fail_all_unposted(kStopped);
        if (!last_moment_ || (is_busy && !is_goodbye_said_)) last_moment_ = now + kStopLimit;
        const bool is_waiting = !is_goodbye_said_ && transfers_->num_under_way() + messages_->num_waiting() != 0;
        if (is_waiting && now < *last_moment_) return false;
        if (!is_goodbye_said_) last_moment_ = now + kGoodbyeLimit;
        is_goodbye_said_ = true;
        peers_->say_goodbye();
        return now >= *last_moment_ || (peers_->are_gone() && mailbox_->num_waiting() == 0);
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
            domains_.push_back(std::make_unique<Domain>(library_, net, limits_.connect));
            addresses_.push_back(domains_.back()->address());
            max_write_bytes_ = std::min(max_write_bytes_, domains_.back()->max_write_bytes());
        }
        for (const auto& domain : domains_) descriptors_.push_back(domain->descriptor());
        if (std::count(descriptors_.begin(), descriptors_.end(), -1)) descriptors_.clear();
        mailbox_ = std::make_unique<Mailbox>(
            library_, *domains_[0], limits_.connect, [this](std::function<void()> what) { try_put(std::move(what)); });
        messages_ = std::make_unique<UserMessages>(engine_, *domains_[0], limits_.connect, *mailbox_, callbacks_);
        transfers_ = std::make_unique<TransferQueue>(library_, domains_, callbacks_, trace_);
        const Peers::Hooks hooks{[this](const auto& descriptor) { return check(descriptor); },
                                 [this](const Peer& peer) { meet(peer); },
                                 [this](const Peer& peer) { imms_.leave(peer.engine); },
                                 [this](const Peer& peer) {
                                     if (!peer.is_replaced) messages_->fail_to(peer.at[0], peer.why);
                                     imms_.die(peer.engine, peer.why);
                                     tell(peer.why);
                                 },
                                 [this](const std::string& warning) { tell(warning); }};
        peers_ = std::make_unique<Peers>(engine_, domains_, addresses_, limits_, *mailbox_, *transfers_, trace_, hooks);
        farewells_ = std::make_unique<Farewells>(domains_);
        revocations_ = std::make_unique<Revocations>(*peers_, *transfers_, *farewells_);
        expect_connections();
    }
    // Endpoints come first: after them nobody reads or writes memory, whatever was posted, and users can be told.
    void close(const std::string& why) {
        for (auto& domain : domains_) domain->close_endpoint();
        if (revocations_) {
            peers_->fail_all(why);
            transfers_->give_up_on_all(why);
            transfers_->forget_all();
            mailbox_->fail_all(why);
            messages_->fail_all(why);
            revocations_->fail_all(why);
        }
        for (auto& [number, region] : std::exchange(regions_, {})) {
            for (auto& way : region->ways) Domain::close_memory(way);
        }
        if (mailbox_) mailbox_->close_memory();
        domains_.clear();
    }

    // A domain that cannot be read any more takes the whole group with it: nobody knows what has become of its writes.
    bool is_broken() const { return !broken_.empty(); }
    void break_down(const std::string& why) {
        broken_ = "the engine is broken, make another one: " + why;
        close(broken_);
        imms_.interrupt(broken_, false);  // other groups of domains may go on
        tell(broken_);
    }
    void meet(const Peer& peer) {
        imms_.meet(peer.engine, pack(EngineAddress{peer.addresses[0], peer.secret}), peer.name);
        expect_connections();
    }
    // Now, and with the first writes in each domain.
    void expect_connections() {
        next_close_on_exec_ = std::chrono::steady_clock::now();
        close_on_exec_until_ = next_close_on_exec_ + std::chrono::seconds(10);
    }
    void tell(const std::string& what) {
        if (on_peer_) callbacks_.put([on_peer = on_peer_, what] { on_peer(what); });
    }

    // What is wrong with a descriptor that a peer has, "" for nothing.
    std::string check(const MemoryRegionDescriptor& descriptor) const {
        const auto found = regions_.find(descriptor.region);
        if (found == regions_.end() || found->second->is_revoked) return "the memory was unregistered";
        const MemoryRegion& region = *found->second;
        bool is_ours = descriptor.engine == engine_.number && descriptor.secret == engine_.secret &&
                       descriptor.bytes == region.bytes && descriptor.ways.size() == region.ways.size();
        for (size_t i = 0; is_ours && i < region.ways.size(); ++i) {
            const auto& way = descriptor.ways[i];
            is_ours = way.key == region.ways[i].key && way.base == region.ways[i].base && way.address == addresses_[i];
        }
        return is_ours ? "" : kNotOurs;
    }

    bool poll(uint32_t domain) {
        const auto on_imm = [&](uint32_t imm, fi_addr_t source) { count(domain, imm, source); };
        const auto on_done = [&](Operation* operation, uint64_t bytes) { take(operation, bytes, ""); };
        const auto on_error = [&](Operation* operation, const std::string& error) { take(operation, 0, error); };
        return domains_[domain]->poll(on_imm, on_done, on_error) != 0;
    }
    void count(uint32_t domain, uint32_t imm, fi_addr_t source) {
        const uint64_t at = trace_.now();
        if (!peers_->count_imm(domain, source)) return;  // a stranger's
        auto [number, reached] = imms_.add(imm, peers_->engine_at(domain, source));
        trace_.mark<TransferEvent::arrival>(EngineTrack::arrivals, at, peers_->number_at(domain, source), imm, number);
        if (!reached) return;
        trace_.mark<TransferEvent::reached>(EngineTrack::arrivals, at, imm, number);
        callbacks_.put(std::move(reached));
    }
    void take(Operation* operation, uint64_t bytes, const std::string& error) {
        if (!operation) return;
        if (farewells_->owns(operation)) return farewells_->take(operation);
        if (!mailbox_->owns(operation)) return transfers_->take(operation, error);
        mailbox_->take(operation, bytes, error, [this](const Message& message) { receive(message); });
    }
    void receive(const Message& message) {
        const bool is_of_users = message.kind == MessageKind::payload || message.kind == MessageKind::taken ||
                                 message.kind == MessageKind::returned;
        is_of_users ? messages_->receive(message) : peers_->receive(message);
    }

    const FabricLibrary& library_;
    const std::vector<Net> nets_;
    const int pin_cpu_;
    const EngineName engine_;
    const PeerLimits limits_;
    CallbackThread& callbacks_;
    ImmCounters& imms_;
    SharedLoop& loop_;
    Queue<std::function<void()>> requests_;
    std::atomic<bool> is_stopping_ = false, is_recording_ = false;

    // Of the thread that does the turn, but for the first two, which stay as they are.
    std::vector<DomainAddress> addresses_;
    uint64_t max_write_bytes_ = ~uint64_t{0};
    WorkerTrace trace_;
    std::unique_ptr<Mailbox> mailbox_;  // its buffers outlive the endpoints
    std::vector<std::unique_ptr<Domain>> domains_;
    std::unique_ptr<UserMessages> messages_;
    std::unique_ptr<TransferQueue> transfers_;
    std::unique_ptr<Peers> peers_;
    std::unique_ptr<Farewells> farewells_;
    std::unique_ptr<Revocations> revocations_;
    std::map<uint64_t, std::shared_ptr<MemoryRegion>> regions_;  // that are open
    OnPeer on_peer_;
    std::vector<int> descriptors_;  // one a domain that tells when something has come; none if one cannot
    bool is_over_ = false;
    std::string broken_;  // why; all is closed then
    uint64_t num_turns_ = 0;
    TimePoint next_look_;
    TimePoint next_close_on_exec_, close_on_exec_until_;
    std::optional<TimePoint> last_moment_;  // of an engine that ends
    bool is_goodbye_said_ = false;
    std::thread worker_;
};

}  // namespace tracekern
