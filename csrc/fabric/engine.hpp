// TransferEngine: one-sided writes with counted immediates, on as many networks of this host as it was given.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fabric/domain_group.hpp"
#include "fabric/watchers.hpp"

namespace tracekern {

struct EngineOptions {
    std::vector<Net> nets;  // 1 to 4, a domain each
    int pin_cpu = -1;
    std::chrono::nanoseconds connect_limit{};
    std::chrono::nanoseconds transfer_limit{};  // for a transfer that says none; a peer that is silent for it is dead
};

// Of one transfer; nothing: the engine's.
using Limit = std::optional<std::chrono::nanoseconds>;

class TransferEngine {
public:
    TransferEngine(std::shared_ptr<const FabricLibrary> library, const EngineOptions& options)
        : library_(std::move(library)), number_(draw_number()), transfer_limit_(options.transfer_limit) {
        if (options.nets.empty() || options.nets.size() > kMaxDomains) {
            throw std::invalid_argument(std::to_string(options.nets.size()) + " domains; wanted 1 to 4");
        }
        callbacks_ = std::make_unique<CallbackThread>();
        const PeerLimits limits{options.connect_limit, options.transfer_limit};
        group_ = std::make_unique<DomainGroup>(
            *library_, options.nets, options.pin_cpu, number_, limits, *callbacks_, imms_, *turns_);
        watchers_ = std::make_unique<ScalarWatchers>();
    }
    ~TransferEngine() { end(); }

    uint32_t num_domains() const { return static_cast<uint32_t>(running().addresses().size()); }
    const DomainAddress& main_address() const { return running().addresses()[0]; }

    // Ends what is under way, and calls back for all of it. Nothing else may be called any more.
    void stop() {
        if (is_in_callback()) {
            throw std::invalid_argument(
                "stop() in a callback of the engine, which it would wait for; "
                "call it from another thread");
        }
        end();
    }
    // Its threads end with it, so that none of them can end it.
    bool is_in_callback() const { return group_ && !is_forked() && (callbacks_->is_here() || watchers_->is_here()); }

    // Records into tracks that a capture has reserved, until stop_trace() or stop().
    void start_trace(TraceChoice tracks) {
        running().start_trace(tracks.descriptor());
        imms_.trace().start(tracks.descriptor(), num_domains());
    }
    void stop_trace() {
        imms_.trace().stop();
        if (group_) group_->stop_trace();
    }

    // ---- memory ----

    // owner: is kept for as long as anybody may write there or read from there.
    uint64_t register_memory(uint64_t at, uint64_t bytes, std::shared_ptr<void> owner) {
        if (bytes == 0) throw std::invalid_argument("register_memory: 0 bytes; wanted at least 1");
        auto& group = running();
        auto region = std::make_shared<MemoryRegion>();
        region->at = reinterpret_cast<char*>(at);
        region->bytes = bytes;
        region->owner = std::move(owner);
        const std::lock_guard lock(mutex_);
        region->number = ++num_regions_;
        group.register_memory(region);
        regions_[region->number] = region;
        return region->number;
    }
    MemoryRegionDescriptor describe(uint64_t region) const {
        const auto memory = find(region);
        MemoryRegionDescriptor descriptor{number_, region, memory->bytes, {}};
        for (size_t i = 0; i < memory->ways.size(); ++i) {
            descriptor.ways.push_back({running().addresses()[i], memory->ways[i].key, memory->ways[i].base});
        }
        return descriptor;
    }
    // Returns "" when nobody can write there or read from there any more. Else who may still: it cannot be used, the
    // memory is kept, and this can be called again.
    std::string unregister_memory(uint64_t region, Limit limit) {
        auto& group = running();
        std::shared_ptr<MemoryRegion> memory;
        {
            const std::lock_guard lock(mutex_);
            memory = at(retired_.contains(region) ? retired_ : regions_, region);
            retired_[region] = memory;
            regions_.erase(region);
        }
        std::string held = group.unregister_memory(memory, limit.value_or(transfer_limit_));
        const std::lock_guard lock(mutex_);
        if (held.empty()) retired_.erase(region);
        return held;
    }

    // ---- transfers: everything is checked here, before anything is posted ----

