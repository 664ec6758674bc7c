// Engines of one process that write to each other from several threads, lend messages, watch words and lose peers: for
// the sanitizers. Prints what went wrong and returns 1, or nothing and 0.
//
//   fabric_stress LIBFABRIC ROUNDS
#include <cstdio>
#include <cstdlib>

#include "fabric/engine.hpp"

namespace {

using namespace tracekern;
using namespace std::chrono_literals;
using Kind = GroupTransferRouting::Kind;

constexpr uint64_t kBytes = 1 << 16;
constexpr uint32_t kImm = 5;
constexpr uint64_t kRequests = 60;  // of each thread
constexpr auto kLimit = 30s;

void require(bool is_so, const std::string& what) {
    if (is_so) return;
    std::printf("%s\n", what.c_str());
    std::exit(1);
}

template <class IsSo>
void wait_until(IsSo is_so, const char* what) {
    for (int i = 0; i < 30000 && !is_so(); ++i) std::this_thread::sleep_for(1ms);
    require(is_so(), what);
}

// Memory of an engine, which both end together.
struct Host {
    Host(const std::shared_ptr<FabricLibrary>& library,
         const EngineOptions& options,
         const TransferEngine* first = nullptr)
        : memory(kBytes), engine(std::make_unique<TransferEngine>(library, options, first)) {
        region = engine->register_memory(reinterpret_cast<uint64_t>(memory.data()), kBytes, nullptr);
    }
    MemoryRegionDescriptor describe() const { return engine->describe(region); }

    std::vector<char> memory;
    uint64_t region = 0;
    std::unique_ptr<TransferEngine> engine;
};

struct Round {
    explicit Round(const std::shared_ptr<FabricLibrary>& library) {
        options.nets = {{"tcp", "127.0.0.1", "", 0}, {"tcp", "127.0.0.2", "", 0}};
        options.connect_limit = options.transfer_limit = kLimit;
        source = std::make_unique<Host>(library, options);
        other_group = std::make_unique<Host>(library, options, source->engine.get());
        for (auto& target : targets) target = std::make_unique<Host>(library, options);
        std::vector<MemoryRegionDescriptor> memory;
        for (const auto& target : targets) memory.push_back(target->describe());
        group = source->engine->add_peer_group(memory);
    }

    uint64_t scatter(uint64_t bytes, Kind kind, OnDone on_done) {
        const std::vector<ScatterSlice> slices = {{bytes, 0, 0}, {0, 0, 0}, {4096, 64, 64}};
        return source->engine->submit_scatter(
            *group, source->region, slices, kImm, {kind, 1}, std::nullopt, std::move(on_done));
    }

    // Three threads at a time; a fourth waits for what they raise.
    void write() {
        const auto done = std::make_shared<DoneCounter>();
        const auto counter = targets[0]->engine->imms().make_counter(kImm);
        const auto first = targets[0]->describe();
        const auto write = [&](uint32_t thread) {
            for (uint64_t i = 0; i < kRequests; ++i) {
                const uint64_t number = scatter(100 * i, static_cast<Kind>(i % 3), OnDone(done));
                source->engine->cancel(number / 2);  // of this engine; it may have ended
                source->engine->submit_barrier(*group, kImm, {Kind::shard_bytes, 0}, std::nullopt, OnDone(done));
                other_group->engine->submit_write(
                    other_group->region, 0, 100, first, 64 * thread, kImm, {}, std::nullopt, OnDone(done));
            }
        };
        std::vector<std::thread> threads;
        for (uint32_t thread = 0; thread < 3; ++thread) threads.emplace_back(write, thread);
        // Of the other group's writes, which nobody cancels, two each; of all else what comes.
        require(counter->wait(3 * kRequests * 2, kLimit), "immediates are missing");
        for (auto& thread : threads) thread.join();
        require(done->wait(9 * kRequests, kLimit), "transfers have not ended");
    }

    void send() {
        std::mutex mutex;
        std::vector<std::shared_ptr<LentBuffer>> kept;
        std::atomic<uint64_t> lent = 0;
        targets[0]->engine->submit_bouncing_recvs(4000, 8, [&](std::shared_ptr<LentBuffer> message) {
            ++lent;
            const std::lock_guard lock(mutex);
            if (kept.size() < 4) kept.push_back(std::move(message));
        });
        const auto done = std::make_shared<DoneCounter>();
        for (uint64_t i = 0; i < 200; ++i) {
            source->engine->submit_send(targets[0]->engine->main_address(), std::string(i * 22, 'x'), OnDone(done));
        }
        require(done->wait(200, kLimit), "messages have no answer");
        wait_until([&] { return lent == done->done(); }, "messages were confirmed and not lent");
        require(done->done() >= 8, "buffers were free, and messages refused");
        const std::lock_guard lock(mutex);
        for (const auto& message : kept) {
            require(message->bytes().find_first_not_of('x') == std::string_view::npos, "a lent message has changed");
        }
        held = std::move(kept);  // for longer than the engine is there
    }

    void watch() {
        std::atomic<uint64_t> word = 0, seen = 0;
        const uint64_t number = source->engine->watch(reinterpret_cast<uint64_t>(&word), [&](uint64_t, uint64_t now) {
            seen = now;
            return true;
        });
        for (int i = 0; i < 1000; ++i) ++word;
        wait_until([&] { return seen == 1000; }, "a watched word was not seen");
        source->engine->unwatch(number);
    }

    // While a thread writes there, some of it with a limit that none can meet.
    void take_back() {
        const auto done = std::make_shared<DoneCounter>();
        Host& target = *targets[2];
        const auto dst = target.describe();
        std::thread writer([&] {
            for (uint64_t i = 0; i < kRequests; ++i) {
                const Limit limit = i % 2 ? Limit(1us) : std::nullopt;
                source->engine->submit_write(source->region, 0, kBytes, dst, 0, std::nullopt, {}, limit, OnDone(done));
            }
        });
        require(target.engine->unregister_memory(target.region, kLimit).empty(), "memory is still in use");
        target.memory.assign(kBytes, 'y');
        writer.join();
        require(done->wait(kRequests, kLimit), "transfers to memory that was taken back have not ended");
        require(target.memory == std::vector<char>(kBytes, 'y'), "memory was written to that was taken back");
    }

    void lose_peers() {
        const auto done = std::make_shared<DoneCounter>();
        require(targets[0]->engine->unregister_memory(targets[0]->region, kLimit).empty(), "memory is still in use");
        scatter(1, Kind::shard_peers, OnDone(done));
        targets[1]->engine->stop();
        scatter(1, Kind::shard_peers, OnDone(done));
        require(done->wait(2, kLimit) && done->errors() == 2, "a lost peer was written to");
    }

    EngineOptions options;
    std::vector<std::shared_ptr<LentBuffer>> held;
    std::unique_ptr<Host> source, other_group, targets[3];
    std::shared_ptr<PeerGroup> group;
};

}  // namespace

int main(int, char** arguments) {
    const auto library = std::make_shared<FabricLibrary>(arguments[1]);
    for (int rounds = std::atoi(arguments[2]); rounds > 0; --rounds) {
        Round round(library);
        round.write();
        round.send();
        round.watch();
        round.take_back();
        round.lose_peers();
    }
}
