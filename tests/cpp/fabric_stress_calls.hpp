// What fabric_stress.cpp calls: engines with memory, and the traffic of one thread, each byte and count of which is
// checked.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <semaphore>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fabric/engine.hpp"

namespace stress {

using namespace tracekern;

constexpr std::chrono::seconds kLimit{60};  // of each wait: a sanitizer on a busy machine is slow
constexpr uint64_t kAreaBytes = 64 << 10;   // of a thread, in the memory that it reads and in that of each target

inline thread_local const char* call_name = "outside of calls";

[[noreturn]] inline void fail(const std::string& what) {
    fprintf(stderr, "fabric_stress, %s: %s\n", call_name, what.c_str());
    fflush(stderr);
    _exit(1);
}
inline void check(bool is_so, const std::string& what) {
    if (!is_so) fail(what);
}
template <class Number, class Wanted>
void check_count(Number got, Wanted wanted, const char* what) {
    check(static_cast<uint64_t>(got) == static_cast<uint64_t>(wanted),
          std::string(what) + " is " + std::to_string(got) + ", wanted " + std::to_string(wanted));
}

// Stands for Python's: one lock, which callbacks have, and which nobody has who asks an engine for something.
class Interpreter {
public:
    class Lock {
    public:
        Lock() {
            mutex.lock();
            is_held = true;
        }
        Lock(const Lock&) = delete;
        ~Lock() {
            is_held = false;
            mutex.unlock();
        }
    };
    static std::shared_ptr<void> enter() { return std::make_shared<Lock>(); }
    static bool is_here() { return is_held; }
    // Asks an engine for something, in a callback.
    template <class Ask>
    static void leave_for(Ask ask) {
        check(is_held, "a callback without the interpreter");
        is_held = false;
        mutex.unlock();
        ask();
        mutex.lock();
        is_held = true;
    }

private:
    inline static std::mutex mutex;
    inline static thread_local bool is_held = false;
};

// What a user gives an engine to keep: its end asks the engine for something, as a `__del__` does.
class Owner {
public:
    explicit Owner(TransferEngine& engine) : engine_(&engine) {}
    Owner(Owner&& other) noexcept : engine_(std::exchange(other.engine_, nullptr)) {}
    ~Owner() {
        if (!engine_) return;
        Interpreter::leave_for([&] { engine_->imms().remove(kImm); });
    }

private:
    static constexpr uint32_t kImm = ~0u;
    TransferEngine* engine_;
};
inline std::shared_ptr<void> owner_in(TransferEngine& engine) {
    return engine.callbacks().keep(Owner(engine));
}

struct Setup {
    std::string library, provider;

    // The domains of an engine: so many, of which all or none have a descriptor.
    std::vector<Net> nets(uint32_t num_domains, bool is_blind) const {
        std::vector<Net> nets;
        for (uint32_t i = 0; i < num_domains; ++i) {
            std::string source;
            if (provider == "tcp") source = "127.0.0." + std::to_string(i + 1);
            if (provider == "in_process" && is_blind) source = "blind";
            nets.push_back({provider, source, "", 0});
        }
        return nets;
    }
};

// What a capture reserves for an engine; a track is full soon.
class Tracks {
public:
    explicit Tracks(uint32_t num_domains)
        : num_tracks_(static_cast<uint32_t>(EngineTrack::first_domain) + num_domains),
          headers_(num_tracks_),
          records_(num_tracks_ * kRecords) {
        launch_.region = {headers_.data(), records_.data()};
        launch_.event_mask = ~uint64_t{0};
        launch_.records_per_track = kRecords;
        launch_.warps_per_block = num_tracks_;
        launch_.block_stop = launch_.block_step = launch_.num_blocks = 1;
        launch_.role_mask = ~0u;
    }
    TraceChoice descriptor() const { return {&launch_, RecordFormat::span}; }
    // After the recording.
    void check_headers() const {
        for (const TrackHeader& header : headers_)
            check(header.start_ticks <= header.end_ticks, "a track ends before it starts");
    }

private:
    static constexpr uint32_t kRecords = 128;
    const uint32_t num_tracks_;
    std::vector<TrackHeader> headers_;
    std::vector<WideRecord> records_;
    LaunchDescriptor launch_{};
};

// How one transfer ends, learned in one of the three ways; exactly once.
class Ending {
public:
    explicit Ending(uint32_t way) : way_(way % 3) {}