    // num_shards: 0 for one a domain. first_domain: turned by the caller.
    uint64_t submit_write(uint64_t src_region,
                          uint64_t src_offset,
                          uint64_t bytes,
                          const MemoryRegionDescriptor& dst,
                          uint64_t dst_offset,
                          std::optional<uint32_t> imm,
                          uint32_t num_shards,
                          Limit limit,
                          OnDone on_done) {
        const auto src = find(src_region);
        check_peer(dst);
        check_range("source", src_offset, bytes, src->bytes);
        check_range("destination", dst_offset, bytes, dst.bytes);
        if (num_shards > num_domains()) {
            throw std::invalid_argument("num_shards is " + std::to_string(num_shards) +
                                        "; wanted at most one for each " + "of " + std::to_string(num_domains()) +
                                        " domains");
        }
        const uint32_t count = num_shards ? num_shards : num_domains();
        auto pieces = cut_write(src_offset, dst_offset, bytes, count, num_domains(), next_domain());
        return submit(src, dst, std::move(pieces), imm, limit, std::move(on_done));
    }

    uint64_t submit_paged_writes(uint64_t src_region,
                                 const PageList& src_pages,
                                 const MemoryRegionDescriptor& dst,
                                 const PageList& dst_pages,
                                 uint64_t page_bytes,
                                 std::optional<uint32_t> imm,
                                 Limit limit,
                                 OnDone on_done) {
        const auto src = find(src_region);
        check_peer(dst);
        if (src_pages.indices.size() != dst_pages.indices.size()) {
            throw std::invalid_argument(std::to_string(src_pages.indices.size()) + " source pages and " +
                                        std::to_string(dst_pages.indices.size()) +
                                        " destination pages; wanted as many");
        }
        check_pages("source", src_pages, page_bytes, src->bytes);
        check_pages("destination", dst_pages, page_bytes, dst.bytes);
        auto pieces = cut_pages(src_pages, dst_pages, page_bytes, num_domains(), next_domain());
        return submit(src, dst, std::move(pieces), imm, limit, std::move(on_done));
    }

    // An immediate alone.
    uint64_t submit_imm(const MemoryRegionDescriptor& dst, uint32_t imm, Limit limit, OnDone on_done) {
        check_peer(dst);
        return submit(nullptr, dst, {{next_domain(), 0, 0, 0}}, imm, limit, std::move(on_done));
    }
    // Posts no more of a transfer; it ends when what is posted has. Nothing happens to one that has ended.
    void cancel(uint64_t transfer) { running().cancel(transfer); }

    void submit_send(const DomainAddress& to, std::string payload, OnDone on_done) {
        if (payload.size() > kMaxPayloadBytes) {
            throw std::invalid_argument("a payload of " + std::to_string(payload.size()) + " bytes; wanted at most " +
                                        std::to_string(kMaxPayloadBytes));
        }
        auto& group = running();
        on_done.claim();
        group.send(to, std::move(payload), std::move(on_done));
    }
    void on_message(OnMessage on_message) { running().on_message(std::move(on_message)); }

    void on_peer(OnPeer on_peer) { running().on_peer(std::move(on_peer)); }

    // For tests: see shuffle.hpp.
    void shuffle(uint32_t seed) { running().shuffle(seed); }

    ImmCounters& imms() {
        check_process();
        return imms_;
    }
    CallbackThread& callbacks() {
        running();
        return *callbacks_;
    }
    // ---- words that kernels write to ----

    uint64_t watch(uint64_t word, ScalarWatchers::OnChange on_change) {
        running();
        return watchers_->add(reinterpret_cast<uint64_t*>(word), std::move(on_change));
    }
    void unwatch(uint64_t number) {
        if (watchers_ && !is_forked()) watchers_->remove(number);
    }

private:
    // A child of the process that made it has neither its threads nor its networks: they are left alone.
    bool is_forked() const { return num_forks.load(std::memory_order_relaxed) != made_after_; }
    void check_process() const {
        if (is_forked()) {
            throw std::runtime_error(
                "the engine was made before this process was forked, and cannot be used here; make one after the fork");
        }
    }

