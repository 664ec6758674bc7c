// Writes protobuf wire format into memory that the caller has checked to be large enough.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tracekern::encode {

// A byte of the message. Not uint8_t: for the compiler a store of one of those may change any object, the cursor
// included, which then is loaded again for each byte.
using MessageByte = char8_t;

class ProtoWriter {
public:
    explicit ProtoWriter(uint8_t* begin) : cursor_(reinterpret_cast<MessageByte*>(begin)) {}

    uint8_t* cursor() const { return reinterpret_cast<uint8_t*>(cursor_); }

    void byte(uint8_t value) { *cursor_++ = value; }

    void varint(uint64_t value) {
        while (value >= 0x80) {
            *cursor_++ = static_cast<MessageByte>(value | 0x80);
            value >>= 7;
        }
        *cursor_++ = static_cast<MessageByte>(value);
    }

    void fixed64(uint64_t value) {
        for (int shift = 0; shift < 64; shift += 8) *cursor_++ = static_cast<MessageByte>(value >> shift);
    }

    void bytes(const void* data, size_t count) {
        std::memcpy(cursor_, data, count);
        cursor_ += count;
    }

    // Starts a nested message whose tag is one byte: returns the place of its length, for close_message().
    MessageByte* open_message(uint8_t tag) {
        *cursor_++ = tag;
        return cursor_++;
    }

    // One length byte is reserved; the rare longer message is moved up.
    void close_message(MessageByte* length_place) {
        uint64_t length = static_cast<uint64_t>(cursor_ - length_place - 1);
        if (length >= 0x80) {
            const size_t length_bytes = varint_bytes(length);
            std::memmove(length_place + length_bytes, length_place + 1, length);
            cursor_ = length_place;
            varint(length);
            cursor_ += length;
            return;
        }
        *length_place = static_cast<MessageByte>(length);
    }

private:
    static size_t varint_bytes(uint64_t value) {
        size_t count = 1;
        while (value >>= 7) ++count;
        return count;
    }

    MessageByte* cursor_;
};

}  // namespace tracekern::encode