    OnDone on_done() {
        if (way_ == 0) return flag_;
        if (way_ == 1) return counter_;
        return OnDone::Callback([called = called_](const Result& result) {
            check(!called->has_come.exchange(true), "on_done was called twice");
            called->result = result;
            called->pending.release();
        });
    }
    bool has_come() const {
        if (way_ == 0) return flag_->is_done();
        if (way_ == 1) return counter_->done() + counter_->errors() != 0;
        return called_->has_come;
    }
    Result wait() {
        if (way_ == 0) {
            check(flag_->wait(kLimit), "a flag was not set within the limit");
            return flag_->result();
        }
        if (way_ == 1) {
            check(counter_->wait(1, kLimit), "a transfer was not counted within the limit");
            check_count(counter_->done() + counter_->errors(), 1, "the number of ends of a transfer");
            return counter_->first_error();
        }
        check(called_->pending.try_acquire_for(kLimit), "on_done was not called within the limit");
        called_->pending.release();  // for the next wait
        return called_->result;
    }
    void must_be_done() {
        const Result result = wait();
        check(result.is_ok(), "a transfer has failed: " + result.why);
    }

private:
    struct Called {
        std::atomic<bool> has_come = false;
        std::counting_semaphore<> pending{0};
        Result result;
    };
    const uint32_t way_;
    std::shared_ptr<DoneFlag> flag_ = std::make_shared<DoneFlag>();
    std::shared_ptr<DoneCounter> counter_ = std::make_shared<DoneCounter>();
    std::shared_ptr<Called> called_ = std::make_shared<Called>();
};

// Memory that a sanitizer watches once nobody may use it any more.
using Bytes = std::vector<unsigned char>;
inline uint64_t address_of(const Bytes& bytes) {
    return reinterpret_cast<uint64_t>(bytes.data());
}

// An engine, memory that it writes from, and memory that others write to: an area a thread of each engine.
class Member {
public:
    Member(const std::shared_ptr<FabricLibrary>& library, const EngineOptions& options, uint32_t num_areas)
        : engine(std::make_unique<TransferEngine>(library, options, Interpreter::enter)),
          sent(kAreaBytes * num_areas),
          received(kAreaBytes * num_areas) {
        src = engine->register_memory(address_of(sent), sent.size(), owner_in(*engine));
        dst = engine->register_memory(address_of(received), received.size(), owner_in(*engine));
        descriptor = unpack_descriptor(pack(engine->describe(dst)));
    }

    std::unique_ptr<TransferEngine> engine;
    Bytes sent, received;
    uint64_t src = 0, dst = 0;
    MemoryRegionDescriptor descriptor{};
    std::mutex messages_mutex;
    std::multiset<std::string> messages;  // that have come

    // Memory that stays until it is freed, or as long as the engine.
    Bytes* make_memory(size_t bytes) {
        const std::lock_guard lock(memories_mutex_);
        return memories_.insert(std::make_unique<Bytes>(bytes)).first->get();
    }
    void free_memory(const Bytes* memory) {
        const std::lock_guard lock(memories_mutex_);
        std::erase_if(memories_, [&](const auto& one) { return one.get() == memory; });
    }

private:
    std::mutex memories_mutex_;
    std::set<std::unique_ptr<Bytes>> memories_;
};

inline EngineOptions options_of(const Setup& setup, uint32_t num_domains, bool is_blind) {
    EngineOptions options;
    options.nets = setup.nets(num_domains, is_blind);
    options.connect_limit = kLimit / 2;
    options.transfer_limit = kLimit / 2;
    return options;
}

// One thread's traffic from one engine to others.
class Traffic {
public:
    // area: of this thread alone, in the memory of all.
    Traffic(Member& source, std::vector<Member*> targets, uint32_t area, uint32_t seed)
        : source_(source), targets_(std::move(targets)), area_(area), random_(seed) {
        std::vector<MemoryRegionDescriptor> memory;
        for (Member* target : targets_) {
            memory.push_back(target->descriptor);
            counters_.push_back(target->engine->imms().make_counter(imm(0)));
        }
        group_ = source_.engine->add_peer_group(memory);
    }

