// All ranks of the low latency kernels in one process, back to back with no barrier in between, every result checked
// bit by bit.
//
//   low_latency_stress EXECUTOR RANKS SMS WARPS TOKENS HIDDEN EXPERTS TOPK ITERATIONS SEED [OPTION=VALUE...]
//     SMS, WARPS             blocks, and warps of a block, at most: see moe/low_latency/launch.h
//     pattern=NAME           what every iteration launches, see low_latency_stress_plan.hpp; default one after another
//     trace=on|ring          runs the traced kernels and looks after the words behind their records
//     timeout_ms=N           how long a wait lasts; default 120000
//     absent=RANK            that rank never starts
//     hosts=3+5              ranks of each host; others are reached over a network: see stress_proxies.hpp for options
//     plant=CHANNEL:MUTATION leaves something out of the protocol, see comm/mutation.h (-DTK_PLANTED_FAULTS)
//
// An iteration is one call or two. Slots, input, routing, token counts, the types of messages and of expert numbers
// change in every call; about a third of the ranks have no token at all. Built by the tests with -fsanitize=thread,
// -DTK_RANDOM_DELAYS and -DTK_POISON_CONSUMED.
// Exit: 0 right, 1 wrong result, 2 usage, 3 a wait ran out of time, 4 a record where none belongs.
#include <thread>

#include "low_latency_stress_calls.hpp"
#include "moe/low_latency/buffer.hpp"
#include "moe/low_latency/inbox.hpp"
#include "moe/pipeline_cpu.hpp"
#include "stress_proxies.hpp"

using namespace tracekern;

namespace {

struct Options : LowLatencyStress {
    CpuExecutor executor;
    std::vector<uint32_t> host_of;  // [rank]; empty: all ranks map each other
    NetworkOptions network;
};

// The other ranks would wait for this one until their time is over.
[[noreturn]] void end_at_once(int code) {
    std::fflush(stderr);
    std::_Exit(code);
}

template <class Comm>
class Rank {
public:
    Rank(const Options& options, const LowLatencyConfig& config, CpuCommunicator& comm)
        : options_(options),
          comm_(comm),
          buffer_(comm, config, PipelineBackendCpu(options.executor), /*first_stage=*/0),
          scale_(expert_scale(options.config.shape)),
          layout_(options.config.shape),
          headers_(TraceRegion::num_headers(options.stress, num_tracks())),
          records_(TraceRegion::num_records(options.stress, num_tracks())),
          region_(options.stress,
                  options.config.num_blocks,
                  options.config.warps_per_block,
                  headers_.data(),
                  records_.data()) {
        for (auto& memory : memory_) memory.resize(layout_.bytes / sizeof(Vector16));
    }

    const auto& args() { return buffer_.args(); }

    // Returns the exit code.
    int run() {
        for (uint32_t iteration = 0; iteration < options_.iterations; ++iteration) {
            const Turn turn = Turn::draw(options_, iteration);
            std::vector<std::vector<Input>> inputs;
            std::vector<LowLatencyCall> calls;
            for (const CallPlan& plan : turn.calls) {
                char* memory = memory_of(static_cast<uint32_t>(calls.size()));
                const Input& own = inputs.emplace_back(draw_inputs(options_, plan))[rank()];
                layout_.put(memory, plan, own);
                const uint32_t topk = options_.config.shape.topk;
                calls.push_back(layout_.call(memory, plan, own.num_tokens, topk, scale_.data()));
            }
            for (const Step& step : turn.steps) {
                const CallPlan& plan = turn.calls[step.call];
                buffer_.run({step.stage}, calls[step.call], plan.use_fp8, {region_.begin_launch()}, /*stream=*/0);
                if (!region_.is_whole()) end_at_once(4);
                if (comm_.failed()) return report_fault(comm_.fault(), kLowLatencyStageNames[comm_.fault().stage]);
                if (!is_right(step, plan, inputs[step.call])) end_at_once(1);
            }
        }
        return 0;
    }

private:
    uint32_t rank() const { return comm_.args().rank; }
    size_t num_tracks() const { return size_t{options_.config.num_blocks} * options_.config.warps_per_block; }
    char* memory_of(uint32_t call) { return reinterpret_cast<char*>(memory_[call].data()); }

