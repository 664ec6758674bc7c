// What launches may know of the kernels of int4 experts. They share the entry points of the families of variants, and
// nothing else: they need no other rank.
#pragma once

#include <iterator>
#include <stdexcept>

#include "moe/gemm/kernels.h"
#include "trace/trace_choice.h"

namespace tracekern {

// A block of prepared weights has a part for each lane. HIP, whose warps have 64, keeps its loops: `direct`, `pinned`.
inline constexpr bool kTakesPreparedWeights = kLanes == static_cast<int>(std::size(WeightBlock{}.lanes));

struct GemmConfig {
    GemmStaging staging;
    GemmDetail detail;
};

struct Gemm {
    using Args = GemmArgs;
    using Config = GemmConfig;
    using Stage = GemmStage;
    using Event = GemmEvent;
    // A product takes tens of microseconds: the time that one more body takes to compile is worth more.
    using Bodies = detail::EveryFormat;

    static constexpr const char* kName = "gemm";
    static constexpr auto& kStageNames = kGemmStageNames;
    static constexpr auto& kRoleNames = kGemmRoleNames;

    template <class F>
    static void with_kernels(const GemmConfig& config, F f) {
        const auto with_staging = [&]<GemmStaging kStaging>() {
            if (config.detail == GemmDetail::parts) {
                f(GemmKernels<kStaging, GemmDetail::parts>{});
            } else {
                f(GemmKernels<kStaging, GemmDetail::steps>{});
            }
        };
        switch (config.staging) {
            case GemmStaging::direct:
                return with_staging.template operator()<GemmStaging::direct>();
            case GemmStaging::pinned:
                return with_staging.template operator()<GemmStaging::pinned>();
            default:
                break;
        }
        if constexpr (kTakesPreparedWeights) {
            switch (config.staging) {
                case GemmStaging::wide:
                    return with_staging.template operator()<GemmStaging::wide>();
                case GemmStaging::ring:
                    return with_staging.template operator()<GemmStaging::ring>();
                case GemmStaging::reg:
                    return with_staging.template operator()<GemmStaging::reg>();
                default:
                    break;
            }
        }
        throw std::invalid_argument("this device has no kernels of that staging");
    }
};

}  // namespace tracekern
