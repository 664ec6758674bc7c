// The messages of an engine: buffers that go round in its first domain, and what has not been sent yet. The worker's.
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "fabric/callbacks.hpp"
#include "fabric/domain.hpp"
#include "fabric/messages.hpp"
#include "fabric/transfer.hpp"

namespace tracekern {

class Mailbox {
public:
    // limit: how long a message may wait until it can be sent.
    Mailbox(const FabricLibrary& library, Domain& domain, std::chrono::nanoseconds limit, CallbackThread& callbacks)
        : library_(library), domain_(domain), limit_(limit), callbacks_(callbacks) {
        memory_.resize((kNumRecvs + kNumSends) * kMaxMessageBytes);
        region_ = domain_.register_memory(memory_.data(), memory_.size(), ~uint64_t{0} >> 1);
        buffers_ = std::vector<Buffer>(kNumRecvs + kNumSends);
        for (uint32_t i = 0; i < buffers_.size(); ++i) {
            buffers_[i].at = memory_.data() + i * kMaxMessageBytes;
            buffers_[i].is_recv = i < kNumRecvs;
            buffers_[i].operation.index = i;
            if (i < kNumRecvs) {
                post_recv(buffers_[i]);
            } else {
                free_sends_.push_back(&buffers_[i]);
            }
        }
    }
    Mailbox(const Mailbox&) = delete;

    // Before its domain is closed; the buffers stay until the endpoint has let go of them.
    void close_memory() { Domain::close_memory(region_); }

    uint64_t num_under_way() const { return num_under_way_; }
    bool owns(const Operation* operation) const {
        return operation->index < buffers_.size() && operation == &buffers_[operation->index].operation;
    }

    void send(fi_addr_t to, const Message& message, OnDone on_done) {
        unsent_.push_back({to, pack(message), std::move(on_done), std::chrono::steady_clock::now() + limit_});
        send_more();
    }

    // Sends what there is room for. A provider that is still making the connection has none.
    bool send_more() {
        bool is_busy = false;
        for (size_t turn = unsent_.size(); turn > 0; --turn) {
            Unsent unsent = std::move(unsent_.front());
            unsent_.pop_front();
            const int64_t result = post_send(unsent);
            if (result == 0) {
                is_busy = true;
            } else if (result != -FI_EAGAIN) {
                end(std::move(unsent.on_done), library_.describe("send", result));
            } else if (std::chrono::steady_clock::now() > unsent.until) {
                end(std::move(unsent.on_done), "send: the peer was not reached within the time limit");
            } else {
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
            free_sends_.push_back(&buffer);
            end(std::exchange(buffer.on_done, {}), error.empty() ? "" : "send: " + error);
            return;
        }
        if (error.empty()) {
            try {
                receive(unpack_message({buffer.at, bytes}));
            } catch (const std::exception&) {
                // Not from an engine, or with addresses of another network: nobody to answer.
            }
        }
        post_recv(buffer);
    }

    void fail_unsent(const std::string& why) {
        for (Unsent& unsent : std::exchange(unsent_, {})) end(std::move(unsent.on_done), why);
    }
    void end(OnDone on_done, const std::string& error) { on_done.tell(error, callbacks_); }

private:
    struct Buffer {
        Operation operation{};
        bool is_recv = false;
        OnDone on_done;
        char* at = nullptr;
    };
    struct Unsent {
        fi_addr_t to;
        std::string bytes;
        OnDone on_done;
        std::chrono::steady_clock::time_point until;
    };

    static constexpr uint32_t kNumRecvs = 64, kNumSends = 64;

    void post_recv(Buffer& buffer) {
        library_.require(domain_.post_recv(buffer.at, kMaxMessageBytes, region_.local, &buffer.operation), "recv");
    }
    int64_t post_send(Unsent& unsent) {
        if (free_sends_.empty()) return -FI_EAGAIN;
        Buffer& buffer = *free_sends_.back();
        std::copy(unsent.bytes.begin(), unsent.bytes.end(), buffer.at);
        const int64_t result =
            domain_.post_send(buffer.at, unsent.bytes.size(), region_.local, unsent.to, &buffer.operation);
        if (result != 0) return result;
        free_sends_.pop_back();
        buffer.on_done = std::move(unsent.on_done);
        ++num_under_way_;
        return 0;
    }

    const FabricLibrary& library_;
    Domain& domain_;
    const std::chrono::nanoseconds limit_;
    CallbackThread& callbacks_;
    std::vector<char> memory_;
    DomainMemory region_;
    std::vector<Buffer> buffers_;
    std::vector<Buffer*> free_sends_;
    std::deque<Unsent> unsent_;
    uint64_t num_under_way_ = 0;  // sends
};

}  // namespace tracekern
