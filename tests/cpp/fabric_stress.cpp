// Transfer engines of one process under all calls at once, for sanitizers.
//
//   fabric_stress LIBRARY PROVIDER ROUNDS CALLS SEED
//
// In each round several engines write to each other from several threads while others start and stop recordings, keep
// messages, and wait together; then engines are stopped in the middle of traffic. Exits with 1 at the first byte or
// count that is wrong, and where a wait does not end.
#include <thread>

#include "fabric_stress_calls.hpp"

namespace {

using namespace stress;

constexpr uint32_t kMembers = 3, kThreads = 2;  // threads of each engine

using Threads = std::vector<std::jthread>;

// Starts and stops recordings of an engine, into memory that ends with each.
void record(const std::stop_token& stop, TransferEngine& engine) {
    while (!stop.stop_requested()) {
        auto tracks = std::make_unique<Tracks>(engine.num_domains());
        engine.start_trace(tracks->descriptor());
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        engine.stop_trace();
        tracks->check_headers();
        tracks.reset();
        std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
}

// Takes messages; another thread gives some of the buffers back.
class Receiver {
public:
    explicit Receiver(Member& member) : member_(member) {
        member_.engine->submit_bouncing_recvs(4000, 4, [this](std::shared_ptr<LentBuffer> lent) {
            {
                const std::lock_guard lock(member_.messages_mutex);
                member_.messages.emplace(lent->bytes());
            }
            if (++num_come_ % 3 == 0) return Interpreter::leave_for([&] { lent.reset(); });
            const std::lock_guard lock(mutex_);
            kept_.push_back(std::move(lent));
        });
    }
    void give_back(const std::stop_token& stop) {
        while (!stop.stop_requested()) {
            std::this_thread::sleep_for(std::chrono::microseconds(300));
            const std::lock_guard lock(mutex_);
            kept_.clear();
        }
    }

private:
    Member& member_;
    std::mutex mutex_;
    std::vector<std::shared_ptr<LentBuffer>> kept_;
    uint64_t num_come_ = 0;  // the callback's
};

// A word that this thread counts up; returns when the callback has seen the last value.
void count_word(TransferEngine& engine) {
    alignas(8) uint64_t word = 0;
    constexpr uint64_t kLast = 200;
    std::counting_semaphore<> seen(0);
    uint64_t last = 0;
    const uint64_t number = engine.watch(reinterpret_cast<uint64_t>(&word), [&](uint64_t old, uint64_t now) {
        check(old == last && now > old, "a watched word has gone back");
        last = now;
        if (now == kLast) seen.release();
        return true;
    });
    for (uint64_t i = 0; i < kLast; ++i) std::atomic_ref(word).fetch_add(1, std::memory_order_release);
    check(seen.try_acquire_for(kLimit), "a watched word's last value was not seen within the limit");
    engine.unwatch(number);
}

// All threads wait at the same counter for what one of them sends.
void wait_together(Member& source, Member& target, uint32_t imm) {
    constexpr uint32_t kEach = 20;
    const auto counter = target.engine->imms().make_counter(imm);
    Threads waiters;
    for (uint32_t i = 0; i < kThreads + 1; ++i) {
        waiters.emplace_back([&] {
            for (uint32_t turn = 0; turn < kEach; ++turn)
                check(counter->wait(2, kLimit), "a shared count was not reached");
        });
    }
    const auto done = std::make_shared<DoneCounter>();
    const uint32_t count = 2 * kEach * (kThreads + 1);
    for (uint32_t i = 0; i < count; ++i) source.engine->submit_imm(target.descriptor, imm, {}, done);
    check(done->wait(count, kLimit) && done->errors() == 0, "shared immediates were not confirmed");
    waiters.clear();
    check_count(counter->count(), 0, "the shared count");
    target.engine->imms().remove(imm);
}

std::vector<std::unique_ptr<Member>> make_members(const Setup& setup, uint32_t num_domains, bool is_blind) {
    const auto library = std::make_shared<FabricLibrary>(setup.library);
    std::vector<std::unique_ptr<Member>> members;
    for (uint32_t i = 0; i < kMembers; ++i) {
        members.push_back(
            std::make_unique<Member>(library, options_of(setup, num_domains, is_blind), kMembers * kThreads));
    }
    return members;
}
std::vector<Member*> others(const std::vector<std::unique_ptr<Member>>& members, uint32_t but) {
    std::vector<Member*> found;
    for (uint32_t i = 0; i < members.size(); ++i) {
        if (i != but) found.push_back(members[i].get());
    }
    return found;
}

void exchange(const Setup& setup, uint32_t num_domains, uint32_t calls, uint32_t seed) {
    const auto members = make_members(setup, num_domains, seed % 2 == 0);
    std::vector<std::unique_ptr<Receiver>> receivers;
    Threads beside, traffic;
    for (const auto& member : members) {
        receivers.push_back(std::make_unique<Receiver>(*member));
        beside.emplace_back([&engine = *member->engine](const std::stop_token& stop) { record(stop, engine); });
        beside.emplace_back([&receiver = *receivers.back()](const std::stop_token& stop) { receiver.give_back(stop); });
    }
    for (uint32_t source = 0; source < kMembers; ++source) {
        for (uint32_t thread = 0; thread < kThreads; ++thread) {
            const uint32_t area = source * kThreads + thread;
            traffic.emplace_back([&members, source, area, calls, seed] {
                Traffic made(*members[source], others(members, source), area, seed * 100 + area);
                for (uint32_t call = 0; call < calls; ++call) made.call_once();
                made.end();
            });
        }
        traffic.emplace_back([&members, source] {
            count_word(*members[source]->engine);
            wait_together(*members[source], *members[(source + 1) % kMembers], 1 << 20 | source);
        });
    }
    traffic.clear();
    beside.clear();
    for (const auto& member : members) member->engine->stop();  // some messages are still lent
}

void wait_until_stopped(ImmCounter& counter) {
    try {
        counter.wait(1, kLimit);
        fail("a wait at a stopped engine has not ended with that");
    } catch (const std::runtime_error& error) {
        check(std::string(error.what()) == "the engine was stopped", error.what());
    }
}

// One engine of three is stopped, then the one that writes: all that was submitted ends once, and memory can be freed
// at once.
void stop_in_the_middle(const Setup& setup, uint32_t num_domains, uint32_t seed) {
    auto members = make_members(setup, num_domains, seed % 2 == 0);
    Member& source = *members[0];
    std::mt19937 random(seed);
    PageList pages{{}, 256, 0};
    for (uint64_t i = 0; i < kAreaBytes / 256; ++i) pages.indices.push_back(i);
    std::vector<std::unique_ptr<Ending>> endings;
    // Each to an area of its own; who had it before has ended.
    constexpr uint32_t kUnderWay = 2 * kMembers * kThreads;
    const auto submit = [&] {
        const size_t call = endings.size();
        if (call >= kUnderWay) endings[call - kUnderWay]->wait();
        endings.push_back(std::make_unique<Ending>(random() % 3));
        pages.offset = call % kUnderWay / 2 * kAreaBytes;
        source.engine->submit_paged_writes(source.src,
                                           pages,
                                           members[1 + call % 2]->descriptor,
                                           pages,
                                           256,
                                           random() % 8,
                                           {},
                                           {},
                                           endings.back()->on_done());
    };
    // One that was stopped before they met would never answer.
    for (int i = 0; i < 2; ++i) submit();
    for (const auto& ending : endings) ending->must_be_done();
    std::jthread waiter([counter = members[1]->engine->imms().make_counter(9)] { wait_until_stopped(*counter); });
    std::atomic<bool> is_stopped = false;
    std::jthread stopper([&, wait_us = random() % 3000] {
        std::this_thread::sleep_for(std::chrono::microseconds(wait_us));
        members[1]->engine->stop();
        members[1]->received = {};
        members[1]->sent = {};
        is_stopped = true;
    });
    const auto until = std::chrono::steady_clock::now() + kLimit;
    while (!is_stopped || endings.size() < 20) {
        check(std::chrono::steady_clock::now() < until, "an engine did not stop within the limit");
        submit();
    }
    stopper.join();
    const size_t num_before = endings.size();
    for (uint32_t call = 0; call < 10; ++call) submit();
    source.engine->stop();
    source.sent = {};
    for (size_t i = 0; i < endings.size(); ++i) {
        check(endings[i]->has_come(), "a transfer of a stopped engine has not ended");
        const Result result = endings[i]->wait();
        check(result.is_ok() || !result.why.empty(), "a transfer has failed without a reason");
        const bool is_to_stopped = i >= num_before && i % 2 == 0;
        check(!is_to_stopped || !result.is_ok(), "a write to a stopped engine has arrived");
    }
    waiter.join();
    members.clear();
}

// Whatever an engine is asked for while it is stopped: each call does what it says, or says why not. What was taken
// ends.
class Caller {
public:
    // shared: a region that one caller registers and unregisters, and others write from.
    Caller(Member& source, const Member& target, uint32_t area, uint32_t seed, std::atomic<uint64_t>& shared)
        : source_(source), target_(target), area_(area), random_(seed), shared_(shared) {}

    void call_until_stopped() {
        try {
            while (true) call();
        } catch (const std::runtime_error& error) {
            check(std::string(error.what()) == "the engine was stopped", error.what());
        }
        finish();
    }

private:
    void finish() {
        for (const auto& ending : endings_) ending->wait();
        endings_.clear();
    }
    template <class Submit>
    void keep(Submit submit) {
        auto ending = std::make_unique<Ending>(random_() % 3);
        submit(ending->on_done());  // throws where it is not taken
        endings_.push_back(std::move(ending));
    }
    // The area is written to by one at a time.
    void write(uint64_t region, uint64_t from, uint64_t bytes, DomainGroupRouting routing, bool is_cancelled) {
        finish();
        keep([&](OnDone on_done) {
            const uint64_t number = source_.engine->submit_write(
                region, from, bytes, target_.descriptor, start(), {}, routing, {}, std::move(on_done));
            if (is_cancelled) source_.engine->cancel(number);
        });
    }
    void write_shared() {
        try {
            write(shared_, 0, 100, {1, {}}, false);
        } catch (const std::invalid_argument& error) {
            const std::string what = error.what();
            check(what.find("is not registered here") != std::string::npos, what);
        }
    }
    void register_and_unregister() {
        Bytes* memory = source_.make_memory(100);
        const uint64_t region =
            source_.engine->register_memory(address_of(*memory), memory->size(), owner_in(*source_.engine));
        source_.engine->describe(region);
        if (area_ == 0) {
            shared_ = region;
            std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
        }
        const std::string held = source_.engine->unregister_memory(region, kLimit);
        check(held.empty() || held == "the engine was stopped", "memory was not given back: " + held);
        source_.free_memory(memory);  // not where the engine has thrown: it may use it until it has stopped
    }
    void record_once() {
        if (area_ != 0) return;  // an engine has one recording at a time
        const Tracks tracks(source_.engine->num_domains());
        source_.engine->start_trace(tracks.descriptor());
        std::this_thread::yield();
        source_.engine->stop_trace();
    }
    void watch() {
        alignas(8) uint64_t word = 0;
        const auto go_on = [](uint64_t, uint64_t) { return true; };
        source_.engine->unwatch(source_.engine->watch(reinterpret_cast<uint64_t>(&word), go_on));
    }

    void call() {
        TransferEngine& engine = *source_.engine;
        switch (random_() % 2 ? random_() % 9 : area_ == 0 ? 5 : 7) {
            case 0:
                return finish();
            case 1:
                return write(source_.src, start(), kAreaBytes, {}, true);
            case 2:
                return write(source_.src, start(), 8, {1, {}}, false);
            case 3:
                return keep([&](OnDone on_done) {
                    engine.submit_paged_writes(
                        source_.src, {}, target_.descriptor, {}, 8, {}, {}, {}, std::move(on_done));
                });
            case 4:
                return keep(
                    [&](OnDone on_done) { engine.submit_send(engine.main_address(), "nobody", std::move(on_done)); });
            case 5:
                return register_and_unregister();
            case 6:
                return record_once();
            case 7:
                return write_shared();
            default:
                return watch();
        }
    }
    uint64_t start() const { return area_ * kAreaBytes; }

    Member& source_;
    const Member& target_;
    const uint32_t area_;
    std::mt19937 random_;
    std::atomic<uint64_t>& shared_;
    std::vector<std::unique_ptr<Ending>> endings_;  // of what was taken
};

void stop_under_calls(const Setup& setup, uint32_t num_domains, uint32_t seed) {
    const auto members = make_members(setup, num_domains, seed % 2 == 0);
    std::atomic<uint64_t> shared = 0;
    Threads callers;
    for (uint32_t i = 0; i < 3; ++i) {
        callers.emplace_back(
            [&, i] { Caller(*members[0], *members[1], i, seed * 10 + i, shared).call_until_stopped(); });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10 + seed % 20));
    for (uint32_t i = 0; i < 2; ++i) callers.emplace_back([&members] { members[0]->engine->stop(); });
    callers.clear();
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 6) {
        fprintf(stderr, "fabric_stress LIBRARY PROVIDER ROUNDS CALLS SEED\n");
        return 2;
    }
#ifdef TRACEKERN_CHECKED
    rule::holds_interpreter = Interpreter::is_here;
#endif
    const Setup setup{argv[1], argv[2]};
    const uint32_t rounds = std::stoul(argv[3]), calls = std::stoul(argv[4]), seed = std::stoul(argv[5]);
    for (uint32_t round = 0; round < rounds; ++round) {
        const uint32_t num_domains = 1 << round % 3;
        exchange(setup, num_domains, calls, seed + round);
        stop_in_the_middle(setup, num_domains, seed + round);
        stop_under_calls(setup, num_domains, seed + round);
        fprintf(stderr, "round %u: %u domains\n", round, num_domains);
    }
    printf("ok\n");
    return 0;
}