    void end() {
        if (is_forked()) {
            (void)watchers_.release();
            (void)group_.release();
            (void)callbacks_.release();
            return;
        }
        imms_.trace().stop();
        watchers_.reset();
        group_.reset();
        callbacks_.reset();
    }
    static uint64_t draw_number() {
        std::random_device random;
        return uint64_t{random()} << 32 | random();
    }

    DomainGroup& running() const {
        check_process();
        if (!group_) throw std::runtime_error("the engine was stopped");
        return *group_;
    }
    using Regions = std::map<uint64_t, std::shared_ptr<MemoryRegion>>;

    static const std::shared_ptr<MemoryRegion>& at(const Regions& regions, uint64_t region) {
        const auto found = regions.find(region);
        if (found == regions.end()) {
            throw std::invalid_argument("memory region " + std::to_string(region) +
                                        " is not registered here, or not any more");
        }
        return found->second;
    }
    std::shared_ptr<MemoryRegion> find(uint64_t region) const {
        check_process();
        const std::lock_guard lock(mutex_);
        return at(regions_, region);
    }
    void check_peer(const MemoryRegionDescriptor& dst) const {
        if (dst.ways.size() != num_domains()) {
            throw std::invalid_argument("the descriptor's engine has " + std::to_string(dst.ways.size()) +
                                        " domains, this one " + std::to_string(num_domains()) +
                                        "; wanted as many on each side");
        }
    }
    static void check_range(const char* what, uint64_t offset, uint64_t bytes, uint64_t size) {
        if (offset > size || bytes > size - offset) {
            throw std::invalid_argument(std::string(what) + ": " + std::to_string(bytes) + " bytes at " +
                                        std::to_string(offset) + " of a region of " + std::to_string(size));
        }
    }
    static void check_pages(const char* what, const PageList& pages, uint64_t page_bytes, uint64_t size) {
        for (const uint64_t index : pages.indices) {
            uint64_t start = 0;
            if (__builtin_mul_overflow(index, pages.stride, &start) ||
                __builtin_add_overflow(start, pages.offset, &start)) {
                throw std::invalid_argument(std::string(what) + ": page " + std::to_string(index) +
                                            " lies beyond 2^64 bytes");
            }
            check_range(what, start, page_bytes, size);
        }
    }
    // Round robin, so that small writes are spread over all networks.
    uint32_t next_domain() { return turn_.fetch_add(1, std::memory_order_relaxed) % num_domains(); }

    // Returns the transfer's number, which is as good as none where it has ended already.
    uint64_t submit(std::shared_ptr<MemoryRegion> src,
                    const MemoryRegionDescriptor& dst,
                    std::vector<TransferPiece> pieces,
                    std::optional<uint32_t> imm,
                    Limit limit,
                    OnDone on_done) {
        auto& group = running();
        on_done.claim();
        const uint64_t number = num_transfers_.fetch_add(1, std::memory_order_relaxed) + 1;
        if (pieces.empty()) {
            on_done.tell({}, *callbacks_);
            return number;
        }
        auto transfer = std::make_shared<Transfer>();
        transfer->src = std::move(src);
        transfer->dst = dst;
        transfer->pieces = std::move(pieces);
        transfer->imm = imm;
        transfer->on_done = std::move(on_done);
        transfer->number = number;
        transfer->until = std::chrono::steady_clock::now() + limit.value_or(transfer_limit_);
        group.submit(std::move(transfer));
        return number;
    }

    const std::shared_ptr<const FabricLibrary> library_;
    const uint64_t number_;
    const std::chrono::nanoseconds transfer_limit_;
    const uint32_t made_after_ = num_forks;  // forks
    const std::shared_ptr<Turns> turns_ = std::make_shared<Turns>();
    ImmCounters imms_{turns_};
    std::unique_ptr<CallbackThread> callbacks_;
    std::unique_ptr<DomainGroup> group_;
    std::unique_ptr<ScalarWatchers> watchers_;
    mutable std::mutex mutex_;   // of the regions
    Regions regions_, retired_;  // retired: on the way to be unregistered
    uint64_t num_regions_ = 0;
    std::atomic<uint64_t> num_transfers_ = 0;
    std::atomic<uint32_t> turn_ = 0;
};

}  // namespace tracekern