    void call_once() {
        struct Call {
            const char* name;
            void (Traffic::*make)();
        };
        static constexpr Call kCalls[] = {{"write", &Traffic::write},
                                          {"short write", &Traffic::write_short},
                                          {"pages", &Traffic::write_pages},
                                          {"scatter", &Traffic::scatter},
                                          {"barrier", &Traffic::barrier},
                                          {"expectation", &Traffic::expect},
                                          {"cancel", &Traffic::cancel},
                                          {"unregister", &Traffic::unregister},
                                          {"unregister the source", &Traffic::unregister_source},
                                          {"message", &Traffic::send}};
        const Call& call = kCalls[draw(std::size(kCalls))];
        call_name = call.name;
        (this->*call.make)();
    }
    // All that has come was waited for.
    void end() {
        for (size_t i = 0; i < targets_.size(); ++i) {
            check_count(counters_[i]->count(), 0, "the number of immediates left over");
            const auto [arrived, lacking] = targets_[i]->engine->imms().remove(imm(0));
            check_count(arrived + lacking, 0, "the number of immediates left over or lacking");
        }
    }

private:
    uint32_t draw(uint64_t limit) { return static_cast<uint32_t>(random_() % limit); }
    // Of this thread alone.
    uint32_t imm(uint32_t kind) const { return area_ << 4 | kind; }
    uint64_t start() const { return area_ * kAreaBytes; }
    uint32_t draw_target() { return draw(targets_.size()); }
    uint32_t num_domains() const { return source_.engine->num_domains(); }
    DomainGroupRouting draw_routing() {
        if (draw(3) == 0) return {0, draw(num_domains())};
        return {draw(num_domains() + 1), {}};
    }
    GroupTransferRouting draw_group_routing() {
        return {static_cast<GroupTransferRouting::Kind>(draw(3)), draw(num_domains())};
    }
    uint32_t num_imms(DomainGroupRouting routing) const {
        return routing.pinned ? 1 : routing.num_shards ? routing.num_shards : num_domains();
    }
    uint32_t num_imms(GroupTransferRouting routing) const {
        return routing.kind == GroupTransferRouting::Kind::shard_bytes ? num_domains() : 1;
    }

    void fill() {
        const uint64_t drawn = random_();
        for (uint64_t i = 0; i < kAreaBytes; ++i)
            source_.sent[start() + i] = static_cast<unsigned char>(drawn + i * 7 + (i >> 8));
    }
    void compare(uint32_t target, uint64_t from, uint64_t to, uint64_t bytes) const {
        const bool is_equal =
            std::memcmp(&source_.sent[start()] + from, &targets_[target]->received[start()] + to, bytes) == 0;
        check(is_equal, "bytes are stale or wrong");
    }
    void wait_for_imms(uint32_t target, uint64_t count) {
        check(counters_[target]->wait(count, kLimit), "immediates were not there within the limit");
    }
    // Either tells that the bytes are there.
    template <class Compare>
    void wait_and_compare(Ending& ending, uint32_t target, uint64_t count, Compare compare) {
        if (draw(2) == 0) {
            wait_for_imms(target, count);
            compare();
            ending.must_be_done();
        } else {
            ending.must_be_done();
            compare();
            wait_for_imms(target, count);
        }
    }

    void write_some(uint64_t bytes, DomainGroupRouting routing) {
        fill();
        const uint32_t target = draw_target();
        const uint64_t from = draw(kAreaBytes - bytes + 1), to = draw(kAreaBytes - bytes + 1);
        Ending ending(draw(3));
        source_.engine->submit_write(source_.src,
                                     start() + from,
                                     bytes,
                                     targets_[target]->descriptor,
                                     start() + to,
                                     imm(0),
                                     routing,
                                     {},
                                     ending.on_done());
        wait_and_compare(ending, target, num_imms(routing), [&] { compare(target, from, to, bytes); });
    }
    void write() { write_some(draw(kAreaBytes), draw_routing()); }
    void write_short() { write_some(draw(256), {1, {}}); }

