// Messages of users. Each is answered by its receiver: a callback has it, or why none has. The worker's.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fabric/callbacks.hpp"
#include "fabric/mailbox.hpp"
#include "fabric/on_done.hpp"

namespace tracekern {

using OnMessage = std::function<void(std::shared_ptr<LentBuffer>)>;

class UserMessages {
public:
    // address: of the domain. limit: for an answer.
    UserMessages(const EngineName& engine,
                 Domain& domain,
                 std::chrono::nanoseconds limit,
                 Mailbox& mailbox,
                 CallbackThread& callbacks)
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

    void send(const EngineAddress& to, const std::string& payload, OnDone on_done) {
        fi_addr_t at = FI_ADDR_UNSPEC;
        try {
            at = domain_.insert(to.domain);
        } catch (const std::runtime_error& error) {
            return tell(on_done, {Outcome::failed, std::string("send: ") + error.what()});
        }
        if (const auto dead = dead_.find(at); dead != dead_.end()) {
            return tell(on_done, {Outcome::failed, "send: " + dead->second});
        }
        const uint64_t number = ++num_sent_;
        const auto until = now() + limit_ + std::chrono::nanoseconds(payload.size() * kNsPerByte);
        waiting_[number] = {std::move(on_done), at, until};
        deadlines_.emplace(until, number);
        Message message{MessageKind::payload, engine_.number, 0, to.secret, engine_.secret, payload.size(), number};
        message.addresses = {domain_.address()};
        do {  // a message of no bytes is a piece, too
            message.payload = std::string_view(payload).substr(message.offset, kMaxPieceBytes);
            mailbox_.send(at, message, [this, number](const std::string& error) {
                if (!error.empty()) end(number, {Outcome::failed, error});
            });
            message.offset += kMaxPieceBytes;
        } while (message.offset < payload.size());
    }

    void receive(const Message& message) {
        if (message.secret != engine_.secret) return;
        if (message.kind == MessageKind::payload) return take(message);
        const auto sent = waiting_.find(message.count);
        if (message.to != engine_.number || sent == waiting_.end()) return;
        const Answer answer = static_cast<Answer>(message.region & 0xff);
        end(message.count,
            message.kind == MessageKind::taken ? Result() : Result{Outcome::failed, why(answer, message.region >> 8)});
    }

    void look(std::chrono::steady_clock::time_point now) {
        while (!deadlines_.empty() && now > deadlines_.begin()->first) {
            end(deadlines_.begin()->second,
                {Outcome::stalled,
                 "send: the peer has not answered within the time limit; the message may have arrived"});
        }
        std::erase_if(parts_, [&](const auto& one) { return now > one.second.until; });
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
    enum class Answer : uint32_t { none, unwanted, too_large, exhausted };
    struct Refusal {
        Answer answer = Answer::none;
        uint64_t number = 0;
    };
    using Time = std::chrono::steady_clock::time_point;

    struct Sent {
        OnDone on_done;
        fi_addr_t at;
        Time until;
    };
    // A message of which some pieces have come.
    struct Part {
        Refusal refusal;
        std::shared_ptr<std::vector<char>> memory;
        uint64_t num_bytes = 0;
        Time until;
    };
    static constexpr uint64_t kNsPerByte = 100;  // beside the limit: 10 MB/s

    static Time now() { return std::chrono::steady_clock::now(); }

    void take(const Message& message) {
        if (message.payload.size() == message.region) {
            return finish(message, why_not(message.region), [&] { return mailbox_.lend(message.payload); });
        }
        // Pieces come in any order. Of a message that is refused they are only counted.
        const auto [found, is_first] = parts_.try_emplace({message.engine, message.count});
        Part& part = found->second;
        if (is_first) {
            part.refusal = why_not(message.region);
            if (part.refusal.answer == Answer::none) part.memory = std::make_shared<std::vector<char>>(message.region);
        }
        part.until = now() + limit_;
        part.num_bytes += message.payload.size();
        const uint64_t room = part.memory ? part.memory->size() : 0;
        if (message.offset < room && message.payload.size() <= room - message.offset) {
            std::copy(message.payload.begin(), message.payload.end(), part.memory->data() + message.offset);
        }
        if (part.num_bytes < message.region) return;
        const Part whole = std::move(part);
        parts_.erase(found);
        finish(message, whole.refusal, [&] { return mailbox_.lend(whole.memory); });
    }
    // Lends a message that is complete, and answers it.
    template <class Lend>
    void finish(const Message& message, Refusal refusal, Lend lend) {
        auto lent = refusal.answer == Answer::none ? lend() : nullptr;
        const fi_addr_t back = domain_.insert(message.addresses.at(0));
        if (!lent) {
            return answer(
                back, message, MessageKind::returned, static_cast<uint64_t>(refusal.answer) | refusal.number << 8);
        }
        callbacks_.put([on_message = on_message_, lent = std::move(lent)]() mutable { on_message(std::move(lent)); });
        answer(back, message, MessageKind::taken, 0);
    }
    Refusal why_not(uint64_t bytes) const {
        if (!on_message_) return {Answer::unwanted, 0};
        if (bytes > max_bytes_) return {Answer::too_large, max_bytes_};
        const auto is_wanted = [](const auto& part) { return part.second.memory != nullptr; };
        const auto num_coming = std::count_if(parts_.begin(), parts_.end(), is_wanted);
        if (mailbox_.num_spares() <= static_cast<size_t>(num_coming)) return {Answer::exhausted, num_lendable_};
        return {};
    }
    void answer(fi_addr_t at, const Message& to, MessageKind kind, uint64_t what) {
        Message message{kind, engine_.number, to.engine, to.own_secret, 0, what, to.count};
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
        if (!sent) return;
        deadlines_.erase({sent.mapped().until, number});
        tell(sent.mapped().on_done, result);
    }
    void tell(OnDone& on_done, const Result& result) { on_done.tell(result, callbacks_); }

    const EngineName engine_;
    Domain& domain_;
    const std::chrono::nanoseconds limit_;
    Mailbox& mailbox_;
    CallbackThread& callbacks_;
    OnMessage on_message_;
    uint64_t max_bytes_ = 0;
    uint32_t num_lendable_ = 0;
    uint64_t num_sent_ = 0;
    std::map<uint64_t, Sent> waiting_;                     // by number
    std::set<std::pair<Time, uint64_t>> deadlines_;        // of these, and their numbers
    std::map<std::pair<uint64_t, uint64_t>, Part> parts_;  // by the sender and its number
    std::map<fi_addr_t, std::string> dead_;                // and why
};

}  // namespace tracekern
