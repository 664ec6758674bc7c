// What engines send each other besides writes: how they meet, and users' payloads. Over the first domain.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fabric/address.hpp"

namespace tracekern {

enum class MessageKind : uint32_t { hello = 1, welcome, refusal, payload };

constexpr uint32_t kMessageMagic = 0x54'4b'46'31;  // "TKF1"
constexpr uint64_t kMaxMessageBytes = 8192;
constexpr uint64_t kMaxPayloadBytes = 8000;

struct Message {
    MessageKind kind;
    uint64_t engine;                       // of the sender
    std::vector<DomainAddress> addresses;  // hello and welcome: one a domain
    std::string text;                      // refusal: why; payload: the bytes
};

inline std::string pack(const Message& message) {
    Packer packer;
    packer.number(kMessageMagic).number(message.kind).number(message.engine);
    packer.number(static_cast<uint32_t>(message.addresses.size()));
    for (const auto& address : message.addresses) packer.text(address.bytes);
    packer.text(message.text);
    return packer.take();
}

// Throws std::invalid_argument for what no engine of this version sends.
inline Message unpack_message(std::string_view bytes) {
    Unpacker unpacker(bytes, "message of an engine");
    if (unpacker.number<uint32_t>() != kMessageMagic) unpacker.refuse("or of another version");
    Message message{};
    message.kind = unpacker.number<MessageKind>();
    message.engine = unpacker.number<uint64_t>();
    const uint32_t count = unpacker.number<uint32_t>();
    if (count > kMaxDomains) unpacker.refuse(std::to_string(count) + " domains");
    for (uint32_t i = 0; i < count; ++i) message.addresses.push_back({unpacker.text(DomainAddress::kMaxBytes)});
    message.text = unpacker.text(kMaxPayloadBytes);
    unpacker.end();
    return message;
}

}  // namespace tracekern
