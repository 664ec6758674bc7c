// TransferEngine: one-sided writes with counted immediates, on as many networks of this host as it was given.
#pragma once

#include <time.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fabric/domain_group.hpp"
#include "fabric/routing.hpp"
#include "fabric/watchers.hpp"

namespace tracekern {

struct EngineOptions {
    std::vector<Net> nets;  // 1 to 4, a domain each
    int pin_cpu = -1;
    std::chrono::nanoseconds connect_limit{};
    std::chrono::nanoseconds transfer_limit{};  // for a transfer that says none; a peer that is silent for it is dead
};

// Memory of peers that one request reaches, each its part. Of one engine.
struct PeerGroup {
    uint64_t engine;
    std::shared_ptr<Targets> targets;
};
// Of one transfer; nothing: the engine's.
using Limit = std::optional<std::chrono::nanoseconds>;

class TransferEngine {
public:
    // enter: see CallbackThread. first: of whose groups of domains this is a further one; they share immediates and the
    // callback thread.
    TransferEngine(std::shared_ptr<const FabricLibrary> library,
                   const EngineOptions& options,
                   CallbackThread::Enter enter = {},
                   const TransferEngine* first = nullptr)
        : library_(std::move(library)),
          transfer_limit_(options.transfer_limit),
          is_first_(!first),
          imms_(first ? first->imms_ : std::make_shared<ImmCounters>(loop_)) {
        if (first) first->running();
        if (options.nets.empty() || options.nets.size() > kMaxDomains) {
            throw std::invalid_argument(std::to_string(options.nets.size()) + " domains; wanted 1 to 4");
        }
        callbacks_ = first ? first->callbacks_ : CallbackThread::start(std::move(enter));
        const PeerLimits limits{options.connect_limit, options.transfer_limit};
        try {
            group_ = std::make_unique<DomainGroup>(
                *library_, options.nets, options.pin_cpu, name_, limits, *callbacks_, *imms_, *loop_);
        } catch (...) {
            if (is_first_) callbacks_->end(transfer_limit_);
            throw;
        }
    }
    ~TransferEngine() { stop(); }

    uint32_t num_domains() const { return static_cast<uint32_t>(running().addresses().size()); }
    EngineAddress main_address() const { return {running().addresses()[0], name_.secret}; }

    // Ends what is under way, and calls back for all of it; in a callback, which it does not wait for, after that one.
    // Calls that other threads make meanwhile end, too, or throw what later ones throw. Groups end before the first of
    // them. False: a callback has not returned within the limit, and goes on.
    bool stop(Limit limit = {}) {
        if (!process_.is_this()) {  // it has neither these threads nor their networks
            (void)new std::shared_ptr(watchers_);
            (void)group_.release();
            (void)new std::shared_ptr(callbacks_);
            return true;
        }
        rule::before_waiting();
        const bool is_in_callback = callbacks_->is_here() || watchers_->is_here();
        std::unique_lock stopping(stop_mutex_, std::defer_lock);
        if (!is_in_callback) {
            stopping.lock();
        } else if (!stopping.try_lock()) {
            return true;  // another thread does it, and waits for this one
        }
        return end(limit.value_or(transfer_limit_));
    }

