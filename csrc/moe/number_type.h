// The number types of rows, by name, and as C++ types.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "platform/device.h"

namespace tracekern {

enum class NumberType : uint32_t { fp32, fp16, bf16 };
inline constexpr const char* kNumberNames[] = {"fp32", "fp16", "bf16"};
inline constexpr uint32_t kNumberBytes[] = {4, 2, 2};

// Calls f.operator()<T>() with the type of the number.
template <class F>
void with_number_type(NumberType number, F f) {
    if (number == NumberType::bf16) return f.template operator()<BFloat16>();
#ifdef TK_SAMPLE  // for tests that compile often
    throw std::invalid_argument("built for bf16 alone");
#else
    if (number == NumberType::fp32) return f.template operator()<float>();
    return f.template operator()<Half>();
#endif
}

}  // namespace tracekern
