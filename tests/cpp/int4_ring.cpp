// K2 and K4 of prepared weights, a thread a warp: every bit against the contract's `direct`, in launches back to back,
// and in launches that another thread aborts at some moment. Bulk copies are late.
//
//   int4_ring STAGING HIDDEN INTERMEDIATE ROUNDS SEED [aborts=off] [delays=off] [limit_ms=N]
//
// A round is all launches of both products, each once undisturbed and once aborted. An aborted launch may leave out
// tiles, but no part of one. limit_ms: of a launch, at the end of which it hangs.
#define TK_LATE_COPIES

#include <chrono>
#include <cstdio>
#include <random>
#include <thread>

#include "late_copies.hpp"
#include "moe/gemm/kernels.h"
#include "platform/cpu_executor.hpp"
#include "stress_cpu.hpp"

using namespace tracekern;

namespace {

enum Exit { kRight, kWrongResult, kUsage, kTimedOut };

constexpr uint32_t kExperts = 7, kBlocks = 2;
constexpr uint16_t kUntouched = 0xffff;  // a NaN, which no output is

using Random = std::mt19937_64;
using Clock = std::chrono::steady_clock;

uint32_t below(Random& random, uint32_t limit) {
    return static_cast<uint32_t>(random() % limit);
}

// ---- weights ----

struct Weights {
    std::vector<PackedPair> packed;     // as the contract has them
    std::vector<WeightBlock> prepared;  // the same bits
};

// One row and half of a group, bit by bit as the comment at PackedPair says.
struct HalfWord {
    uint64_t bits;

    uint32_t number(uint32_t chunk) const { return bits >> 4 * chunk & 15; }
    uint32_t place(uint32_t chunk) const { return bits >> (32 + 2 * chunk) & 3; }
    uint32_t scale() const { return static_cast<uint32_t>(bits >> 48); }
};

// half(row, h): of the block's 16 rows and 4 halves.
template <class Half>
WeightBlock prepare_block(Half half) {
    WeightBlock block{};
    for (uint32_t lane = 0; lane < 32; ++lane) {
        const uint32_t g = lane / 4, t = lane % 4;
        WeightBlock::Lane& own = block.lanes[lane];
        for (uint32_t h = 0; h < 4; ++h) {
            for (uint32_t j = 0; j < 4; ++j) {
                const uint32_t number = half(g + 8 * (j % 2), h).number(t + 4 * (j / 2));
                own.numbers[h / 2] |= number << (16 * (h % 2) + 4 * j);
            }
        }
        for (uint32_t n = 0; n < 8; ++n) {
            for (uint32_t odd = 0; odd < 2; ++odd) {
                const uint32_t place = half(g + 8 * (n / 4), 2 * (t / 2) + odd).place(4 * (t % 2) + n % 4);
                own.places |= place << (4 * n + 2 * odd);
            }
        }
        for (uint32_t odd = 0; odd < 2; ++odd) {
            own.scales |= half(g + 8 * (t / 2), 2 * (t % 2) + odd).scale() << 16 * odd;
        }
    }
    return block;
}

Weights draw_weights(Random& random, uint32_t channels, uint32_t rows) {
    Weights weights;
    const uint32_t num_groups = channels / kChannelsPerGroup;
    weights.packed.resize(uint64_t{kExperts} * num_groups * rows);
    for (PackedPair& pair : weights.packed) {
        for (uint64_t& half : pair.halves) {
            const uint64_t scale = float_to_bfloat16(0.01f + 0.0001f * static_cast<float>(below(random, 100))).bits;
            half = (random() >> 16) | scale << 48;
        }
    }
    for (uint32_t group = 0; group < kExperts * num_groups; group += 2) {
        for (uint32_t first = 0; first < rows; first += WeightBlock::kRows) {
            weights.prepared.push_back(prepare_block([&](uint32_t row, uint32_t h) {
                return HalfWord{weights.packed[uint64_t{group + h / 2} * rows + first + row].halves[h % 2]};
            }));
        }
    }
    return weights;
}

// ---- the call ----

struct Tokens {
    uint32_t first, count;
};

struct Problem {
    const uint32_t hidden, intermediate;
    std::vector<uint32_t> expert_offset, tile_end, tile_count;
    std::vector<TokenTile> tile_list;
    std::vector<BFloat16> x, middle, result;  // the last two: what is right
    Weights w13, w2;

