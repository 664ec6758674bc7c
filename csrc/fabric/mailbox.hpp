// The messages of an engine: buffers that go round in its first domain, and what has not been sent yet. The worker's.
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
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
            if (buffer.is_recv) return unposted_.push_back(&buffer);
            free_sends_.push_back(&buffer);
        });
        // They are posted in the first turn.
    }
    Mailbox(const Mailbox&) = delete;
    ~Mailbox() { returns_->end(); }

    // Before its domain is closed; the buffers stay until the endpoint has let go of them.
    void close_memory() {
        for (Block& block : blocks_) Domain::close_memory(block.region);
    }

    // Messages to send and those under way.
    uint64_t num_waiting() const { return num_unsent_ + num_under_way_; }
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
    size_t num_spares() const { return spares_.size(); }
    // Lends the buffer of the message that is being received; nullptr: there is no spare one.
    std::shared_ptr<LentBuffer> lend(std::string_view bytes) {
        if (spares_.empty()) return nullptr;
        const Buffer& lent = *std::exchange(received_, spares_.back());
        spares_.pop_back();
        return std::make_shared<LentBuffer>(bytes, lent.operation.index, blocks_[lent.block].memory, returns_);
    }
    // Lends other memory in place of a spare buffer.
    std::shared_ptr<LentBuffer> lend(const std::shared_ptr<std::vector<char>>& memory) {
        if (spares_.empty()) return nullptr;
        const Buffer& spare = *spares_.back();
        spares_.pop_back();
        const std::string_view bytes(memory->data(), memory->size());
        return std::make_shared<LentBuffer>(bytes, spare.operation.index, memory, returns_);
    }

    void send(fi_addr_t to, const Message& message, OnSent on_sent) {
        Outbox& outbox = outboxes_[to];
        auto& queue = message.kind == MessageKind::payload ? outbox.users : outbox.own;
        queue.push_back({message.to, pack(message), std::move(on_sent), std::chrono::steady_clock::now()});
        ++num_unsent_;
        if (outbox.num_unsent() == 1) send_to(to, outbox);
        list(to, outbox);
    }

    bool has_unsent() const { return num_unsent_ != 0 || !unposted_.empty(); }
    // Sends what there is room for, to each peer in order. A provider that is still making the connection has none.
    bool send_more() {
        post_recvs();
        bool is_busy = false;
        for (const fi_addr_t to : std::exchange(with_unsent_, {})) {
            Outbox& outbox = outboxes_[to];
            is_busy |= send_to(to, outbox);
            outbox.is_listed = false;
            list(to, outbox);
        }
        return is_busy;
    }

    // Takes one of its operations that has ended; receive(message) with what has come.
    template <class Receive>
    void take(const Operation* operation, uint64_t bytes, const std::string& error, Receive receive) {
        Buffer& buffer = buffers_[operation->index];
        if (!buffer.is_recv) {
            Outbox& outbox = outboxes_[buffer.to];
            --num_under_way_;
            --outbox.num_under_way;
            outbox.last_sent = std::chrono::steady_clock::now();
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
        unposted_.push_back(received_);
        post_recvs();
    }

    // The endpoint was closed, or is about to be.
    void fail_all(const std::string& why) {
        for (auto& [to, outbox] : outboxes_) fail_those(outbox, why, [](const Unsent&) { return true; });
        for (Buffer& buffer : buffers_) {
            if (buffer.on_sent) std::exchange(buffer.on_sent, {})(why);
        }
        num_under_way_ = 0;
    }
    // A peer is dead. Its address may be another engine's by now. What the provider does not give back is made up for.
    void give_up_on(fi_addr_t to, uint64_t engine, const std::string& why) {
        Outbox& outbox = outboxes_[to];
        fail_those(outbox, why, [&](const Unsent& unsent) { return unsent.engine == engine; });
        if (outbox.num_under_way == 0 || !made_up_for_.insert(to).second) return;
        add_buffers(outbox.num_under_way, [&](Buffer& buffer) { free_sends_.push_back(&buffer); });
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
    using Time = std::chrono::steady_clock::time_point;
    struct Unsent {
        uint64_t engine;  // 0: whichever is there
        std::string bytes;
        OnSent on_sent;
        Time put;
    };
    // To one address. What engines say of themselves does not stand behind messages of users, which are many.
    struct Outbox {
        std::deque<Unsent> own, users;
        uint32_t num_under_way = 0;
        bool is_listed = false;  // in with_unsent_
        Time last_sent;

        size_t num_unsent() const { return own.size() + users.size(); }
        bool is_empty() const { return num_unsent() == 0; }
    };

    static constexpr uint32_t kNumRecvs = 64, kNumSends = 64;
    static constexpr uint32_t kSendsToOne = 16;                  // a peer that is stopped leaves room for others
    static constexpr uint32_t kOfUsers = 12, kLeftByUsers = 16;  // to one; of all buffers that are free

    template <class Use>
    void add_buffers(uint32_t count, Use use) {
        const size_t number = blocks_.size();
        auto memory = std::make_shared<std::vector<char>>(count * kMaxMessageBytes);
        blocks_.push_back({memory, domain_.register_memory(memory->data(), memory->size(), FI_SEND | FI_RECV)});
        for (uint32_t i = 0; i < count; ++i) {
            Buffer& buffer = buffers_.emplace_back();
            buffer.operation.index = buffers_.size() - 1;
            buffer.at = memory->data() + i * kMaxMessageBytes;
            buffer.block = number;
            use(buffer);
        }
    }
    void* local(const Buffer& buffer) const { return blocks_[buffer.block].region.local; }
    // What the provider has no room for comes in a later turn.
    void post_recvs() {
        while (!unposted_.empty()) {
            Buffer& buffer = *unposted_.back();
            const int64_t result = domain_.post_recv(buffer.at, kMaxMessageBytes, local(buffer), &buffer.operation);
            if (result == -FI_EAGAIN) return;
            library_.require(result, "recv");
            unposted_.pop_back();
        }
    }
    void list(fi_addr_t to, Outbox& outbox) {
        if (outbox.is_empty() || std::exchange(outbox.is_listed, true)) return;
        with_unsent_.push_back(to);
    }
    // Returns whether it has sent something.
    bool send_to(fi_addr_t to, Outbox& outbox) {
        bool is_busy = false;
        while (!outbox.is_empty()) {
            const bool is_of_user = outbox.own.empty();
            auto& queue = is_of_user ? outbox.users : outbox.own;
            const int64_t result = post_send(to, outbox, queue.front(), is_of_user);
            if (result == -FI_EAGAIN && !is_late(outbox, queue.front())) return is_busy;
            const Unsent unsent = std::move(queue.front());
            queue.pop_front();
            --num_unsent_;
            is_busy |= result == 0;
            if (result == -FI_EAGAIN) unsent.on_sent("send: the peer was not reached within the time limit");
            if (result != 0 && result != -FI_EAGAIN) unsent.on_sent(library_.describe("send", result));
        }
        return is_busy;
    }
    bool is_late(const Outbox& outbox, const Unsent& unsent) const {
        return std::chrono::steady_clock::now() > std::max(unsent.put, outbox.last_sent) + limit_;
    }
    int64_t post_send(fi_addr_t to, Outbox& outbox, Unsent& unsent, bool is_of_user) {
        if (free_sends_.size() <= (is_of_user ? kLeftByUsers : 0)) return -FI_EAGAIN;
        if (outbox.num_under_way >= (is_of_user ? kOfUsers : kSendsToOne)) return -FI_EAGAIN;
        Buffer& buffer = *free_sends_.back();
        std::copy(unsent.bytes.begin(), unsent.bytes.end(), buffer.at);
        const int64_t result = domain_.post_send(buffer.at, unsent.bytes.size(), local(buffer), to, &buffer.operation);
        if (result != 0) return result;
        free_sends_.pop_back();
        buffer.on_sent = std::move(unsent.on_sent);
        buffer.to = to;
        ++num_under_way_;
        ++outbox.num_under_way;
        return 0;
    }
    template <class Which>
    void fail_those(Outbox& outbox, const std::string& why, Which which) {
        std::deque<Unsent> failed;
        for (auto* queue : {&outbox.own, &outbox.users}) {
            std::deque<Unsent> kept;
            for (Unsent& unsent : *queue) (which(unsent) ? failed : kept).push_back(std::move(unsent));
            *queue = std::move(kept);
        }
        num_unsent_ -= failed.size();
        for (const Unsent& unsent : failed) unsent.on_sent(why);
    }

    const FabricLibrary& library_;
    Domain& domain_;
    const std::chrono::nanoseconds limit_;
    std::shared_ptr<Returns> returns_;
    std::vector<Block> blocks_;
    std::deque<Buffer> buffers_;  // stay where they are
    std::vector<Buffer*> spares_;
    Buffer* received_ = nullptr;     // posted next, in place of the one that came
    std::vector<Buffer*> unposted_;  // that nothing can come in yet
    std::vector<Buffer*> free_sends_;
    std::unordered_map<fi_addr_t, Outbox> outboxes_;
    std::vector<fi_addr_t> with_unsent_;
    uint64_t num_unsent_ = 0, num_under_way_ = 0;  // sends
    std::set<fi_addr_t> made_up_for_;
};

}  // namespace tracekern