    struct Pages {
        PageList src, dst;
        uint64_t bytes;
    };
    Pages draw_pages(uint64_t start_dst) {
        constexpr uint64_t kPageBytes[] = {64, 256, 4096};
        Pages pages{{{}, 0, start()}, {{}, 0, start_dst}, kPageBytes[draw(3)]};
        const uint64_t count = draw(std::min<uint64_t>(kAreaBytes / pages.bytes, 200)) + 1;
        for (PageList* list : {&pages.src, &pages.dst}) {
            list->stride = pages.bytes;
            for (uint64_t i = 0; i < count; ++i) list->indices.push_back(i);
            std::shuffle(list->indices.begin(), list->indices.end(), random_);
        }
        return pages;
    }
    uint64_t submit_pages(const MemoryRegionDescriptor& to, const Pages& pages, uint32_t imm, Ending& ending) {
        const DomainGroupRouting routing = draw_routing();
        return source_.engine->submit_paged_writes(
            source_.src, pages.src, to, pages.dst, pages.bytes, imm, routing, {}, ending.on_done());
    }
    void write_pages() {
        fill();
        const uint32_t target = draw_target();
        const Pages pages = draw_pages(start());
        Ending ending(draw(3));
        submit_pages(targets_[target]->descriptor, pages, imm(0), ending);
        wait_and_compare(ending, target, pages.src.indices.size(), [&] {
            for (size_t i = 0; i < pages.src.indices.size(); ++i)
                compare(target, pages.src.indices[i] * pages.bytes, pages.dst.indices[i] * pages.bytes, pages.bytes);
        });
    }

    void scatter() {
        fill();
        std::vector<ScatterSlice> slices;
        for (size_t i = 0; i < targets_.size(); ++i) {
            const uint64_t bytes = draw(kAreaBytes / 2);
            slices.push_back({bytes, start() + draw(kAreaBytes / 2), start() + draw(kAreaBytes / 2)});
        }
        const auto routing = draw_group_routing();
        Ending ending(draw(3));
        source_.engine->submit_scatter(*group_, source_.src, slices, imm(0), routing, {}, ending.on_done());
        for (uint32_t i = 0; i < targets_.size(); ++i) {
            wait_for_imms(i, num_imms(routing));
            compare(i, slices[i].src - start(), slices[i].dst - start(), slices[i].bytes);
        }
        ending.must_be_done();
    }
    void barrier() {
        const auto routing = draw_group_routing();
        Ending ending(draw(3));
        source_.engine->submit_barrier(*group_, imm(0), routing, {}, ending.on_done());
        for (uint32_t i = 0; i < targets_.size(); ++i) wait_for_imms(i, num_imms(routing));
        ending.must_be_done();
    }

    // An expectation takes what came early and what comes, and leaves what is more.
    void expect() {
        const uint32_t target = draw_target(), sent = draw(20) + 1, wanted = draw(sent) + 1, early = draw(sent);
        TransferEngine& engine = *targets_[target]->engine;
        std::counting_semaphore<> reached(0);
        const auto counter = std::make_shared<DoneCounter>();
        for (uint32_t i = 0; i < sent; ++i) {
            if (i == early) {
                auto at_once = engine.imms().expect(imm(1), wanted, [&] { reached.release(); });
                if (at_once) engine.callbacks().put(std::move(*at_once));
            }
            source_.engine->submit_imm(targets_[target]->descriptor, imm(1), {}, counter);
        }
        check(reached.try_acquire_for(kLimit), "an expected count was not reached within the limit");
        check(counter->wait(sent, kLimit) && counter->errors() == 0, "immediates were not confirmed");
        // What is left may be on the way to the count.
        const auto until = std::chrono::steady_clock::now() + kLimit;
        uint64_t left = 0;
        while (left < sent - wanted && std::chrono::steady_clock::now() < until)
            left += engine.imms().remove(imm(1)).first;
        check_count(left, sent - wanted, "the number of immediates beyond the expected ones");
        check(!reached.try_acquire(), "an expectation was reached twice");
    }

