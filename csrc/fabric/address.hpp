// Names that engines give each other: where a domain is, and where memory is that a peer may write to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tracekern {

// A domain's address as its provider wrote it: opaque bytes.
struct DomainAddress {
    std::string bytes;

    bool operator==(const DomainAddress&) const = default;

    static constexpr size_t kMaxBytes = 256;
};

// An engine, and what it wants to hear from who speaks to it.
struct EngineName {
    uint64_t number, secret;
};

// Where an engine takes messages, as users hand it on: its first domain, and what it wants to hear.
struct EngineAddress {
    DomainAddress domain;
    uint64_t secret;
};
inline std::string pack(const EngineAddress& address) {
    return address.domain.bytes + std::string(reinterpret_cast<const char*>(&address.secret), sizeof(address.secret));
}
// Of anything: who is spoken to refuses what is no address of it.
inline EngineAddress unpack_address(const std::string& bytes) {
    EngineAddress address{};
    const size_t size = bytes.size() < sizeof(address.secret) ? 0 : bytes.size() - sizeof(address.secret);
    address.domain.bytes = bytes.substr(0, size);
    std::memcpy(&address.secret, bytes.data() + size, std::min(bytes.size(), sizeof(address.secret)));
    return address;
}

// Drawn by the operating system: nobody guesses it. Never 0.
inline uint64_t draw_number() {
    std::random_device random;
    return uint64_t{random()} << 32 | random() | 1;
}

// Memory of an engine, as the peers see it that write there.
struct MemoryRegionDescriptor {
    // Through one domain of its engine.
    struct Way {
        DomainAddress address;
        uint64_t key;
        uint64_t base;  // of the region, as the provider counts remote addresses

        bool operator==(const Way&) const = default;
    };
    // Shared by all copies: each transfer has one.
    class Ways {
    public:
        void push_back(Way way) {
            auto longer = std::make_shared<std::vector<Way>>(*ways_);
            longer->push_back(std::move(way));
            ways_ = std::move(longer);
        }
        size_t size() const { return ways_->size(); }
        const Way& operator[](size_t domain) const { return (*ways_)[domain]; }
        auto begin() const { return ways_->begin(); }
        auto end() const { return ways_->end(); }
        bool operator==(const Ways& other) const { return ways_ == other.ways_ || *ways_ == *other.ways_; }

    private:
        using Shared = std::shared_ptr<const std::vector<Way>>;
        inline static const Shared kNone = std::make_shared<const std::vector<Way>>();
        Shared ways_ = kNone;
    };
    uint64_t engine;  // who it belongs to: another one in each process and each start
    uint64_t secret;  // what that one wants to hear from who speaks to it
    uint64_t region;  // of the engine, counted from 1
    uint64_t bytes;
    Ways ways;  // one a domain

    bool operator==(const MemoryRegionDescriptor&) const = default;
};

// Reads and writes the bytes that travel between processes: numbers in the order of this machine, texts with a length.
class Packer {
public:
    template <class Number>
    Packer& number(Number value) {
        bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
        return *this;
    }
    Packer& text(std::string_view value) {
        number(static_cast<uint32_t>(value.size()));
        bytes_.append(value);
        return *this;
    }
    std::string take() { return std::move(bytes_); }

private:
    std::string bytes_;
};

// Throws std::invalid_argument where bytes are missing or left over.
class Unpacker {
public:
    Unpacker(std::string_view bytes, const char* what) : bytes_(bytes), what_(what) {}

    template <class Number>
    Number number() {
        Number value;
        const std::string_view taken = take(sizeof(value));
        std::copy(taken.begin(), taken.end(), reinterpret_cast<char*>(&value));
        return value;
    }
    // Lies in the bytes.
    std::string_view view(size_t limit) {
        const uint32_t size = number<uint32_t>();
        if (size > limit) refuse("a part of " + std::to_string(size) + " bytes");
        return take(size);
    }
    std::string text(size_t limit) { return std::string(view(limit)); }
    void end() const {
        if (!bytes_.empty()) refuse(std::to_string(bytes_.size()) + " bytes left over");
    }
    [[noreturn]] void refuse(const std::string& found) const {
        throw std::invalid_argument(std::string(what_) + ": damaged, " + found);
    }

private:
    std::string_view take(size_t size) {
        if (bytes_.size() < size) refuse("it ends " + std::to_string(size - bytes_.size()) + " bytes early");
        const std::string_view taken = bytes_.substr(0, size);
        bytes_.remove_prefix(size);
        return taken;
    }

    std::string_view bytes_;
    const char* what_;
};

constexpr uint32_t kMaxDomains = 4;  // of an engine

inline std::string pack(const MemoryRegionDescriptor& descriptor) {
    Packer packer;
    packer.number(descriptor.engine).number(descriptor.secret).number(descriptor.region).number(descriptor.bytes);
    packer.number(static_cast<uint32_t>(descriptor.ways.size()));
    for (const auto& way : descriptor.ways) packer.text(way.address.bytes).number(way.key).number(way.base);
    return packer.take();
}

inline MemoryRegionDescriptor unpack_descriptor(std::string_view bytes) {
    Unpacker unpacker(bytes, "memory region descriptor");
    MemoryRegionDescriptor descriptor{};
    descriptor.engine = unpacker.number<uint64_t>();
    if (descriptor.engine == 0) unpacker.refuse("engine 0");
    descriptor.secret = unpacker.number<uint64_t>();
    descriptor.region = unpacker.number<uint64_t>();
    descriptor.bytes = unpacker.number<uint64_t>();
    const uint32_t count = unpacker.number<uint32_t>();
    if (count < 1 || count > kMaxDomains) unpacker.refuse(std::to_string(count) + " domains, wanted 1 to 4");
    for (uint32_t i = 0; i < count; ++i) {
        MemoryRegionDescriptor::Way way;
        way.address.bytes = unpacker.text(DomainAddress::kMaxBytes);
        way.key = unpacker.number<uint64_t>();
        way.base = unpacker.number<uint64_t>();
        descriptor.ways.push_back(std::move(way));
    }
    unpacker.end();
    return descriptor;
}

}  // namespace tracekern
