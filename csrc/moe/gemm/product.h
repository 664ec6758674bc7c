// What K2 and K4 compute: rows of each expert times its weights. K2 makes silu(gate) * up of a token's row, K4 its
// result.
#pragma once

#include "moe/gemm/events.h"
#include "moe/gemm/layout.h"
#include "moe/gemm/silu.h"
#include "trace/recorder.h"

namespace tracekern {

// ---- sums ----

// A scale of each of the two rows that a lane has sums of: g and g + 8 of the warp's 16.
struct RowScales {
    float top;
    float bottom;
};

// Sums of a lane, placed like a ProductTile.
struct LaneSums {
    float values[4];

    TK_DEVICE void add_scaled(const ProductTile& product, RowScales scale) {
        TK_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            values[i] = multiply_add_rn(product.values[i], i < 2 ? scale.top : scale.bottom, values[i]);
        }
    }
};

// ---- records ----

// Something that is there when all four words are.
TK_DEVICE uint64_t behind(const uint32_t (&words)[4]) {
    return uint64_t{words[0] | words[1]} << 32 | words[2] | words[3];
}

// Calls f(steps) with the recorder of a tile's steps: `recorder` where they are on record, and else one that records
// nothing.
template <GemmDetail kDetail, class Rec, class F>
TK_DEVICE auto with_steps(Warp& warp, Rec& recorder, const GemmArgs& args, uint32_t tile, F f) {
    if constexpr (kDetail == GemmDetail::steps && Rec::kTraced) {
        if (holds_for_all(warp, tile % args.detail == 0)) return f(recorder);
    }
    Recorder<false> no_steps({}, warp);
    return f(no_steps);
}

// Calls f(steps) in the same way, with `recorder` if `wanted`, which is the same in all lanes.
template <class Rec, class F>
TK_DEVICE void with_steps_if(Warp& warp, Rec& recorder, bool wanted, F f) {
    if constexpr (Rec::kTraced) {
        if (wanted) return f(recorder);
    }
    Recorder<false> no_steps({}, warp);
    f(no_steps);
}

// ---- what differs between the kernels ----

// kPaths: how many rows of weights an output has.
template <GemmStage kStage>
struct GemmProduct;

template <>
struct GemmProduct<GemmStage::k2> {
    static constexpr GemmRole kRole = GemmRole::k2;
    static constexpr uint32_t kPaths = 2;  // gate and up

    TK_HOST_DEVICE static uint32_t channels(const GemmArgs& args) { return args.hidden; }
    TK_HOST_DEVICE static uint32_t outputs(const GemmArgs& args) { return args.intermediate; }
    TK_HOST_DEVICE static const PackedPair* weights(const GemmArgs& args) { return args.w13; }
    TK_HOST_DEVICE static const char* in(const GemmArgs& args) { return args.x_rows; }
    TK_HOST_DEVICE static char* out(const GemmArgs& args) { return args.middle_rows; }
    TK_DEVICE static float result(float gate, float up) { return multiply_rn(silu(gate), up); }
};

template <>
struct GemmProduct<GemmStage::k4> {
    static constexpr GemmRole kRole = GemmRole::k4;
    static constexpr uint32_t kPaths = 1;

    TK_HOST_DEVICE static uint32_t channels(const GemmArgs& args) { return args.intermediate; }
    TK_HOST_DEVICE static uint32_t outputs(const GemmArgs& args) { return args.hidden; }
    TK_HOST_DEVICE static const PackedPair* weights(const GemmArgs& args) { return args.w2; }
    TK_HOST_DEVICE static const char* in(const GemmArgs& args) { return args.middle_rows; }
    TK_HOST_DEVICE static char* out(const GemmArgs& args) { return args.result_rows; }
};

template <>
struct GemmProduct<GemmStage::k2_many> : GemmProduct<GemmStage::k2> {};
template <>
struct GemmProduct<GemmStage::k4_many> : GemmProduct<GemmStage::k4> {};

constexpr GemmLoad load_of(GemmStage stage) {
    return stage == GemmStage::k2_many || stage == GemmStage::k4_many ? GemmLoad::many : GemmLoad::few;
}

}  // namespace tracekern
