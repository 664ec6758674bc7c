// What the bindings of both backends share: names for enums, shapes from arguments, a fault as a dictionary.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "comm/fault.h"
#include "comm/mutation.h"
#include "moe/p2p/layout.h"
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

inline constexpr const char* kVariantNames[] = {"flag", "token", "fused", "balanced", "dedup", "reduce", "pipelined"};
inline constexpr const char* kNumberNames[] = {"fp32", "fp16", "bf16"};

inline RecordFormat record_format_named(const std::string& name) {
    return enum_named<RecordFormat>("record_format", name, kRecordFormatNames);
}

inline MoeShape make_shape(uint32_t num_ranks,
                           uint32_t max_tokens,
                           uint32_t num_experts,
                           uint32_t topk,
                           uint32_t hidden,
                           const std::string& dtype) {
    constexpr uint32_t kNumberBytes[] = {4, 2, 2};
    const auto number = enum_named<uint32_t>("dtype", dtype, kNumberNames);
    return {num_ranks, max_tokens, num_experts, topk, hidden, kNumberBytes[number]};
}

// What the first wait that gave up wanted. Names of phases belong to the kernels: indices. Ticks of both backends are
// ns.
inline pybind11::dict fault_dict(const FaultRecord& fault, int32_t aborted_by) {
    pybind11::dict result;
    result["cause"] = fault.cause == static_cast<uint32_t>(FaultCause::timeout) ? "timeout" : "peer_aborted";
    result["phase"] = fault.phase;
    result["channel"] = kChannelNames[fault.channel];
    result["rank"] = fault.rank;
    result["peer"] = fault.peer;
    result["block"] = fault.block;
    result["warp"] = fault.warp;
    result["slot"] = fault.slot;
    result["wanted_epoch"] = fault.wanted_epoch;
    result["seen_epoch"] = fault.seen_epoch;
    result["seen_value"] = fault.seen_value;
    result["waited_ns"] = fault.waited_ticks;
    result["aborted_by"] = aborted_by;
    return result;
}

}  // namespace tracekern
