// Casts a token into the message that goes to all of its experts.
#pragma once

#include "moe/low_latency/layout.h"
#include "moe/rows.h"

namespace tracekern {

using Bf16Pack = Pack<BFloat16, 8>;

// Smallest magnitude that a scale is made of: a group of zeros has one, too.
constexpr float kMinAmax = 1e-4f;

// Of 8 values the largest magnitude, as bits: of numbers without a sign these are ordered as the numbers are. A NaN is
// left out, as in DeepEP: it becomes the NaN of fp8, and its neighbours stay what they are.
TK_DEVICE uint32_t amax_bits(const Bf16Pack& pack) {
    float largest = 0;
    TK_UNROLL
    for (uint32_t k = 0; k < 8; ++k) {
        largest = larger_number(largest, bits_as<float>(bits_as<uint32_t>(pack[k]) & 0x7fffffffu));
    }
    return bits_as<uint32_t>(largest);
}

// As many values of fp8.
struct alignas(8) Fp8Pack {
    uint32_t words[2];
};

TK_DEVICE Fp8Pack scaled_to_fp8(const Bf16Pack& pack, float factor) {
    Fp8Pack values{};
    TK_UNROLL
    for (uint32_t k = 0; k < 8; k += 2) {
        const uint32_t both = fp8_from_floats(multiply_rn(pack[k], factor), multiply_rn(pack[k + 1], factor));
        values.words[k / 4] |= both << k % 4 * 8;
    }
    return values;
}

// What values are multiplied by before they are cast, and what a receiver multiplies them by, with the bits of DeepEP.
struct Fp8Scale {
    float factor;
    float scale;

    // a: largest magnitude of a group. Rounded: the least power of two that is not below.
    TK_DEVICE static Fp8Scale of(float a, bool is_rounded) {
        const float scale = multiply_rn(a, 1 / kFp8Max);
        if (!is_rounded) return {divide_rn(kFp8Max, a), scale};
        const uint32_t bits = bits_as<uint32_t>(scale);
        const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);
        const uint32_t opposite = exponent < 254 ? 254 - exponent : 0;  // of an infinity none
        return {bits_as<float>(opposite << 23), bits_as<float>(exponent << 23)};
    }
};

// The vectors of a token that one of several warps casts.
struct CastShare {
    uint32_t index;
    uint32_t num_warps;
};

// Of each group of 128 values: a = max(amax, 1e-4), the scale is a * (1 / 448), the values are x * (448 / a). A lane
// casts 8 values, so that 16 lanes share a scale.
template <bool kFp8>
TK_DEVICE void cast_values(
    Warp& warp, char* message, const char* row, uint32_t hidden, CastShare share, bool round_scale) {
    const MessageLayout layout = MessageLayout::of(hidden, kFp8);
    char* values = message + sizeof(MessageHeader);
    auto* scales = reinterpret_cast<float*>(values + layout.values_bytes);
    const auto* packs = reinterpret_cast<const Bf16Pack*>(row);
    const uint32_t num_packs = hidden / 8;
    TK_NO_UNROLL
    for (uint32_t first = share.index * kLanes; first < num_packs; first += share.num_warps * kLanes) {
        const auto place = [&](int lane) { return first + static_cast<uint32_t>(lane); };
        const auto own =
            warp.lanes([&](int lane) { return place(lane) < num_packs ? load_once(packs + place(lane)) : Bf16Pack{}; });
        if constexpr (kFp8) {
            constexpr uint32_t kSharers = kScaleGroup / 8;
            const auto largest = warp.template max_within<kSharers>([&](int lane) { return amax_bits(own[lane]); });
            warp.each_lane([&](int lane) {
                if (place(lane) >= num_packs) return;
                const float amax = bits_as<float>(largest[lane]);
                const Fp8Scale scale = Fp8Scale::of(amax < kMinAmax ? kMinAmax : amax, round_scale);
                reinterpret_cast<Fp8Pack*>(values)[place(lane)] = scaled_to_fp8(own[lane], scale.factor);
                if (place(lane) % kSharers == 0) scales[place(lane) / kSharers] = scale.scale;
            });
        } else {
            warp.each_lane([&](int lane) {
                if (place(lane) < num_packs) reinterpret_cast<Bf16Pack*>(values)[place(lane)] = own[lane];
            });
        }
    }
}

// All warps of a share cast the token; the first also writes the header.
template <bool kFp8, class Context>
TK_DEVICE void cast_token(Context& context, char* message, uint32_t token, CastShare share) {
    const auto& args = context.args;
    TK_RANGE(context.recorder, LowLatencyEvent::cast_token, token);
    const char* row = args.call.x + uint64_t{token} * args.shape.row_bytes();
    if (share.index == 0 && context.warp.is_leader()) {
        *reinterpret_cast<MessageHeader*>(message) = MessageHeader{token, {}};
    }
    cast_values<kFp8>(context.warp, message, row, args.shape.hidden, share, args.call.round_scale);
}

}  // namespace tracekern
