// The messages of an engine: buffers that go round in its first domain, and what has not been sent yet. The worker's.
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fabric/domain.hpp"
#include "fabric/lent_buffer.hpp"
#include "fabric/messages.hpp"

namespace tracekern {

class Mailbox {
public:
    // Called on the worker with "" when it was sent, else with what went wrong.
    using OnSent = std::function<void(const std::string&)>;

    // limit: how long a message may wait until it can be sent.
    // put: has something done between two turns; any thread calls it.
    Mailbox(const FabricLibrary& library,
            Domain& domain,
            std::chrono::nanoseconds limit,
            std::function<void(std::function<void()>)> put)
        : library_(library), domain_(domain), limit_(limit) {
        returns_ = std::make_shared<Returns>(
            [this, put](uint64_t buffer) { put([this, buffer] { spares_.push_back(&buffers_[buffer]); }); });
        add_buffers(kNumRecvs + kNumSends, [&](Buffer& buffer) {
            buffer.is_recv = buffer.operation.index < kNumRecvs;
            if (buffer.is_recv) return post_recv(buffer);
            free_sends_.push_back(&buffer);
        });
    }
    Mailbox(const Mailbox&) = delete;
    ~Mailbox() { returns_->end(); }

    // Before its domain is closed; the buffers stay until the endpoint has let go of them.
    void close_memory() {
        for (Block& block : blocks_) Domain::close_memory(block.region);
    }

    // Messages to send and those under way.
    uint64_t num_waiting() const { return unsent_.size() + num_under_way_; }
    bool owns(const Operation* operation) const {
        return operation->index < buffers_.size() && operation == &buffers_[operation->index].operation;
    }

    // So many buffers that messages have come in can be lent at the same time: a spare one is posted for each, so that
    // as many are posted as ever.
    void add_spares(uint32_t count) {
        add_buffers(count, [&](Buffer& buffer) {
            buffer.is_recv = true;
            spares_.push_back(&buffer);
        });
    }
    // Lends the buffer of the message that is being received; nullptr: there is no spare one.
    std::shared_ptr<LentBuffer> lend(std::string_view bytes) {
        if (spares_.empty()) return nullptr;
        const Buffer& lent = *std::exchange(received_, spares_.back());
        spares_.pop_back();
        return std::make_shared<LentBuffer>(bytes, lent.operation.index, blocks_[lent.block].memory, returns_);
    }

    void send(fi_addr_t to, const Message& message, OnSent on_sent) {
        const auto until = std::chrono::steady_clock::now() + limit_;
        unsent_.push_back({to, message.to, pack(message), std::move(on_sent), until});
        send_more();
    }

    bool has_unsent() const { return !unsent_.empty(); }
    // Sends what there is room for, to each peer in order. A provider that is still making the connection has none.
    bool send_more() {
        bool is_busy = false;
        std::vector<fi_addr_t> full;
        for (size_t turn = unsent_.size(); turn > 0 && !unsent_.empty(); --turn) {  // on_sent may fail others
            Unsent unsent = std::move(unsent_.front());
            unsent_.pop_front();
            const bool is_behind = std::find(full.begin(), full.end(), unsent.to) != full.end();
            const int64_t result = is_behind ? -FI_EAGAIN : post_send(unsent);
            if (result == 0) {
                is_busy = true;
            } else if (result != -FI_EAGAIN) {
                unsent.on_sent(library_.describe("send", result));
            } else if (std::chrono::steady_clock::now() > unsent.until) {
                unsent.on_sent("send: the peer was not reached within the time limit");
            } else {
                full.push_back(unsent.to);
                unsent_.push_back(std::move(unsent));
            }
        }
        return is_busy;
    }

    // Takes one of its operations that has ended; receive(message) with what has come.
    template <class Receive>
    void take(const Operation* operation, uint64_t bytes, const std::string& error, Receive receive) {
        Buffer& buffer = buffers_[operation->index];
        if (!buffer.is_recv) {
            --num_under_way_;
            --under_way_to_[buffer.to];
            free_sends_.push_back(&buffer);
            std::exchange(buffer.on_sent, {})(error.empty() ? "" : "send: " + error);
            return;
        }
        received_ = &buffer;
        if (error.empty()) {
            try {
                receive(unpack_message({buffer.at, bytes}));
            } catch (const std::exception&) {
                // Not from an engine, or with addresses of another network: nobody to answer.
            }
        }
        post_recv(*received_);
    }