    // Records into tracks that a capture has reserved, until stop_trace() or stop().
    void start_trace(TraceChoice tracks) {
        auto& group = running();
        if (is_first_) imms_->trace().start(tracks.descriptor(), num_domains());
        try {
            group.start_trace(tracks.descriptor());
        } catch (...) {
            if (is_first_) imms_->trace().stop();
            throw;
        }
    }
    void stop_trace() {
        if (!process_.is_this()) return;
        if (is_first_) imms_->trace().stop();
        group_->stop_trace();
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
        region->number = ++num_regions;
        group.register_memory(region);
        const std::lock_guard lock(mutex_);
        regions_[region->number] = region;
        return region->number;
    }
    MemoryRegionDescriptor describe(uint64_t region) const {
        const auto memory = find(region);
        MemoryRegionDescriptor descriptor{name_.number, name_.secret, region, memory->bytes, {}};
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

    uint64_t submit_write(uint64_t src_region,
                          uint64_t src_offset,
                          uint64_t bytes,
                          const MemoryRegionDescriptor& dst,
                          uint64_t dst_offset,
                          std::optional<uint32_t> imm,
                          DomainGroupRouting routing,
                          Limit limit,
                          OnDone on_done) {
        auto [src, targets] = find(src_region, dst);
        check_range("source", src_offset, bytes, src->bytes);
        check_range("destination", dst_offset, bytes, dst.bytes);
        std::vector<TransferPiece> pieces;
        cut_write(src_offset, dst_offset, bytes, 0, spread(routing), pieces);
        return submit(std::move(src), std::move(targets), std::move(pieces), imm, limit, std::move(on_done));
    }

    uint64_t submit_paged_writes(uint64_t src_region,
                                 const PageList& src_pages,
                                 const MemoryRegionDescriptor& dst,
                                 const PageList& dst_pages,
                                 uint64_t page_bytes,
                                 std::optional<uint32_t> imm,
                                 DomainGroupRouting routing,
                                 Limit limit,
                                 OnDone on_done) {
        auto [src, targets] = find(src_region, dst);
        if (src_pages.indices.size() != dst_pages.indices.size()) {
            throw std::invalid_argument(std::to_string(src_pages.indices.size()) + " source pages and " +
                                        std::to_string(dst_pages.indices.size()) +
                                        " destination pages; wanted as many");
        }
        check_pages("source", src_pages, page_bytes, src->bytes);
        check_pages("destination", dst_pages, page_bytes, dst.bytes);
        auto pieces = cut_pages(src_pages, dst_pages, page_bytes, spread(routing));
        return submit(std::move(src), std::move(targets), std::move(pieces), imm, limit, std::move(on_done));
    }

    // An immediate alone.
    uint64_t submit_imm(const MemoryRegionDescriptor& dst, uint32_t imm, Limit limit, OnDone on_done) {
        return submit(nullptr, targets_at(dst), {{0, next_domain(), 0, 0, 0}}, imm, limit, std::move(on_done));
    }
    // Posts no more of a transfer; it ends when what is posted has. Nothing happens to one that has ended.
    void cancel(uint64_t transfer) { running().cancel(transfer); }

    // ---- groups of peers ----

    std::shared_ptr<PeerGroup> add_peer_group(std::vector<MemoryRegionDescriptor> memory) {
        if (memory.empty()) throw std::invalid_argument("a group of 0 peers; wanted at least 1");
        for (const auto& descriptor : memory) check_peer(descriptor);
        auto group = std::make_shared<PeerGroup>(PeerGroup{name_.number, targets(std::move(memory))});
        running().meet(group->targets);
        return group;
    }

    uint64_t submit_scatter(const PeerGroup& group,
                            uint64_t src_region,
                            const std::vector<ScatterSlice>& slices,
                            std::optional<uint32_t> imm,
                            GroupTransferRouting routing,
                            Limit limit,
                            OnDone on_done) {
        const auto src = find(src_region);
        check_group(group, routing);
        const auto& memory = group.targets->memory;
        if (slices.size() != memory.size()) {
            throw std::invalid_argument(std::to_string(slices.size()) + " slices for a group of " +
                                        std::to_string(memory.size()) + " peers; wanted one for each");
        }
        for (size_t i = 0; i < slices.size(); ++i) {
            const std::string which = "slice " + std::to_string(i);
            check_range(which + ", source", slices[i].src, slices[i].bytes, src->bytes);
            check_range(which + ", destination", slices[i].dst, slices[i].bytes, memory[i].bytes);
        }
        auto pieces = cut_scatter(slices, routing, num_domains(), next_domain());
        return submit(src, group.targets, std::move(pieces), imm, limit, std::move(on_done));
    }

    // An immediate alone, to each peer.
    uint64_t submit_barrier(
        const PeerGroup& group, uint32_t imm, GroupTransferRouting routing, Limit limit, OnDone on_done) {
        check_group(group, routing);
        const std::vector<ScatterSlice> slices(group.targets->memory.size(), ScatterSlice{0, 0, 0});
        auto pieces = cut_scatter(slices, routing, num_domains(), next_domain());
        return submit(nullptr, group.targets, std::move(pieces), imm, limit, std::move(on_done));
    }

    // ---- messages ----

    void submit_send(const EngineAddress& to, std::string payload, OnDone on_done) {
        if (payload.size() > kMaxPayloadBytes) {
            throw std::invalid_argument("a payload of " + std::to_string(payload.size()) + " bytes; wanted at most " +
                                        std::to_string(kMaxPayloadBytes));
        }
        auto& group = running();
        on_done.claim(loop_);
        group.send(to, std::move(payload), std::move(on_done));
    }
    // Lends each message that comes, of up to `bytes`, to the callback; `count` at most at a time.
    void submit_bouncing_recvs(uint64_t bytes, uint64_t count, OnMessage on_message) {
        if (bytes < 1 || bytes > kMaxPayloadBytes) {
            throw std::invalid_argument("receive buffers of " + std::to_string(bytes) + " bytes; wanted 1 to " +
                                        std::to_string(kMaxPayloadBytes));
        }
        if (count < 1 || count > kMaxLent) {
            throw std::invalid_argument(std::to_string(count) + " receive buffers; wanted 1 to " +
                                        std::to_string(kMaxLent));
        }
        running().lend_messages_to(bytes, static_cast<uint32_t>(count), std::move(on_message));
    }

    void on_peer(OnPeer on_peer) { running().on_peer(std::move(on_peer)); }

    ImmCounters& imms() {
        process_.require("the engine");
        return *imms_;
    }
    CallbackThread& callbacks() { return *callbacks_; }
    // ---- words that kernels write to ----

    uint64_t watch(uint64_t word, ScalarWatchers::OnChange on_change) {
        running();
        return watchers_->add(reinterpret_cast<uint64_t*>(word), std::move(on_change));
    }
    void unwatch(uint64_t number) {
        if (process_.is_this()) watchers_->remove(number);
    }

private:
    static constexpr uint64_t kMaxLent = 65536;  // receive buffers

    // All of them stay until nobody calls any more; what users gave is let go of.
    bool end(std::chrono::nanoseconds limit) {
        is_stopped_.store(true, std::memory_order_relaxed);
        bool has_ended = watchers_->end(limit);
        group_->end();
        {
            const std::lock_guard lock(mutex_);
            regions_.clear();
            retired_.clear();
            targets_.clear();
        }
        if (!is_first_) return has_ended;
        imms_->interrupt("the engine was stopped", true);
        has_ended &= callbacks_->end(limit);
        imms_->trace().stop();  // of recordings that the group took until its end
        return has_ended;
    }
    // What steady_clock said up to kCoarse ago, at a fifth of its price: transfers are looked at every 5 ms only.
    static constexpr std::chrono::milliseconds kCoarse{10};
    static std::chrono::nanoseconds coarse_now() {
        timespec time{};
        clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
        return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
    }
    DomainGroup& running() const {
        process_.require("the engine");
        // Relaxed: what comes meanwhile is refused by what has ended.
        if (is_stopped_.load(std::memory_order_relaxed)) throw std::runtime_error("the engine was stopped");
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
        process_.require("the engine");
        const std::lock_guard lock(mutex_);
        return at(regions_, region);
    }
    // Both under one lock: a short write is counted in nanoseconds.
    std::pair<std::shared_ptr<MemoryRegion>, std::shared_ptr<Targets>> find(uint64_t src,
                                                                            const MemoryRegionDescriptor& dst) {
        process_.require("the engine");
        check_peer(dst);
        const std::lock_guard lock(mutex_);
        return {at(regions_, src), keep_targets(dst)};
    }
    std::shared_ptr<Targets> targets_at(const MemoryRegionDescriptor& dst) {
        check_peer(dst);
        const std::lock_guard lock(mutex_);
        return keep_targets(dst);
    }
    // Transfers to the same memory share them, so that peers are looked up once. Under the lock.
    std::shared_ptr<Targets> keep_targets(const MemoryRegionDescriptor& dst) {
        constexpr size_t kMostKept = 1024;
        if (targets_.size() > kMostKept) targets_.clear();
        auto& kept = targets_[{dst.engine, dst.region}];
        if (!kept || !(kept->memory[0] == dst)) kept = targets({dst});
        return kept;
    }
    void check_peer(const MemoryRegionDescriptor& dst) const {
        if (dst.ways.size() != num_domains()) {
            throw std::invalid_argument("the descriptor's engine has " + std::to_string(dst.ways.size()) +
                                        " domains, this one " + std::to_string(num_domains()) +
                                        "; wanted as many on each side");
        }
    }
    void check_group(const PeerGroup& group, GroupTransferRouting routing) const {
        if (group.engine != name_.number) throw std::invalid_argument("the group of peers is another engine's");
        if (routing.kind == GroupTransferRouting::Kind::single) check_domain(routing.domain);
    }
    void check_domain(uint32_t domain) const {
        if (domain >= num_domains()) {
            throw std::invalid_argument("domain " + std::to_string(domain) + "; wanted 0 to " +
                                        std::to_string(num_domains() - 1));
        }
    }
    static void check_range(std::string_view what, uint64_t offset, uint64_t bytes, uint64_t size) {
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
    Spread spread(DomainGroupRouting routing) {
        const uint32_t all = num_domains();
        if (routing.pinned) {
            check_domain(*routing.pinned);
            return {*routing.pinned, 1, all};
        }
        if (routing.num_shards > all) {
            throw std::invalid_argument("num_shards is " + std::to_string(routing.num_shards) +
                                        "; wanted at most one for each of " + std::to_string(all) + " domains");
        }
        return {next_domain(), routing.num_shards ? routing.num_shards : all, all};
    }
    static std::shared_ptr<Targets> targets(std::vector<MemoryRegionDescriptor> memory) {
        auto made = std::make_shared<Targets>();
        made->memory = std::move(memory);
        return made;
    }
    // Round robin, so that small writes are spread over all networks.
    uint32_t next_domain() { return turn_.fetch_add(1, std::memory_order_relaxed) % num_domains(); }

    // Returns the transfer's number, which is as good as none where it has ended already.
    uint64_t submit(std::shared_ptr<MemoryRegion> src,
                    std::shared_ptr<Targets> targets,
                    std::vector<TransferPiece> pieces,
                    std::optional<uint32_t> imm,
                    Limit limit,
                    OnDone on_done) {
        auto& group = running();
        on_done.claim(loop_);
        const uint64_t number = num_transfers_.fetch_add(1, std::memory_order_relaxed) + 1;
        if (pieces.empty()) {
            on_done.tell({}, *callbacks_);
            return number;
        }
        auto transfer = std::make_shared<Transfer>();
        transfer->num_before_imms = cut_to(group.max_write_bytes(), imm.has_value(), pieces);
        transfer->src = std::move(src);
        transfer->targets = std::move(targets);
        transfer->pieces = std::move(pieces);
        transfer->imm = imm;
        transfer->on_done = std::move(on_done);
        transfer->number = number;
        transfer->until = TimePoint(coarse_now()) + kCoarse + limit.value_or(transfer_limit_);
        group.submit(std::move(transfer));
        return number;
    }

    const std::shared_ptr<const FabricLibrary> library_;
    const EngineName name_{draw_number(), draw_number()};
    const std::chrono::nanoseconds transfer_limit_;
    const Process process_;
    const bool is_first_;
    const std::shared_ptr<SharedLoop> loop_ = std::make_shared<SharedLoop>();
    const std::shared_ptr<ImmCounters> imms_;
    std::shared_ptr<CallbackThread> callbacks_;
    std::unique_ptr<DomainGroup> group_;
    const std::shared_ptr<ScalarWatchers> watchers_ = std::make_shared<ScalarWatchers>();
    rule::Mutex stop_mutex_;
    std::atomic<bool> is_stopped_ = false;
    mutable rule::Mutex mutex_;                                                  // of the regions and targets
    std::map<std::pair<uint64_t, uint64_t>, std::shared_ptr<Targets>> targets_;  // by engine and region
    Regions regions_, retired_;                           // retired: on the way to be unregistered
    inline static std::atomic<uint64_t> num_regions = 0;  // of the process: a handle is of one engine alone
    std::atomic<uint64_t> num_transfers_ = 0;
    std::atomic<uint32_t> turn_ = 0;
};

}  // namespace tracekern
