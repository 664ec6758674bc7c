// The worker of an engine: one thread that owns one to four domains, posts what others submit, and takes what arrives.
//
// In every turn: new requests first, and the first write of each at once; then as many more as there is room for; then
// the completion queues. Nothing else touches a domain, but for threads that do the worker's turns (turns.hpp).
#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fabric/callbacks.hpp"
#include "fabric/imm_counters.hpp"
#include "fabric/mailbox.hpp"
#include "fabric/peers.hpp"
#include "fabric/queue.hpp"
#include "fabric/transfer_queue.hpp"
#include "fabric/turns.hpp"

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
                ImmCounters& imms,
                Turns& turns)
        : library_(library),
          nets_(std::move(nets)),
          pin_cpu_(pin_cpu),
          engine_(engine),
          connect_limit_(connect_limit),
          callbacks_(callbacks),
          imms_(imms),
          turns_(turns) {
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
        is_stopping_.store(true, std::memory_order_seq_cst);
        turns_.wake();
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
    // Their engines are to answer before the first transfer comes.
    void meet(std::shared_ptr<Targets> targets) {
        put([this, targets = std::move(targets)] { peers_->meet_all(*targets); });
    }
    // A short write is posted here and now where the worker has a moment: it would cost a change of threads.
    void submit(std::shared_ptr<Transfer> transfer) {
        // Relaxed: one that is submitted as the recording begins may miss its own time, and gets the worker's.
        if (is_recording_.load(std::memory_order_relaxed)) transfer->submitted = HostTrack::now();
        bool is_started = false;
        if (transfer->is_short()) {
            turns_.try_between([&] {
                if (requests_.has_new()) return;  // those first
                start(transfer);
                is_started = true;
                if (transfer->num_posted == 0) turns_.wake();
            });
        }
        if (is_started) return turns_.wake(Turns::Sleep::asleep);
        put([this, transfer = std::move(transfer)] { start(transfer); });
    }
    void send(DomainAddress to, std::string payload, OnDone on_done) {
        put([this, to = std::move(to), payload = std::move(payload), on_done = std::move(on_done)] {
            try {
                mailbox_->send(domains_[0]->insert(to), {MessageKind::payload, engine_, {}, payload}, on_done);
            } catch (const std::runtime_error& error) {
                mailbox_->end(on_done, std::string("send: ") + error.what());
            }
        });
    }
    // The region has a track for each EngineTrack and domain.
    void start_trace(const LaunchDescriptor& launch) {
        call([&] {
            trace_.start(launch, static_cast<uint32_t>(domains_.size()), engine_);
            peers_->introduce();
        });
        is_recording_.store(true, std::memory_order_relaxed);
    }
    void stop_trace() {
        is_recording_.store(false, std::memory_order_relaxed);
        call([&] { trace_.stop(); });
    }
    void on_message(OnMessage on_message) {
        call([&] { on_message_ = std::move(on_message); });
    }

private:
    void start(const std::shared_ptr<Transfer>& transfer) {
        transfers_->admit(*transfer);
        peers_->start(transfer);
    }
    void put(std::function<void()> request) {
        requests_.put(std::move(request));
        turns_.wake();
    }
    // Runs between two turns; throws here what it throws there.
    void call(std::function<void()> what) {
        std::promise<void> done;
        put([&] {
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
        turns_.work([this] { return turn(); },
                    [this] { return is_over_; },
                    [this] { return may_sleep(); },
                    [this] { return requests_.has_new() || is_stopping_.load(std::memory_order_seq_cst); },
                    descriptors_);
        close();
    }
    bool turn() {
        const bool is_stopping = is_stopping_.load(std::memory_order_acquire);  // nothing is put behind it
        bool is_busy = false;
        while (const auto request = requests_.take()) {
            (*request)();
            is_busy = true;
        }
        is_busy |= mailbox_->send_more();
        is_busy |= transfers_->post_more();
        peers_->give_up_on_silent();
        for (uint32_t domain = 0; domain < domains_.size(); ++domain) is_busy |= poll(domain);
        if (is_stopping) {
            fail_what_waits();
            is_over_ = !is_busy && transfers_->num_under_way() + mailbox_->num_under_way() == 0;
        }
        return is_busy;
    }
    bool may_sleep() {
        for (const auto& domain : domains_) {
            if (!domain->may_sleep()) return false;
        }
        return true;
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
        for (const auto& domain : domains_) descriptors_.push_back(domain->descriptor());
        if (std::count(descriptors_.begin(), descriptors_.end(), -1)) descriptors_.clear();
        mailbox_ = std::make_unique<Mailbox>(library_, *domains_[0], connect_limit_, callbacks_);
        transfers_ = std::make_unique<TransferQueue>(library_, domains_, callbacks_, trace_);
        const Peers::Hooks hooks{
            [this](const auto& transfer) { transfers_->start(transfer); },
            [this](const auto& transfer, const std::string& why) { transfers_->end(transfer, why); }};
        peers_ = std::make_unique<Peers>(engine_, domains_, addresses_, connect_limit_, *mailbox_, trace_, hooks);
    }
    void close() {
        if (mailbox_) mailbox_->close_memory();
        domains_.clear();
    }

    bool poll(uint32_t domain) {
        const auto on_imm = [&](uint32_t imm, fi_addr_t source) {
            const uint64_t at = trace_.now();
            auto [number, reached] = imms_.add(imm);
            trace_.mark<TransferEvent::arrival>(
                EngineTrack::arrivals, at, peers_->number_at(domain, source), imm, number);
            if (!reached) return;
            trace_.mark<TransferEvent::reached>(EngineTrack::arrivals, at, imm, number);
            callbacks_.put(std::move(reached));
        };
        const auto on_done = [&](Operation* operation, uint64_t bytes) { take(operation, bytes, ""); };
        const auto on_error = [&](Operation* operation, const std::string& error) { take(operation, 0, error); };
        return domains_[domain]->poll(on_imm, on_done, on_error) != 0;
    }
    void take(Operation* operation, uint64_t bytes, const std::string& error) {
        if (!operation) return;
        if (!mailbox_->owns(operation)) return transfers_->take(operation, error);
        mailbox_->take(operation, bytes, error, [this](const Message& message) { receive(message); });
    }
    void receive(const Message& message) {
        if (message.kind != MessageKind::payload) return peers_->receive(message);
        if (on_message_) callbacks_.put([on_message = on_message_, text = message.text] { on_message(text); });
    }

    void fail_what_waits() {
        const std::string why = "the engine was stopped";
        peers_->fail_waiting(why);
        mailbox_->fail_unsent(why);
        transfers_->fail_active(why);
    }

    const FabricLibrary& library_;
    const std::vector<Net> nets_;
    const int pin_cpu_;
    const uint64_t engine_;
    const std::chrono::nanoseconds connect_limit_;
    CallbackThread& callbacks_;
    ImmCounters& imms_;
    Turns& turns_;
    Queue<std::function<void()>> requests_;
    std::atomic<bool> is_stopping_ = false, is_recording_ = false;

    // The worker's, but for addresses_, which stay as they are.
    WorkerTrace trace_;
    std::vector<DomainAddress> addresses_;
    std::unique_ptr<Mailbox> mailbox_;  // its buffers outlive the endpoints
    std::vector<std::unique_ptr<Domain>> domains_;
    std::unique_ptr<TransferQueue> transfers_;
    std::unique_ptr<Peers> peers_;
    OnMessage on_message_;
    std::vector<int> descriptors_;  // one a domain that tells when something has come; none if one cannot
    bool is_over_ = false;
    std::thread worker_;
};

}  // namespace tracekern
