// Numbers on the host for the attacking programs: a GPU's to_float() and from_float() are its kernels' alone.
#pragma once

#include <cstddef>
#include <random>
#include <type_traits>
#include <vector>

#include "platform/number.h"

namespace tracekern {

inline float host_float(float x) {
    return x;
}
inline float host_float(Half x) {
    return half_to_float(x);
}
inline float host_float(BFloat16 x) {
    return bfloat16_to_float(x);
}
template <class T>
T host_number(float x) {
    if constexpr (std::is_same_v<T, Half>) {
        return float_to_half(x);
    } else if constexpr (std::is_same_v<T, BFloat16>) {
        return float_to_bfloat16(x);
    } else {
        return x;
    }
}

template <class T>
std::vector<T> draw_rows(std::mt19937& random, size_t count) {
    std::uniform_real_distribution<float> value(-2.0f, 2.0f);
    std::vector<T> rows(count);
    for (T& element : rows) element = host_number<T>(value(random));
    return rows;
}

}  // namespace tracekern
