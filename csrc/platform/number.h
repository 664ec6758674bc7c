// Formats of 16 and 8 bits as bits, and their conversions in plain integer arithmetic (round to nearest even).
// Backends with instructions for it use those; tests compare both with torch.
#pragma once

#include <cstdint>
#include <cstring>

#include "platform/qualifiers.h"

namespace tracekern {

struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};
// Of the Open Compute Project: 4 bits of exponent, 3 of mantissa, no infinity, largest 448.
struct Fp8 {
    uint8_t bits;
};
constexpr float kFp8Max = 448.0f;

template <class To, class From>
TK_HOST_DEVICE To bits_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof(To));
    return to;
}

TK_HOST_DEVICE float bfloat16_to_float(BFloat16 x) {
    return bits_as<float>(static_cast<uint32_t>(x.bits) << 16);
}

TK_HOST_DEVICE BFloat16 float_to_bfloat16(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};  // NaN stays NaN
    return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

TK_HOST_DEVICE float half_to_float(Half x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
    const uint32_t exponent = x.bits >> 10 & 0x1fu;
    const uint32_t mantissa = x.bits & 0x3ffu;
    if (exponent == 0x1f) return bits_as<float>(sign | 0x7f800000u | mantissa << 13);
    if (exponent != 0) return bits_as<float>(sign | (exponent + 112) << 23 | mantissa << 13);
    const float subnormal = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24: exact
    return bits_as<float>(sign | bits_as<uint32_t>(subnormal));
}

TK_HOST_DEVICE Half float_to_half(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds beyond 65504
    if (magnitude < 0x38800000u) {
        // Subnormal result: adding 0.5 leaves the value in units of 2^-24 in the mantissa, rounded by the adder.
        const float shifted = bits_as<float>(magnitude) + 0.5f;
        return {static_cast<uint16_t>(sign | (bits_as<uint32_t>(shifted) - 0x3f000000u))};
    }
    const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u);
    return {static_cast<uint16_t>(sign | rounded >> 13)};
}

TK_HOST_DEVICE float fp8_to_float(Fp8 x) {
    const uint32_t magnitude = x.bits & 0x7fu;
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80u) << 24;
    if (magnitude == 0x7f) return bits_as<float>(sign | 0x7fc00000u);
    // As a float of the same bits it is 2^120 times too small, for subnormals, too: exact.
    return bits_as<float>(sign | bits_as<uint32_t>(bits_as<float>(magnitude << 20) * 1.329227995784916e36f));
}

// What is larger than 448 becomes 448.
TK_HOST_DEVICE Fp8 float_to_fp8(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    const uint32_t sign = bits >> 24 & 0x80u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {0x7f};
    if (magnitude >= 0x43e00000u) return {static_cast<uint8_t>(sign | 0x7eu)};
    if (magnitude < 0x3c800000u) {
        // Subnormal result: adding 2^14 leaves the value in units of 2^-9 in the mantissa, rounded by the adder.
        const float shifted = bits_as<float>(magnitude) + 16384.0f;
        return {static_cast<uint8_t>(sign | (bits_as<uint32_t>(shifted) - 0x46800000u))};
    }
    const uint32_t rounded = magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u);
    return {static_cast<uint8_t>(sign | rounded >> 20)};
}

}  // namespace tracekern
