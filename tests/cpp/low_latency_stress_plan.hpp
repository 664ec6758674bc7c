// What low_latency_stress launches, on both backends: its command line, and the order of kernels that all ranks draw
// alike.
#pragma once

#include <optional>
#include <random>

#include "moe/low_latency/family.h"

#define TK_OWN_CHANNEL_NAMES kLowLatencyChannelNames
#include "stress_common.hpp"

namespace tracekern {

// What a turn launches:
//   fused        dispatch, experts, combine
//   split        the same, sends and receives as launches of their own
//   two_handles  two dispatches, one for each slot, then their combines, in either order
//   dropped      two dispatches of one slot and no combine: only acknowledgements guard what the first sent
//   overlapped   combine is sent, then the other slot's dispatch, and only then combine received
//   again        a handle is combined three times: only acknowledgements guard the results of the time before
enum class Pattern : uint32_t { fused, split, two_handles, dropped, overlapped, again };
inline constexpr const char* kPatternNames[] = {"fused", "split", "two_handles", "dropped", "overlapped", "again"};

struct LowLatencyStress {
    LowLatencyConfig config;
    uint32_t iterations;
    uint32_t seed;
    std::optional<Pattern> pattern;  // in every turn
    StressOptions stress;

    // arguments: RANKS SMS WARPS TOKENS HIDDEN EXPERTS TOPK ITERATIONS SEED and options. Throws for what no kernel runs
    // with.
    static LowLatencyStress parse(std::vector<char*> arguments, OptionSetters setters = {}) {
        constexpr int kNumFixed = 9;
        if (arguments.size() < kNumFixed) {
            std::fprintf(stderr, "usage: see the head of the program\n");
            std::exit(2);
        }
        const auto number = [&](int i) { return StressOptions::number(arguments[i]); };
        LowLatencyStress given{};
        given.config.number = NumberType::bf16;
        given.config.shape = MoeShape{number(0), number(3), number(5), number(6), number(4), sizeof(BFloat16)};
        const MoeShape& shape = given.config.shape;
        const auto launch = LowLatencyLaunch::of(shape.num_experts, number(1), number(2));
        given.config.num_blocks = launch.num_sms;
        given.config.warps_per_block = launch.num_warps();
        given.config.num_warp_groups = launch.num_warp_groups;
        if (shape.topk >= launch.num_warps()) throw std::invalid_argument("a warp sends one choice: too few for top-k");
        if (shape.num_experts % shape.num_ranks) throw std::invalid_argument("experts do not divide over ranks");
        given.iterations = number(7);
        given.seed = number(8);
        setters["pattern"] = [&](const std::string& name) {
            given.pattern = static_cast<Pattern>(choose(name, kPatternNames));
        };
        const int num_options = static_cast<int>(arguments.size()) - kNumFixed;
        given.stress = StressOptions::parse(num_options, arguments.data() + kNumFixed, setters);
        return given;
    }

    // Of what `a` and `b` tell apart.
    std::mt19937 random(uint32_t a, uint32_t b = 0) const { return std::mt19937(seed * 7919u + a * 104729u + b); }
};

// A dispatch and, unless its handle is dropped, its combine. The same on all ranks.
struct CallPlan {
    uint32_t number;   // of all calls: how many tokens each rank has
    uint32_t content;  // which tokens and choices; a replay of the call has others
    uint32_t slot;
    bool use_fp8;
    bool has_long_ids;
    bool round_scale;  // of fp8 calls
    bool use_ue8m0;    // of those that round
};

struct Step {
    uint32_t call;
    LowLatencyStage stage;
};

// What all ranks launch next, in this order. A kernel waits for none that another rank launches in a later step.
struct Turn {
    std::vector<CallPlan> calls;
    std::vector<Step> steps;

    static constexpr uint32_t kMaxCalls = 2;
    static constexpr uint32_t kMaxSteps = 10;  // of two_handles, split

    static Turn draw(const LowLatencyStress& options, uint32_t iteration) {
        std::mt19937 random = options.random(iteration);
        const auto drawn = static_cast<Pattern>(random() % std::size(kPatternNames));
        const Pattern pattern = options.pattern.value_or(drawn);
        const bool is_split = random() % 2;
        const bool is_reversed = random() % 2;
        const uint32_t slot = random() % kNumSlots;
        Turn turn;
        const auto add_call = [&](uint32_t in_slot) {
            const auto number = iteration * kMaxCalls + static_cast<uint32_t>(turn.calls.size());
            const bool use_fp8 = options.config.shape.hidden % kScaleGroup == 0 && random() % 2;
            const bool has_long_ids = random() % 2, round_scale = use_fp8 && random() % 2;
            const bool use_ue8m0 = round_scale && options.config.shape.hidden % (4 * kScaleGroup) == 0 && random() % 2;
            turn.calls.push_back({number, number, in_slot, use_fp8, has_long_ids, round_scale, use_ue8m0});
        };
        add_call(slot);
        if (pattern == Pattern::two_handles || pattern == Pattern::overlapped) add_call(1 - slot);
        if (pattern == Pattern::dropped) add_call(slot);
        turn.add_steps(pattern, is_split, is_reversed);
        return turn;
    }

private:
    using Stage = LowLatencyStage;

    void add(uint32_t call, std::initializer_list<Stage> stages) {
        for (const Stage stage : stages) steps.push_back({call, stage});
    }

    void add_steps(Pattern pattern, bool is_split, bool is_reversed) {
        switch (pattern) {
            case Pattern::fused:
                return add(0, {Stage::dispatch, Stage::scale_experts, Stage::combine});
            case Pattern::split:
                add(0, {Stage::dispatch_send, Stage::dispatch_recv, Stage::scale_experts});
                return add(0, {Stage::combine_send, Stage::combine_recv});
            case Pattern::two_handles:
                return add_two_handles(is_split, is_reversed);
            case Pattern::dropped:
                for (const uint32_t call : {0, 1}) {
                    if (is_split) {
                        add(call, {Stage::dispatch_send, Stage::dispatch_recv});
                    } else {
                        add(call, {Stage::dispatch});
                    }
                }
                return;
            case Pattern::again:
                add(0, {Stage::dispatch, Stage::scale_experts, Stage::combine});
                for (uint32_t i = 0; i < 2; ++i) {
                    if (is_split) {
                        add(0, {Stage::combine_send, Stage::combine_recv});
                    } else {
                        add(0, {Stage::combine});
                    }
                }
                return;
            case Pattern::overlapped:
                add(0, {Stage::dispatch, Stage::scale_experts, Stage::combine_send});
                add(1, {Stage::dispatch_send});
                add(0, {Stage::combine_recv});
                return add(1, {Stage::dispatch_recv, Stage::scale_experts, Stage::combine});
        }
    }

    void add_two_handles(bool is_split, bool is_reversed) {
        const uint32_t first = is_reversed ? 1 : 0;
        if (is_split) {
            for (const uint32_t call : {0u, 1u}) add(call, {Stage::dispatch_send});
            for (const uint32_t call : {first, 1 - first}) add(call, {Stage::dispatch_recv, Stage::scale_experts});
            for (const uint32_t call : {first, 1 - first}) add(call, {Stage::combine_send});
            for (const uint32_t call : {0u, 1u}) add(call, {Stage::combine_recv});
        } else {
            for (const uint32_t call : {0u, 1u}) add(call, {Stage::dispatch});
            for (const uint32_t call : {first, 1 - first}) add(call, {Stage::scale_experts, Stage::combine});
        }
    }
};

}  // namespace tracekern
