// Messages of users. Each is answered by its receiver: a callback has it, or why none has. The worker's.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "fabric/callbacks.hpp"
#include "fabric/mailbox.hpp"
#include "fabric/on_done.hpp"

namespace tracekern {

using OnMessage = std::function<void(std::shared_ptr<LentBuffer>)>;

class UserMessages {
public:
    // address: of the domain. limit: for an answer.
    UserMessages(
        uint64_t engine, Domain& domain, std::chrono::nanoseconds limit, Mailbox& mailbox, CallbackThread& callbacks)
        : engine_(engine), domain_(domain), limit_(limit), mailbox_(mailbox), callbacks_(callbacks) {}

    // That have no answer yet.
    size_t num_waiting() const { return waiting_.size(); }

    // From now on messages of up to `bytes` are lent to the callback, at most `count` at a time.
    void lend_to(uint64_t bytes, uint32_t count, OnMessage on_message) {
        if (on_message_) throw std::invalid_argument("submit_bouncing_recvs: the engine has receive buffers already");
        mailbox_.add_spares(count);
        max_bytes_ = bytes;
        num_lendable_ = count;
        on_message_ = std::move(on_message);
    }

    void send(const DomainAddress& to, const std::string& payload, OnDone on_done) {
        fi_addr_t at = FI_ADDR_UNSPEC;
        try {
            at = domain_.insert(to);
        } catch (const std::runtime_error& error) {
            return tell(on_done, {Outcome::failed, std::string("send: ") + error.what()});
        }
        if (const auto why = domain_.why_one_way(at); !why.empty()) {
            return tell(on_done, {Outcome::failed, "send: " + why});
        }
        if (const auto dead = dead_.find(at); dead != dead_.end()) {
            return tell(on_done, {Outcome::failed, "send: " + dead->second});
        }
        const uint64_t number = ++num_sent_;
        waiting_[number] = {std::move(on_done), at, std::chrono::steady_clock::now() + limit_};
        Message message{MessageKind::payload, engine_};
        message.count = number;
        message.addresses = {domain_.address()};
        message.payload = payload;
        mailbox_.send(at, message, [this, number](const std::string& error) {
            if (!error.empty()) end(number, {Outcome::failed, error});
        });
    }

    void receive(const Message& message) {
        if (message.kind == MessageKind::payload) return take(message);
        const auto sent = waiting_.find(message.count);
        if (message.to != engine_ || sent == waiting_.end()) return;
        have_answered_.insert(sent->second.at);
        const Answer answer = static_cast<Answer>(message.region & 0xff);
        end(message.count,
            message.kind == MessageKind::taken ? Result() : Result{Outcome::failed, why(answer, message.region >> 8)});
    }

    void look(std::chrono::steady_clock::time_point now) {
        while (!waiting_.empty() && now > waiting_.begin()->second.until) {
            end(waiting_.begin()->first,
                {Outcome::stalled,
                 "send: the peer has not answered within the time limit; the message may have arrived"});
        }
    }
    // A peer is dead. Over tcp another engine may be at its address next, and nobody there is an error.
    void fail_to(fi_addr_t at, const std::string& why) {
        if (domain_.net().provider == "shm") dead_[at] = why;
        for (auto next = waiting_.begin(); next != waiting_.end();) {
            const auto [number, sent] = *next++;
            if (sent.at == at) end(number, {Outcome::failed, "send: " + why});
        }
    }
    void fail_all(const std::string& why) {
        while (!waiting_.empty()) end(waiting_.begin()->first, {Outcome::failed, "send: " + why});
    }

private:
    // Why a receiver does not take a message, and a number that belongs to it. No text: libfabric's shm sends only
    // short messages back to where it knows from a message alone.
    enum class Answer : uint32_t { unwanted = 1, too_large, exhausted };

    struct Sent {
        OnDone on_done;
        fi_addr_t at;
        std::chrono::steady_clock::time_point until;
    };

    void take(const Message& message) {
        const fi_addr_t back = domain_.insert(message.addresses.at(0));
        if (!have_answered_.contains(back)) domain_.came_first(message.addresses[0], back);
        const auto refuse = [&](Answer answer, uint64_t number) {
            this->answer(back, message, MessageKind::returned, static_cast<uint64_t>(answer) | number << 8);
        };
        if (!on_message_) return refuse(Answer::unwanted, 0);
        if (message.payload.size() > max_bytes_) return refuse(Answer::too_large, max_bytes_);
        auto lent = mailbox_.lend(message.payload);
        if (!lent) return refuse(Answer::exhausted, num_lendable_);
        callbacks_.put([on_message = on_message_, lent = std::move(lent)]() mutable { on_message(std::move(lent)); });
        answer(back, message, MessageKind::taken, 0);
    }
    void answer(fi_addr_t at, const Message& to, MessageKind kind, uint64_t what) {
        Message message{kind, engine_, to.engine, what};
        message.count = to.count;
        mailbox_.send(at, message, [](const std::string&) {});
    }
    static std::string why(Answer answer, uint64_t number) {
        switch (answer) {
            case Answer::unwanted:
                return "send: the peer takes no messages; it has to call submit_bouncing_recvs";
            case Answer::too_large:
                return "send: the message is larger than the peer's receive buffers of " + std::to_string(number) +
                       " bytes";
            default:
                return "send: all of the peer's " + std::to_string(number) +
                       " receive buffers are in use; send it again";
        }
    }

    void end(uint64_t number, const Result& result) {
        auto sent = waiting_.extract(number);
        if (sent) tell(sent.mapped().on_done, result);
    }
    void tell(OnDone& on_done, const Result& result) { on_done.tell(result, callbacks_); }

    const uint64_t engine_;
    Domain& domain_;
    const std::chrono::nanoseconds limit_;
    Mailbox& mailbox_;
    CallbackThread& callbacks_;
    OnMessage on_message_;
    uint64_t max_bytes_ = 0;
    uint32_t num_lendable_ = 0;
    uint64_t num_sent_ = 0;
    std::map<uint64_t, Sent> waiting_;  // by number: the oldest first
    std::set<fi_addr_t> have_answered_;
    std::map<fi_addr_t, std::string> dead_;  // and why
};

}  // namespace tracekern
