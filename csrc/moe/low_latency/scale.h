// A stand-in for experts between dispatch and combine: each row is dequantised to bf16 and goes through the expert of
// moe/experts.h, into memory that combine sends from. For experts that are kernels of their own it is dequantised
// alone.
#pragma once

#include "moe/low_latency/dispatch.h"

namespace tracekern {

// 8 values of a row, as bf16.
template <bool kFp8>
TK_DEVICE Bf16Pack dequantised(const char* row, uint32_t pack, float scale) {
    if constexpr (kFp8) {
        const auto values = reinterpret_cast<const Fp8Pack*>(row)[pack];
        float numbers[8];
        TK_UNROLL
        for (uint32_t k = 0; k < 8; ++k) {
            const auto bits = static_cast<uint8_t>(values.words[k / 4] >> k % 4 * 8);
            numbers[k] = multiply_rn(fp8_to_float(Fp8{bits}), scale);
        }
        return Bf16Pack::of(numbers);
    } else {
        return load_once(reinterpret_cast<const Bf16Pack*>(row) + pack);
    }
}

template <bool kFp8>
TK_DEVICE void scale_row(Warp& warp, const LowLatencyArgs& args, uint32_t local_expert, uint32_t row, Expert expert) {
    const MessageLayout layout = MessageLayout::of(args.shape.hidden, kFp8);
    const uint64_t packed = args.packed_row(local_expert, row);
    const char* from = args.call.packed_recv_x + packed * layout.values_bytes;
    auto* to = reinterpret_cast<Bf16Pack*>(args.call.expert_rows + packed * args.shape.row_bytes());
    warp.strided_rolled(args.shape.hidden / 8, [&](uint32_t pack) {
        const uint32_t group = pack / (kScaleGroup / 8);
        const float scale = kFp8 ? args.get_scale(args.scale_index(local_expert, row, group)) : 1.0f;
        to[pack] = expert(dequantised<kFp8>(from, pack, scale));
    });
}

template <LowLatencyStage kOwnStage, bool kFp8, class Comm>
struct LowLatencyExpertRows : LowLatencyKernel<kOwnStage, Comm> {
    static constexpr bool kScales = kOwnStage == LowLatencyStage::scale_experts;
    static constexpr auto kRole = kScales ? LowLatencyRole::scale : LowLatencyRole::dequantise;
    static constexpr auto kEvent = kScales ? LowLatencyEvent::scale_token : LowLatencyEvent::dequantise_token;

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const LowLatencyArgsOn<Comm>& args, typename Rec::Args trace) {
        LowLatencyContext<Rec, Comm> context(warp, args, trace, kOwnStage, kRole, args.call.handle->epoch);
        const Experts experts{args.call.expert_scale};
        // The warps take turns at the rows of all experts, one expert after the other: `next` is this warp's next one,
        // counted from the first of an expert.
        const uint32_t stride = warp.num_blocks * warp.num_warps;
        uint32_t next = warp.warp * warp.num_blocks + warp.block;
        for (uint32_t local_expert = 0; local_expert < args.shape.num_local_experts(); ++local_expert) {
            const Expert expert = kScales ? experts[context.own_expert(local_expert)] : Expert{1.0f};
            const uint32_t count = args.call.packed_recv_count[local_expert];
            for (; next < count; next += stride) {
                TK_RANGE(context.recorder, kEvent, local_expert, next);
                scale_row<kFp8>(warp, args, local_expert, next, expert);
            }
            next -= count;
        }
    }
};

}  // namespace tracekern
