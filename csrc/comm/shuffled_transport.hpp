// A transport of the CPU backend between ranks whose heaps this process maps. It promises as little as a network does:
// a put takes its time, later ones overtake it, and others' bytes and words come between its own. What happens is drawn
// from a seed.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "comm/flag.h"
#include "comm/peer.h"
#include "platform/cpu_executor.hpp"

namespace tracekern {

// One for each rank that puts.
class ShuffledTransport {
public:
    // heaps: of all ranks, as in CpuCommunicator.
    ShuffledTransport(std::vector<uint64_t> heaps, uint64_t seed)
        : heaps_(std::move(heaps)), random_(seed), courier_([this] { deliver_all(); }) {}
    // What was put is delivered before.
    ~ShuffledTransport() { is_ending_.store(true, std::memory_order_release); }
    ShuffledTransport(const ShuffledTransport&) = delete;

    // Called by any warp. Release, and no acquire: what a rank puts tells its other warps nothing.
    void post(const Put& put) {
        auto* posted = new Posted{put, posted_.load(std::memory_order_relaxed)};
        while (!posted_.compare_exchange_weak(
            posted->next, posted, std::memory_order_release, std::memory_order_relaxed)) {
        }
    }

private:
    struct Posted {
        Put put;
        Posted* next;
    };
    // On its way: first the payload is delivered, then the word.
    struct Parcel {
        Put put;
        uint32_t slowness;  // draws until its next step, on average
        bool is_halfway = false;
    };

    void deliver_all() {
        for (uint32_t spins = 0;;) {
            const bool is_ending = is_ending_.load(std::memory_order_acquire);
            take_posted();
            if (parcels_.empty() && is_ending) return;
            if (parcels_.empty() || !step(random_() % parcels_.size())) {
                relax_thread(spins);
            } else {
                spins = 0;
            }
        }
    }

    void take_posted() {
        for (Posted* next = posted_.exchange(nullptr, std::memory_order_acquire); next;) {
            const std::unique_ptr<Posted> posted(next);
            parcels_.push_back({posted->put, random_() % 4 ? 2u : 32u});
            next = posted->next;
        }
    }

    // Returns whether the parcel got on.
    bool step(size_t i) {
        Parcel& parcel = parcels_[i];
        if (random_() % parcel.slowness) return false;
        if (parcel.is_halfway != parcel.put.releases) {
            if (parcel.put.bytes) memcpy(at(parcel.put, parcel.put.dst), parcel.put.src, parcel.put.bytes);
        } else {
            store_word(parcel.put);
        }
        if (parcel.is_halfway) {
            parcel = parcels_.back();
            parcels_.pop_back();
        } else {
            parcel.is_halfway = true;
        }
        return true;
    }

    void store_word(const Put& put) const {
        if (put.word_bytes == sizeof(uint32_t)) {
            auto* word = reinterpret_cast<uint32_t*>(at(put, put.word_at));
            return store_release_system(word, static_cast<uint32_t>(put.word));
        }
        auto* word = reinterpret_cast<uint64_t*>(at(put, put.word_at));
        if (put.keeps_ahead && !is_ahead(put.word, load_relaxed_system(word))) return;
        if (put.releases) {
            store_release_system(word, put.word);
        } else {
            store_relaxed_system(word, put.word);
        }
    }

    char* at(const Put& put, uint64_t offset) const { return reinterpret_cast<char*>(heaps_[put.peer]) + offset; }

    const std::vector<uint64_t> heaps_;
    std::mt19937_64 random_;
    std::vector<Parcel> parcels_;
    std::atomic<Posted*> posted_ = nullptr;
    std::atomic<bool> is_ending_ = false;
    const std::jthread courier_;  // last: it uses all the others
};

}  // namespace tracekern