    // Tiles of all widths, an expert without rows, and one whose rows are two tiles.
    Problem(Random& random, uint32_t hidden, uint32_t intermediate)
        : hidden(hidden),
          intermediate(intermediate),
          expert_offset{0},
          w13(draw_weights(random, hidden, 2 * intermediate)),
          w2(draw_weights(random, intermediate, hidden)) {
        std::vector<uint32_t> counts{0,
                                     1 + below(random, 8),
                                     9 + below(random, 8),
                                     17 + below(random, 16),
                                     33 + below(random, 32),
                                     65 + below(random, 8),
                                     1 + below(random, 8)};
        std::shuffle(counts.begin(), counts.end(), random);
        for (uint32_t count : counts) expert_offset.push_back(expert_offset.back() + count);
        tile_end.resize(kExperts + 1);
        tile_count.resize(kNumTileWidths);
        tile_list.resize(tile_list_begin(kNumTileWidths, kExperts) + num_rows() / kOpenListRows);
        for (uint32_t i = 0; i < num_rows() * hidden; ++i) {
            x.push_back(float_to_bfloat16(static_cast<float>(below(random, 256)) / 64.0f - 2.0f));
        }
        middle = untouched(intermediate);
        result = untouched(hidden);
    }

    uint32_t num_rows() const { return expert_offset.back(); }
    std::vector<BFloat16> untouched(uint32_t columns) const {
        return std::vector<BFloat16>(uint64_t{num_rows()} * columns, BFloat16{kUntouched});
    }
    GemmArgs args() {
        GemmArgs args{};
        args.num_experts = args.num_listed = kExperts;
        args.hidden = hidden;
        args.intermediate = intermediate;
        args.num_rows = num_rows();
        args.offset_stride = 1;
        args.expert_offset = expert_offset.data();
        args.tile_end = tile_end.data();
        args.tile_count = tile_count.data();
        args.x_rows = reinterpret_cast<char*>(x.data());
        args.middle_rows = reinterpret_cast<char*>(middle.data());
        args.result_rows = reinterpret_cast<char*>(result.data());
        args.w13 = reinterpret_cast<const PackedPair*>(w13.prepared.data());
        args.w2 = reinterpret_cast<const PackedPair*>(w2.prepared.data());
        return args;
    }
    // The rows of an expert, at most so many at a time.
    std::vector<Tokens> cut(uint32_t most) const {
        std::vector<Tokens> pieces;
        for (uint32_t expert = 0; expert < kExperts; ++expert) {
            for (uint32_t row = expert_offset[expert]; row < expert_offset[expert + 1]; row += most) {
                pieces.push_back({row, std::min(most, expert_offset[expert + 1] - row)});
            }
        }
        return pieces;
    }
};

// ---- launches ----

struct Options {
    bool aborts = true;
    std::chrono::milliseconds limit{120'000};
};

template <class Body>
void launch(GemmArgs args, const Options& options) {
    if constexpr (kCopiesBoxes<Body>) {
        using Product = typename Body::Product;
        args.x_map = {Product::in(args), args.num_rows, Product::channels(args)};
    }
    const uint32_t num_warps = kNeedsAllWarps<Body> ? Body::kNumWarps : GemmTile::kWarps;
    const auto started = Clock::now();
    const CpuLaunch how{.num_blocks = Body::kIsOneBlock ? 1 : kBlocks,
                        .warps_per_block = num_warps,
                        .shared_bytes = Body::shared_bytes(args, num_warps),
                        .executor = CpuExecutor::threads,
                        .while_waiting = [&] {
                            if (Clock::now() - started < options.limit) return;
                            std::fprintf(stderr, "a launch hangs\n");
                            std::_Exit(kTimedOut);
                        }};
    launch_cpu(how, [&](Warp& warp) {
        if constexpr (requires { typename Body::Slot; }) {
            if (reinterpret_cast<uintptr_t>(&warp.shared<char>()) % alignof(typename Body::Slot) != 0) {
                std::fprintf(stderr, "shared memory is not aligned as slots are\n");
                std::_Exit(kWrongResult);
            }
        }
        Body::template run<Recorder<false>>(warp, args, {});
    });
}

// Lists of tiles, their number, and results of `direct`.
void make_right(Problem& problem, const Options& options) {
    GemmArgs args = problem.args();
    launch<GemmLayOutTiles>(args, options);
    args.w13 = problem.w13.packed.data();
    args.w2 = problem.w2.packed.data();
    launch<GemmSweep<GemmStage::k2, GemmStaging::direct, GemmDetail::parts>>(args, options);
    launch<GemmSweep<GemmStage::k4, GemmStaging::direct, GemmDetail::parts>>(args, options);
    args.tile_list = problem.tile_list.data();
    launch<GemmLayOutTiles>(args, options);
}

// The tokens of the body's tiles, from the rule alone and not from the lists that the kernels read.
template <class Body>
std::vector<Tokens> tokens_of(const Problem& problem) {
    if constexpr (requires { Body::kLoad; }) {
        std::vector<Tokens> tiles = problem.cut(kLargestTile);
        std::erase_if(tiles, [](Tokens tile) { return (tile.count > kFewTokens) != (Body::kLoad == GemmLoad::many); });
        return tiles;
    } else {
        return problem.cut(GemmTile::kTokens);
    }
}

// Each tile is whole or, of an aborted launch, untouched, and so is all that is of no tile.
template <class Body>
bool is_right(const Problem& problem,
              const std::vector<BFloat16>& found,
              const std::vector<BFloat16>& right,
              bool may_leave_out) {
    const auto columns = static_cast<uint32_t>(right.size() / problem.num_rows());
    size_t num_whole = 0;
    for (const Tokens tokens : tokens_of<Body>(problem)) {
        for (uint32_t first = 0; first < columns; first += Body::Weights::kOutputs) {
            const uint32_t width = std::min(Body::Weights::kOutputs, columns - first);
            size_t num_right = 0, num_untouched = 0;
            for (uint32_t i = 0; i < tokens.count * width; ++i) {
                const size_t at = size_t{tokens.first + i / width} * columns + first + i % width;
                num_right += found[at].bits == right[at].bits;
                num_untouched += found[at].bits == kUntouched;
            }
            if (num_right != tokens.count * width && (!may_leave_out || num_untouched != tokens.count * width)) {
                std::fprintf(stderr, "rows %u+%u, outputs from %u: wrong\n", tokens.first, tokens.count, first);
                return false;
            }
            num_whole += num_right;
        }
    }
    size_t num_touched = 0;
    for (const BFloat16 one : found) num_touched += one.bits != kUntouched;
    if (num_touched != num_whole) std::fprintf(stderr, "outputs of no tile were stored\n");
    return num_touched == num_whole;
}

// Launches one body again and again; each reads what is right, and not what another launch made.
template <class Body>
class Launches {
public:
    Launches(Problem& problem, const Options& options) : problem_(problem), options_(options), args_(problem.args()) {
        args_.tile_list = requires { Body::kLoad; } ? problem.tile_list.data() : nullptr;
        args_.abort = &abort_;
    }

