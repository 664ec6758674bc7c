// Names for enums, and shapes from arguments.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "moe/p2p/config.h"
#include "trace/record.h"

namespace tracekern {

template <class Enum, size_t kCount>
Enum enum_named(const std::string& what, const std::string& name, const char* const (&names)[kCount]) {
    std::string wanted;
    for (size_t i = 0; i < kCount; ++i) {
        if (name == names[i]) return static_cast<Enum>(i);
        wanted += std::string(i ? ", " : "") + names[i];
    }
    throw std::invalid_argument(what + " is '" + name + "'; wanted one of " + wanted);
}

template <size_t kCount>
pybind11::list names_list(const char* const (&names)[kCount]) {
    pybind11::list result;
    for (const char* name : names) result.append(name);
    return result;
}

// A format that the bundled kernels have a body for.
inline RecordFormat record_format_named(const std::string& name) {
    constexpr const char* kBundled[] = {kRecordFormatNames[0], kRecordFormatNames[1]};
    return enum_named<RecordFormat>("record_format", name, kBundled);
}

inline MoeShape make_shape(uint32_t num_ranks,
                           uint32_t max_tokens,
                           uint32_t num_experts,
                           uint32_t topk,
                           uint32_t hidden,
                           const std::string& dtype) {
    constexpr uint32_t kNumberBytes[] = {4, 2, 2};
    const auto number = enum_named<uint32_t>("dtype", dtype, kNumberNames);
    if (num_ranks == 0 || num_experts < num_ranks) throw std::invalid_argument("wanted ranks, each with an expert");
    return {num_ranks, max_tokens, num_experts, topk, hidden, kNumberBytes[number]};
}

}  // namespace tracekern
