// The variants of the P2P pipeline, and how they use memory.
#pragma once

#include <cstdint>

namespace tracekern {

// The steps of the design; those before `dedup` are kept for comparison (worklog/). All have the same result, bit by
// bit, but for those that reduce at the experts: they round otherwise, and agree with each other.
enum class P2PVariant : uint32_t { flag, token, fused, balanced, dedup, reduce, pipelined, overlapped };
inline constexpr const char* kP2PVariantNames[] = {
    "flag", "token", "fused", "balanced", "dedup", "reduce", "pipelined", "overlapped"};

// What the host has to know of a variant.
struct P2PTraits {
    bool deduplicated;        // a token goes once to each rank that has experts of it; a kernel sends and receives
    bool reduces_at_experts;  // an expert's rank adds up its results of a token and sends one row
    bool pipelined;           // one kernel: a partition of the tokens is on its way out while another one comes back
    bool overlapped;          // kernels for each partition: experts compute one while others are on their way
};
inline constexpr P2PTraits kP2PTraits[] = {
    {false, false, false, false},
    {false, false, false, false},
    {false, false, false, false},
    {false, false, false, false},
    {true, false, false, false},
    {true, true, false, false},
    {true, true, true, false},
    {true, true, false, true},
};
constexpr const P2PTraits& traits_of(P2PVariant variant) {
    return kP2PTraits[static_cast<uint32_t>(variant)];
}

}  // namespace tracekern