    void cancel() {
        const uint32_t target = draw_target();
        const Pages pages = draw_pages(start());
        Ending ending(draw(3));
        const uint64_t number = submit_pages(targets_[target]->descriptor, pages, imm(0), ending);
        if (draw(2) == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw(200)));
        source_.engine->cancel(number);
        const Result result = ending.wait();
        uint64_t confirmed = pages.src.indices.size();
        if (!result.is_ok()) {
            check(result.outcome == Outcome::cancelled, "a cancelled transfer has ended otherwise: " + result.why);
            confirmed = confirmed_in(result.why);
        }
        wait_for_imms(target, confirmed);
    }
    // "... 3 of 7 writes were posted, 3 confirmed"
    static uint64_t confirmed_in(const std::string& why) {
        const auto at = why.rfind("posted, ");
        return at == std::string::npos ? 0 : std::strtoull(why.c_str() + at + 8, nullptr, 10);
    }

    // Memory that is taken back while it is written to, and freed at once.
    void unregister() {
        Member& target = *targets_[draw_target()];
        auto memory = std::make_unique<Bytes>(kAreaBytes);
        const uint64_t region =
            target.engine->register_memory(address_of(*memory), memory->size(), owner_in(*target.engine));
        const auto descriptor = target.engine->describe(region);
        const Pages pages = draw_pages(0);
        Ending ending(draw(3));
        submit_pages(descriptor, pages, imm(2), ending);
        if (draw(2) == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw(1000)));
        const std::string held = target.engine->unregister_memory(region, kLimit);
        check(held.empty(), "memory was not given back: " + held);
        memory.reset();
        const Result result = ending.wait();
        const bool is_right = result.is_ok() || result.why.find("the memory was unregistered") != std::string::npos;
        check(is_right, "a write to memory that was unregistered has ended otherwise: " + result.why);
        const uint64_t wanted = result.is_ok() ? pages.src.indices.size() : confirmed_in(result.why);
        const auto until = std::chrono::steady_clock::now() + kLimit;
        uint64_t counted = 0;
        while (counted < wanted && std::chrono::steady_clock::now() < until)
            counted += target.engine->imms().remove(imm(2)).first;
        check_count(counted, wanted, "the number of immediates of memory that was unregistered");
    }

    // The same of memory that is written from: all of it arrives.
    void unregister_source() {
        const uint32_t target = draw_target();
        auto memory = std::make_unique<Bytes>(kAreaBytes, static_cast<unsigned char>(draw(256)));
        const Bytes wanted = *memory;
        const uint64_t region =
            source_.engine->register_memory(address_of(*memory), memory->size(), owner_in(*source_.engine));
        Ending ending(draw(3));
        const auto routing = draw_routing();
        source_.engine->submit_write(
            region, 0, kAreaBytes, targets_[target]->descriptor, start(), imm(0), routing, {}, ending.on_done());
        const std::string held = source_.engine->unregister_memory(region, kLimit);
        check(held.empty(), "memory was not given back: " + held);
        memory.reset();
        wait_and_compare(ending, target, num_imms(routing), [&] {
            const auto* got = &targets_[target]->received[start()];
            check(std::equal(wanted.begin(), wanted.end(), got), "bytes are stale or wrong");
        });
    }

    // All the receiver's buffers may be in use: then it is sent again.
    void send() {
        Member& target = *targets_[draw_target()];
        std::string text = std::to_string(area_) + " " + std::to_string(num_sent_++) + " ";
        text.resize(text.size() + draw(3000), 'x');
        while (true) {
            Ending ending(draw(3));
            source_.engine->submit_send(target.engine->main_address(), text, ending.on_done());
            const Result result = ending.wait();
            if (result.is_ok()) break;
            check(result.why.find("receive buffers are in use") != std::string::npos,
                  "a message has failed: " + result.why);
        }
        const auto until = std::chrono::steady_clock::now() + kLimit;
        while (true) {
            {
                const std::lock_guard lock(target.messages_mutex);
                if (const auto found = target.messages.find(text); found != target.messages.end()) {
                    target.messages.erase(found);
                    return;
                }
            }
            check(std::chrono::steady_clock::now() < until, "a message was not there within the limit");
            std::this_thread::yield();
        }
    }

    Member& source_;
    const std::vector<Member*> targets_;
    const uint32_t area_;
    std::mt19937 random_;
    std::vector<std::shared_ptr<ImmCounter>> counters_;  // one a target
    std::shared_ptr<PeerGroup> group_;
    uint64_t num_sent_ = 0;
};

}  // namespace stress
