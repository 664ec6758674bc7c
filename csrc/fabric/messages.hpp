// What engines send each other besides writes: how they meet, and users' payloads. Over the first domain.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fabric/address.hpp"

namespace tracekern {

enum class MessageKind : uint32_t {
    hello = 1,  // who asks for the use of a memory region, and the descriptor that it has; also the first time
    welcome,    // the region can be used
    refusal,    // it cannot, and why
    payload,    // of users; is answered with one of the next two
    taken,      // a callback has it
    returned,   // none has, for a reason in `region`
    ping,       // is answered at once
    pong,
    bye,       // the sender sends nothing after this; who gets it says the same, once nothing is under way
    gone,      // the engine that is meant has ended
    given_up,  // the engine regards the other one as dead
    revoke,    // a region is about to be unregistered
    revoked,   // nothing is under way to it any more, and nothing will be
    ask_time,  // text: when it was asked; see clock_stamps.hpp
    tell_time,
};

constexpr uint32_t kMessageMagic = 0x54'4b'46'32;  // "TKF2"
constexpr uint64_t kMaxMessageBytes = 8192;
constexpr uint64_t kMaxPieceBytes = 8000;  // of a payload; longer ones travel in pieces
constexpr uint64_t kMaxPayloadBytes = 1ull << 30;

struct Message {
    MessageKind kind;
    uint64_t engine;                         // of the sender
    uint64_t to = 0;                         // the engine that is meant; 0: whichever is at the address
    uint64_t secret = 0;                     // of the receiver, who listens to nobody else
    uint64_t own_secret = 0;                 // hello, payload: of the sender, for answers
    uint64_t region = 0;                     // of whose memory it is about; payload: the bytes of all pieces
    uint64_t count = 0;                      // hello and its answers: the sender's number for it;
                                             // ping: immediates confirmed to the sender; pong: counted by it;
                                             // payload and its answers: the sender's number for it
    uint64_t offset = 0;                     // payload: of this piece
    std::vector<DomainAddress> addresses{};  // hello: one a domain; payload: the first
    std::string text{};                      // hello: the descriptor; refusal, bye: why
    std::string_view payload{};              // the bytes, where they are sent from or have come to
};

inline std::string pack(const Message& message) {
    Packer packer;
    packer.number(kMessageMagic).number(message.kind).number(message.engine);
    packer.number(message.to).number(message.secret).number(message.own_secret);
    packer.number(message.region).number(message.count).number(message.offset);
    packer.number(static_cast<uint32_t>(message.addresses.size()));
    for (const auto& address : message.addresses) packer.text(address.bytes);
    packer.text(message.kind == MessageKind::payload ? message.payload : message.text);
    return packer.take();
}

// The payload lies in these bytes. Throws std::invalid_argument for what no engine of this version sends.
inline Message unpack_message(std::string_view bytes) {
    Unpacker unpacker(bytes, "message of an engine");
    if (unpacker.number<uint32_t>() != kMessageMagic) unpacker.refuse("or of another version");
    Message message{};
    message.kind = unpacker.number<MessageKind>();
    message.engine = unpacker.number<uint64_t>();
    message.to = unpacker.number<uint64_t>();
    message.secret = unpacker.number<uint64_t>();
    message.own_secret = unpacker.number<uint64_t>();
    message.region = unpacker.number<uint64_t>();
    message.count = unpacker.number<uint64_t>();
    message.offset = unpacker.number<uint64_t>();
    const uint32_t count = unpacker.number<uint32_t>();
    if (count > kMaxDomains) unpacker.refuse(std::to_string(count) + " domains");
    for (uint32_t i = 0; i < count; ++i) message.addresses.push_back({unpacker.text(DomainAddress::kMaxBytes)});
    message.payload = unpacker.view(kMaxPieceBytes);
    unpacker.end();
    if (message.kind != MessageKind::payload) message.text = std::exchange(message.payload, {});
    return message;
}

}  // namespace tracekern