    bool run(Random& random) {
        abort_ = 0;
        const auto started = Clock::now();
        if (!launch_and_check(false)) return false;
        const auto took = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - started);
        if (!options_.aborts) return true;
        // From before the first look to behind the last.
        const std::chrono::microseconds moment(below(random, static_cast<uint32_t>(took.count() + took.count() / 8)));
        abort_ = below(random, 16) == 0;
        std::jthread other([&] {
            std::this_thread::sleep_for(moment);
            store_relaxed_system(&abort_, 1u);
        });
        return launch_and_check(true);
    }

private:
    using Product = typename Body::Product;
    static constexpr bool kIsK2 = Product::kPaths == 2;

    bool launch_and_check(bool is_aborted) {
        const std::vector<BFloat16>& right = kIsK2 ? problem_.middle : problem_.result;
        std::vector<BFloat16> found = problem_.untouched(Product::outputs(args_));
        (kIsK2 ? args_.middle_rows : args_.result_rows) = reinterpret_cast<char*>(found.data());
        launch<Body>(args_, options_);
        if (is_right<Body>(problem_, found, right, is_aborted)) return true;
        std::fprintf(stderr, "in %s%s\n", kGemmStageNames[uint32_t(Body::kStage)], is_aborted ? ", aborted" : "");
        return false;
    }

    Problem& problem_;
    const Options& options_;
    GemmArgs args_;
    uint32_t abort_ = 0;
};

template <GemmStaging kStaging>
bool run(Problem& problem, const Options& options, uint32_t num_rounds, Random& random) {
    bool right = true;
    const auto run_body = [&]<class Body>() {
        if constexpr (kNeedsAllWarps<Body>) {
            Launches<Body> launches(problem, options);
            for (uint32_t round = 0; right && round < num_rounds; ++round) right = launches.run(random);
        }
    };
    GemmKernels<kStaging, GemmDetail::parts>::for_each(run_body);
    return right;
}

}  // namespace

int main(int count, char** given) {
    if (count < 6) {
        std::fprintf(stderr, "int4_ring STAGING HIDDEN INTERMEDIATE ROUNDS SEED [option=value]...\n");
        return kUsage;
    }
    Options options;
    OptionSetters setters = cpu_setters();
    setters["aborts"] = [&](const std::string& value) { options.aborts = value != "off"; };
    setters["limit_ms"] = [&](const std::string& value) {
        options.limit = std::chrono::milliseconds(std::stoull(value));
    };
    StressOptions::parse(count - 6, given + 6, setters);

    const auto number = [&](int i) { return StressOptions::number(given[i]); };
    Random random(number(5));
    Problem problem(random, number(2), number(3));
    make_right(problem, options);
    const auto run_staging = [&]<GemmStaging kStaging>() { return run<kStaging>(problem, options, number(4), random); };
    bool right = false;
    switch (static_cast<GemmStaging>(choose(given[1], kGemmStagingNames))) {
        case GemmStaging::wide:
            right = run_staging.template operator()<GemmStaging::wide>();
            break;
        case GemmStaging::ring:
            right = run_staging.template operator()<GemmStaging::ring>();
            break;
        case GemmStaging::reg:
            right = run_staging.template operator()<GemmStaging::reg>();
            break;
        default:
            std::fprintf(stderr, "wide, ring or reg\n");
            return kUsage;
    }
    if (right) std::puts("ok");
    return right ? kRight : kWrongResult;
}
