// The experts that a token chose, as all kernels of the family read them.
#pragma once

#include "comm/report.h"
#include "moe/low_latency/layout.h"

namespace tracekern {

constexpr uint32_t kNoExpert = ~0u;

// The expert of a choice; kNoExpert where it is to be passed over: -1, out of range, or named by a choice before it. A
// token has one place for each expert in every buffer, so that one named twice would be written beyond.
TK_DEVICE uint32_t followed_choice(const LowLatencyArgs& args, uint32_t token, uint32_t choice) {
    const int64_t expert = args.chosen(token, choice);
    if (static_cast<uint64_t>(expert) >= args.shape.num_experts) return kNoExpert;
    TK_NO_UNROLL
    for (uint32_t before = 0; before < choice; ++before) {
        if (args.chosen(token, before) == expert) return kNoExpert;
    }
    return static_cast<uint32_t>(expert);
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

// Tokens of this rank for an expert, by all lanes.
TK_DEVICE uint32_t count_tokens(Warp& warp, const LowLatencyArgs& args, uint32_t expert) {
    const uint32_t topk = args.call.topk;
    return warp.sum_over(args.call.num_tokens * topk, [&](uint32_t i) {
        const uint32_t token = i / topk;
        const uint32_t choice = i - token * topk;
        if (args.chosen(token, choice) != static_cast<int64_t>(expert)) return 0u;
        return followed_choice(args, token, choice) == expert ? 1u : 0u;
    });
}

}  // namespace tracekern
