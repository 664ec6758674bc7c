// The turns of an engine without a network: threads submit, threads wait for what they submitted to be counted, and
// each of them does the worker's turns now and then. Made for the race detector.
//
//   fabric_turns WAITERS ROUNDS
//
// Exit: 0 each wait got what it asked for, and nothing is left over; 1 not; 2 usage.
#include <sys/eventfd.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "fabric/imm_counters.hpp"
#include "fabric/queue.hpp"
#include "fabric/shared_loop.hpp"

using namespace tracekern;

namespace {

// A worker whose requests are immediates that arrive.
class Arrivals {
public:
    Arrivals() : worker_([this] { run(); }) {}
    ~Arrivals() {
        is_stopping_.store(true, std::memory_order_seq_cst);
        turns_->wake();
        worker_.join();
        close(never_);
    }

    // At once where no turn is under way, as a short write is posted; else by whoever does the next turn.
    void arrive(uint32_t imm, bool may_be_here) {
        bool is_done = false;
        if (may_be_here) {
            turns_->try_between([&] {
                if (requests_.has_new()) return;
                imms_.add(imm, 0);
                is_done = true;
            });
        }
        if (is_done) return;
        requests_.put(uint32_t{imm});
        turns_->wake();
    }
    std::shared_ptr<ImmCounter> count(uint32_t imm) { return imms_.make_counter(imm); }

private:
    void run() {
        turns_->work([this](bool) { return turn(); },
                     [this] { return is_over_; },
                     [] { return true; },
                     [this] { return requests_.has_new() || is_stopping_.load(std::memory_order_seq_cst); },
                     {never_});
    }
    bool turn() {
        const bool is_stopping = is_stopping_.load(std::memory_order_acquire);
        bool is_busy = false;
        while (const auto imm = requests_.take()) {
            imms_.add(*imm, 0);
            is_busy = true;
        }
        is_over_ = is_stopping && !is_busy;
        return is_busy;
    }

    const int never_ = eventfd(0, 0);  // the worker sleeps on it, and is woken by requests alone
    const std::shared_ptr<SharedLoop> turns_ = std::make_shared<SharedLoop>();
    ImmCounters imms_{turns_};
    Queue<uint32_t> requests_;
    std::atomic<bool> is_stopping_ = false;
    bool is_over_ = false;
    std::thread worker_;
};

// Pauses let the worker fall asleep, and waits block.
void pause(std::mt19937& random) {
    if (random() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 12000));
}

void submit(Arrivals& arrivals, uint32_t imm, uint32_t rounds) {
    std::mt19937 random(imm);
    for (uint32_t round = 0; round < rounds; ++round) {
        for (uint32_t i = 0; i <= round % 5; ++i) arrivals.arrive(imm, random() % 2);
        pause(random);
    }
}

// False: something did not come, or nobody told that it has.
bool wait(ImmCounter& counter, uint32_t rounds) {
    std::mt19937 random(~counter.imm());
    for (uint32_t round = 0; round < rounds; ++round) {
        constexpr std::chrono::seconds kLimit{20};
        const auto began = SharedLoop::Clock::now();
        if (!counter.wait(round % 5 + 1, kLimit) || SharedLoop::Clock::now() - began > kLimit) return false;
        pause(random);
    }
    return counter.count() == 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: %s WAITERS ROUNDS\n", argv[0]);
        return 2;
    }
    const auto waiters = static_cast<uint32_t>(std::atoi(argv[1])), rounds = static_cast<uint32_t>(std::atoi(argv[2]));
    Arrivals arrivals;
    std::atomic<uint32_t> num_failed = 0;
    std::vector<std::thread> threads;
    for (uint32_t imm = 0; imm < waiters; ++imm) {
        threads.emplace_back([&, imm, counter = arrivals.count(imm)] { num_failed += !wait(*counter, rounds); });
        threads.emplace_back([&, imm] { submit(arrivals, imm, rounds); });
    }
    for (auto& thread : threads) thread.join();
    if (num_failed == 0) return std::puts("ok") < 0;
    std::fprintf(stderr, "%u of %u waits did not get what they asked for\n", num_failed.load(), waiters);
    return 1;
}
