// What launches may know of the kernels of int4 experts. They share the entry points of the families of variants, and
// nothing else: they need no other rank.
#pragma once

#include "moe/gemm/kernels.h"

namespace tracekern {

struct GemmConfig {
    GemmStaging staging;
    GemmDetail detail;
};

struct Gemm {
    using Args = GemmArgs;
    using Config = GemmConfig;
    using Stage = GemmStage;
    using Event = GemmEvent;

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
        if (config.staging == GemmStaging::direct) {
            with_staging.template operator()<GemmStaging::direct>();
        } else {
            with_staging.template operator()<GemmStaging::pinned>();
        }
    }
};

}  // namespace tracekern
