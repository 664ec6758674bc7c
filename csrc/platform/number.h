// 16-bit number formats as bits, and their conversions in plain integer arithmetic (round to nearest even).
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

}  // namespace tracekern
