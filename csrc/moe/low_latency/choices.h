// The experts that a token chose, as all kernels of the family read them.
#pragma once

#include "moe/low_latency/layout.h"

namespace tracekern {

constexpr uint32_t kNoExpert = ~0u;

// The experts that a token names, a lane for each choice; kNoExpert where it names -1 or one that there is not.
TK_DEVICE PerLane<uint32_t> named_experts(Warp& warp, const LowLatencyArgs& args, uint32_t token) {
    return warp.lanes([&](int lane) {
        const auto choice = static_cast<uint32_t>(lane);
        const int64_t expert = choice < args.call.topk ? args.chosen(token, choice) : -1;
        return static_cast<uint64_t>(expert) < args.shape.num_experts ? static_cast<uint32_t>(expert) : kNoExpert;
    });
}

// The expert of a choice; kNoExpert where it is to be passed over: none, or named by a choice before it. A token has
// one place for each expert in every buffer, so that one named twice would be written beyond.
TK_DEVICE uint32_t followed_choice(Warp& warp, const PerLane<uint32_t>& named, uint32_t choice) {
    const uint32_t expert = warp.shuffle(named, static_cast<int>(choice));
    const uint32_t naming = warp.ballot([&](int lane) { return named[lane] == expert; });
    return first_bit(naming) == choice ? expert : kNoExpert;
}

// The lanes of all choices that followed_choice() does not pass over.
TK_DEVICE uint32_t followed_choices(Warp& warp, const PerLane<uint32_t>& named, uint32_t topk) {
    auto first = warp.lanes([&](int) { return kNoExpert; });
    TK_NO_UNROLL
    for (uint32_t choice = topk; choice-- > 0;) {
        const uint32_t expert = warp.shuffle(named, static_cast<int>(choice));
        first = warp.lanes([&](int lane) { return named[lane] == expert ? choice : first[lane]; });
    }
    return warp.ballot(
        [&](int lane) { return named[lane] != kNoExpert && first[lane] == static_cast<uint32_t>(lane); });
}

// Keeps the first choice that was passed over although it is not -1; the host raises an error for it. A function of its
// own: it is hardly ever called.
TK_DEVICE_CALL void report_if_bad(const LowLatencyArgs& args, uint32_t token, uint32_t choice) {
    const int64_t expert = args.chosen(token, choice);
    BadChoice& bad = *args.bad_choice;
    if (expert == -1 || !claim_report(&bad)) return;
    bad.token = token;
    bad.choice = choice;
    bad.expert = expert;
    publish_report(&bad.is_whole, 1u);
}

// The choices of all tokens of this rank, in rows of whole tokens, a lane a choice.
struct ChoiceRows {
    uint32_t num_choices;  // of all tokens
    uint32_t topk;
    uint32_t width;  // choices of a row: those of as many tokens as a ballot has bits for

    TK_DEVICE static ChoiceRows of(const LowLatencyArgs& args) {
        constexpr uint32_t kNumBits = 32;
        const uint32_t topk = args.call.topk;
        return {args.call.num_tokens * topk, topk, kNumBits / topk * topk};
    }
    // Lanes before this one that have choices of the same token.
    TK_DEVICE uint32_t same_token_before(int lane) const {
        const uint32_t own = static_cast<uint32_t>(lane);
        if (own >= width) return 0;
        return ((1u << own) - 1) & ~((1u << own / topk * topk) - 1);
    }
};

// Tells each of num_experts experts from `first` on how many tokens of this rank chose it: visit(i, count) for `first +
// i`, once for each row of choices. The warps of a block share the rows.
template <class Visit>
TK_DEVICE void count_tokens(Warp& warp, const LowLatencyArgs& args, uint32_t first, uint32_t num_experts, Visit visit) {
    const ChoiceRows rows = ChoiceRows::of(args);
    const auto before = warp.lanes([&](int lane) { return rows.same_token_before(lane); });
    TK_NO_UNROLL
    for (uint32_t begin = warp.warp * rows.width; begin < rows.num_choices; begin += warp.num_warps * rows.width) {
        const auto named = warp.lanes([&](int lane) {  // counted from `first`
            const uint32_t i = begin + static_cast<uint32_t>(lane);
            if (static_cast<uint32_t>(lane) >= rows.width || i >= rows.num_choices) return kNoExpert;
            const int64_t expert = args.choice_at(i) - first;
            return static_cast<uint64_t>(expert) < num_experts ? static_cast<uint32_t>(expert) : kNoExpert;
        });
        TK_NO_UNROLL
        for (uint32_t expert = 0; expert < num_experts; ++expert) {
            const uint32_t naming = warp.ballot([&](int lane) { return named[lane] == expert; });
            if (!naming) continue;
            // Of a token that names the expert twice the first choice counts.
            visit(expert,
                  count_bits(warp.ballot([&](int lane) { return named[lane] == expert && !(naming & before[lane]); })));
        }
    }
}

}  // namespace tracekern
