// Tokens to rows of their experts, and results back: the steps around K2 and K4.
#pragma once

#include "moe/gemm/events.h"
#include "moe/gemm/layout.h"
#include "moe/row_sum.h"
#include "trace/recorder.h"

namespace tracekern {

// A warp a choice.
struct GemmPermute {
    using Args = GemmArgs;
    static constexpr GemmStage kStage = GemmStage::permute;
    static constexpr uint32_t kMaxThreads = 512;
    static constexpr uint32_t kNumWarps = 8;
    static constexpr bool kIsOneBlock = false;

    TK_HOST_DEVICE static uint64_t shared_bytes(const GemmArgs&, uint32_t) { return 0; }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const GemmArgs& args, typename Rec::Args trace) {
        Rec recorder(trace, warp, static_cast<uint32_t>(GemmRole::permute));
        const uint32_t row_bytes = args.hidden * sizeof(BFloat16);
        const uint32_t num_warps = warp.num_blocks * warp.num_warps;
        TK_NO_UNROLL
        for (uint32_t i = warp.block * warp.num_warps + warp.warp; i < args.num_choices(); i += num_warps) {
            const int32_t row = args.inverse[i];
            if (row < 0) continue;
            const uint32_t token = i / args.topk;
            TK_RANGE(recorder, GemmEvent::permute_token, token, static_cast<uint32_t>(row));
            copy_row(warp,
                     args.x_rows + static_cast<uint64_t>(row) * row_bytes,
                     args.x + uint64_t{token} * row_bytes,
                     row_bytes);
        }
    }
};

// Blocks share the tokens, the warps of a block the columns: out = round(sum over choices k, in their order, of
// weight[k] * result[k]), the same additions as in combine.
struct GemmUnpermute {
    using Args = GemmArgs;
    static constexpr GemmStage kStage = GemmStage::unpermute;
    static constexpr uint32_t kMaxThreads = 512;
    static constexpr uint32_t kNumWarps = 8;
    static constexpr bool kIsOneBlock = false;

    TK_HOST_DEVICE static uint64_t shared_bytes(const GemmArgs&, uint32_t warps_per_block) {
        return warps_per_block * sizeof(Contributions);
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const GemmArgs& args, typename Rec::Args trace) {
        Rec recorder(trace, warp, static_cast<uint32_t>(GemmRole::unpermute));
        const uint32_t row_bytes = args.hidden * sizeof(BFloat16);
        TK_NO_UNROLL
        for (uint32_t token = warp.block; token < args.num_tokens; token += warp.num_blocks) {
            TK_RANGE(recorder, GemmEvent::unpermute_token, token);
            Contributions& list = (&warp.shared<Contributions>())[warp.warp];
            const uint32_t count = collect(warp, args, token, list);
            char* out = args.out + uint64_t{token} * row_bytes;
            sum_rows<BFloat16, false, false>(warp, out, list.rows, count, args.hidden, warp.warp, warp.num_warps);
        }
    }

private:
    struct Contributions {
        Contribution rows[kMaxGemmTopk];
    };

    // Returns how many of the token's choices have a row.
    TK_DEVICE static uint32_t collect(Warp& warp, const GemmArgs& args, uint32_t token, Contributions& list) {
        return warp.once([&] {
            uint32_t count = 0;
            TK_NO_UNROLL
            for (uint32_t i = token * args.topk; i < (token + 1) * args.topk; ++i) {
                if (args.inverse[i] < 0) continue;
                char* row = args.result_rows + static_cast<uint64_t>(args.inverse[i]) * args.hidden * sizeof(BFloat16);
                list.rows[count++] = {row, args.topk_weights[i], {1.0f}, 0, 0};
            }
            return count;
        });
    }
};

}  // namespace tracekern
