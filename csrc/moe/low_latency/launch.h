// How many warps a launch has, and which (local expert, rank) pair each group of warps is responsible for.
//
//   block (SM)  >  warp group: one pair  >  sub-warp: a warp of it  >  lane
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "platform/device.h"

namespace tracekern {

// Of a block: barriers of the machine, less that of the block and that of the warps that cast tokens.
constexpr uint32_t kMaxGroupsPerBlock = 14;
// Of a group: the second polls while the first goes on.
constexpr uint32_t kMinWarpsPerGroup = 2;

// DeepEP's launch arithmetic. All blocks are on the device at once: one an SM, or two of half as many warps where a
// block has no barriers for all groups of an SM.
struct LowLatencyLaunch {
    uint32_t num_warp_groups;      // of a block
    uint32_t num_warps_per_group;  // sub-warps
    uint32_t num_sms;              // blocks

    // num_max_warp_groups: warps of an SM at most, 32 on NVIDIA's machines and 16 on AMD's. Throws for what no block
    // has barriers or warps for.
    static LowLatencyLaunch of(uint32_t num_experts, uint32_t num_device_sms, uint32_t num_max_warp_groups) {
        if (num_experts == 0 || num_device_sms == 0) throw std::invalid_argument("wanted an expert and an SM");
        const auto share = [](uint32_t a, uint32_t b) { return (a + b - 1) / b; };
        const uint32_t of_sm = share(num_experts, num_device_sms);
        const uint32_t num_blocks = of_sm > kMaxGroupsPerBlock ? 2 : 1;  // of an SM
        LowLatencyLaunch launch{};
        launch.num_warp_groups = share(num_experts, num_blocks * num_device_sms);
        launch.num_warps_per_group = num_max_warp_groups / num_blocks / launch.num_warp_groups;
        launch.num_sms = share(num_experts, launch.num_warp_groups);
        const std::string what = std::to_string(num_experts) + " experts on " + std::to_string(num_device_sms) +
                                 " SMs are " + std::to_string(of_sm) + " warp groups an SM";
        if (launch.num_warps_per_group < kMinWarpsPerGroup) {
            throw std::invalid_argument(what + ", which leaves each fewer than 2 of " +
                                        std::to_string(num_max_warp_groups) + " warps; take fewer experts or more SMs");
        }
        if (launch.num_warp_groups > kMaxGroupsPerBlock) {
            throw std::invalid_argument(what + ", at most 28 have a barrier; take fewer experts or more SMs");
        }
        return launch;
    }

    TK_HOST_DEVICE uint32_t num_warps() const { return num_warp_groups * num_warps_per_group; }
    TK_HOST_DEVICE uint32_t warp_group_id(uint32_t warp_id) const { return warp_id / num_warps_per_group; }
    TK_HOST_DEVICE uint32_t sub_warp_id(uint32_t warp_id) const { return warp_id % num_warps_per_group; }
    // From num_experts on: the group is idle.
    TK_HOST_DEVICE uint32_t responsible_expert_idx(uint32_t sm_id, uint32_t warp_id) const {
        return sm_id * num_warp_groups + warp_group_id(warp_id);
    }
};

// The pair that a responsible_expert_idx names. A dispatch that sends: the expert of that number, which is on `rank`. A
// dispatch that receives: tokens from `rank` for this rank's `local_expert`. In combine it is the other way round.
struct ExpertPair {
    uint32_t rank;
    uint32_t local_expert;

    TK_HOST_DEVICE static ExpertPair of(uint32_t responsible_expert_idx, uint32_t num_local_experts) {
        return {responsible_expert_idx / num_local_experts, responsible_expert_idx % num_local_experts};
    }
};

// What packed_recv_layout_range keeps of a pair: the rows of `packed_recv_x` that hold its tokens.
TK_HOST_DEVICE constexpr int64_t pack2(uint32_t count, uint32_t begin) {
    return static_cast<int64_t>(uint64_t{begin} << 32 | count);
}
TK_HOST_DEVICE constexpr uint32_t packed_count(int64_t range) {
    return static_cast<uint32_t>(range);
}
TK_HOST_DEVICE constexpr uint32_t packed_begin(int64_t range) {
    return static_cast<uint32_t>(static_cast<uint64_t>(range) >> 32);
}

}  // namespace tracekern
