// silu(x) = x / (1 + exp(-x)) with an exponential of our own: the same bits on every backend.
#pragma once

#include "platform/device.h"

namespace tracekern {

// At most 2 units in the last place off, 0 below -104, infinite above 89.
TK_DEVICE float exponential(float x) {
    constexpr float kLog2E = 1.44269504f;
    constexpr float kLn2High = 0.693145752f, kLn2Low = 1.42860677e-6f;  // the product of the first with n is exact
    constexpr float kRound = 12582912.0f;                               // 1.5 * 2^23: its units are ones
    const float limited = x > 89.0f ? 89.0f : x < -104.0f ? -104.0f : x;
    // x = n ln 2 + r with |r| <= ln 2 / 2.
    const float shifted = multiply_add_rn(limited, kLog2E, kRound);
    const float n = add_rn(shifted, -kRound);
    float r = multiply_add_rn(n, -kLn2High, limited);
    r = multiply_add_rn(n, -kLn2Low, r);
    // exp(r), a Taylor series: what is left out of it is below 2^-27.
    float sum = 1.0f / 5040;
    sum = multiply_add_rn(sum, r, 1.0f / 720);
    sum = multiply_add_rn(sum, r, 1.0f / 120);
    sum = multiply_add_rn(sum, r, 1.0f / 24);
    sum = multiply_add_rn(sum, r, 1.0f / 6);
    sum = multiply_add_rn(sum, r, 0.5f);
    sum = multiply_add_rn(sum, r, 1.0f);
    sum = multiply_add_rn(sum, r, 1.0f);
    // 2^n as two factors, because it may be no normal number.
    const uint32_t exponent = bits_as<uint32_t>(shifted) - bits_as<uint32_t>(kRound);
    const auto first = static_cast<uint32_t>(static_cast<int32_t>(exponent) >> 1);
    const float a = bits_as<float>((first + 127) << 23);
    const float b = bits_as<float>((exponent - first + 127) << 23);
    return multiply_rn(multiply_rn(sum, a), b);
}

TK_DEVICE float silu(float x) {
    return divide_rn(x, add_rn(1.0f, exponential(-x)));
}

}  // namespace tracekern