    // The endpoint was closed, or is about to be.
    void fail_all(const std::string& why) {
        fail_unsent(why);
        for (Buffer& buffer : buffers_) {
            if (buffer.on_sent) std::exchange(buffer.on_sent, {})(why);
        }
        num_under_way_ = 0;
    }
    void fail_unsent(const std::string& why) {
        for (Unsent& unsent : std::exchange(unsent_, {})) unsent.on_sent(why);
    }
    // A peer is dead. Its address may be another engine's by now. What the provider does not give back is made up for.
    void give_up_on(fi_addr_t to, uint64_t engine, const std::string& why) {
        const auto first = std::stable_partition(
            unsent_.begin(), unsent_.end(), [&](const Unsent& unsent) { return unsent.engine != engine; });
        std::deque<Unsent> failed(std::make_move_iterator(first), std::make_move_iterator(unsent_.end()));
        unsent_.erase(first, unsent_.end());
        for (Unsent& unsent : failed) unsent.on_sent(why);
        const uint32_t count = under_way_to_[to];
        if (count == 0 || !made_up_for_.insert(to).second) return;
        add_buffers(count, [&](Buffer& buffer) { free_sends_.push_back(&buffer); });
    }

private:
    struct Buffer {
        Operation operation{};
        bool is_recv = false;
        OnSent on_sent;
        fi_addr_t to = FI_ADDR_UNSPEC;
        char* at = nullptr;
        size_t block = 0;
    };
    struct Block {
        std::shared_ptr<std::vector<char>> memory;
        DomainMemory region;
    };
    struct Unsent {
        fi_addr_t to;
        uint64_t engine;  // 0: whichever is there
        std::string bytes;
        OnSent on_sent;
        std::chrono::steady_clock::time_point until;
    };

    static constexpr uint32_t kNumRecvs = 64, kNumSends = 64;
    static constexpr uint32_t kSendsToOne = 16;  // a peer that is stopped leaves room for others, and for signs of life
    static constexpr uint64_t kFirstKey = ~uint64_t{0} >> 1;  // far from users' regions

    template <class Use>
    void add_buffers(uint32_t count, Use use) {
        const size_t number = blocks_.size();
        auto memory = std::make_shared<std::vector<char>>(count * kMaxMessageBytes);
        blocks_.push_back({memory, domain_.register_memory(memory->data(), memory->size(), kFirstKey + number)});
        for (uint32_t i = 0; i < count; ++i) {
            Buffer& buffer = buffers_.emplace_back();
            buffer.operation.index = buffers_.size() - 1;
            buffer.at = memory->data() + i * kMaxMessageBytes;
            buffer.block = number;
            use(buffer);
        }
    }
    void* local(const Buffer& buffer) const { return blocks_[buffer.block].region.local; }
    void post_recv(Buffer& buffer) {
        library_.require(domain_.post_recv(buffer.at, kMaxMessageBytes, local(buffer), &buffer.operation), "recv");
    }
    int64_t post_send(Unsent& unsent) {
        uint32_t& under_way = under_way_to_[unsent.to];
        if (free_sends_.empty() || under_way == kSendsToOne) return -FI_EAGAIN;
        Buffer& buffer = *free_sends_.back();
        std::copy(unsent.bytes.begin(), unsent.bytes.end(), buffer.at);
        const int64_t result =
            domain_.post_send(buffer.at, unsent.bytes.size(), local(buffer), unsent.to, &buffer.operation);
        if (result != 0) return result;
        free_sends_.pop_back();
        buffer.on_sent = std::move(unsent.on_sent);
        buffer.to = unsent.to;
        ++num_under_way_;
        ++under_way;
        return 0;
    }

    const FabricLibrary& library_;
    Domain& domain_;
    const std::chrono::nanoseconds limit_;
    std::shared_ptr<Returns> returns_;
    std::vector<Block> blocks_;
    std::deque<Buffer> buffers_;  // stay where they are
    std::vector<Buffer*> spares_;
    Buffer* received_ = nullptr;  // posted next, in place of the one that came
    std::vector<Buffer*> free_sends_;
    std::deque<Unsent> unsent_;
    uint64_t num_under_way_ = 0;  // sends
    std::unordered_map<fi_addr_t, uint32_t> under_way_to_;
    std::set<fi_addr_t> made_up_for_;
};

}  // namespace tracekern