    bool is_right(const Step& step, const CallPlan& plan, const std::vector<Input>& inputs) {
        const CallCheck check(options_, layout_, memory_of(step.call), rank(), plan, inputs);
        switch (step.stage) {
            case LowLatencyStage::dispatch:
            case LowLatencyStage::dispatch_recv:
                return check.received();
            case LowLatencyStage::combine:
            case LowLatencyStage::combine_recv:
                return check.combined(scale_);
            default:
                return true;
        }
    }

    const Options& options_;
    CpuCommunicator& comm_;
    LowLatencyBuffer<PipelineBackendCpu, Comm> buffer_;
    const std::vector<float> scale_;
    const CallLayout layout_;
    std::vector<Vector16> memory_[Turn::kMaxCalls];
    std::vector<TrackHeader> headers_;
    std::vector<WideRecord> records_;
    TraceRegion region_;
};

template <class Comm>
int run(const Options& options) {
    const uint32_t num_ranks = options.config.shape.num_ranks;
    const StressHeaps heaps(num_ranks, LowLatency::heap_bytes(options.config));
    const auto mapped = [&](uint32_t rank) {
        return kIsFar<Comm> ? heaps.of_host(rank, options.host_of) : heaps.addresses;
    };
    std::vector<std::unique_ptr<CpuCommunicator>> comms;
    std::vector<std::unique_ptr<Rank<Comm>>> ranks;
    std::vector<std::unique_ptr<RankProxy>> proxies;
    const auto library = kIsFar<Comm> ? std::make_shared<FabricLibrary>(options.network.library) : nullptr;
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
        comms.push_back(std::make_unique<CpuCommunicator>(rank, mapped(rank), options.stress.timeout_ns, heaps.clock));
        LowLatencyConfig config = options.config;
        if constexpr (kIsFar<Comm>) {
            const auto layout = LowLatencyLayout::make(config.shape, config.first_byte);
            proxies.push_back(options.network.open(library, comms[rank]->args(), layout.far_bytes));
            config.commands = &proxies[rank]->ring();
            config.far_heap = proxies[rank]->far_heap();
        }
        ranks.push_back(std::make_unique<Rank<Comm>>(options, config, *comms[rank]));
        if constexpr (kIsFar<Comm>) proxies[rank]->proxy().reset(LowLatencyInbox(ranks[rank]->args()));
    }
    if constexpr (kIsFar<Comm>) meet_all(proxies, options.host_of);
    for (auto& proxy : proxies) proxy->start();
    std::vector<int> exits(num_ranks);
    {
        std::vector<std::jthread> threads;
        for (uint32_t rank = 0; rank < num_ranks; ++rank) {
            if (rank == options.stress.absent) continue;
            threads.emplace_back([&, rank] { exits[rank] = ranks[rank]->run(); });
        }
    }
    return *std::max_element(exits.begin(), exits.end());
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<char*> arguments(argv + 1, argv + argc);
    if (arguments.empty()) {
        std::fprintf(stderr, "usage: see the head of low_latency_stress.cpp\n");
        return 2;
    }
    Options options{};
    OptionSetters setters = cpu_setters();
    setters["hosts"] = [&](const std::string& value) { options.host_of = parse_hosts(value); };
    options.network.add_setters(setters);
    options.executor =
        static_cast<CpuExecutor>(choose(arguments[0], std::initializer_list<const char*>{"fibers", "threads"}));
    arguments.erase(arguments.begin());  // the GPU's program has none
    try {
        static_cast<LowLatencyStress&>(options) = LowLatencyStress::parse(arguments, setters);
        if (!options.host_of.empty() && options.host_of.size() != options.config.shape.num_ranks)
            throw std::invalid_argument("hosts: wanted as many ranks as there are");
    } catch (const std::invalid_argument& error) {
        std::fprintf(stderr, "low_latency_stress: %s\n", error.what());
        return 2;
    }
    const int code = options.host_of.empty() ? run<CommArgs>(options) : run<FarArgs>(options);
    if (code == 0) std::puts("ok");
    return code;
}
