// All ranks of the two-hop kernels in one process, back to back with no barrier in between, every result checked bit by
// bit.
//
//   two_hop_stress run EXECUTOR NODES PEERS CHANNELS TOKENS HIDDEN LOCAL_EXPERTS TOPK RDMA_SEND RDMA_RECV NVL_SEND
//                      NVL_RECV FP8 PEER_WARPS CALLS SEED [OPTION=VALUE...]
//   two_hop_stress shapes EXECUTOR SHAPES CALLS SEED [OPTION=VALUE...]      as many shapes, drawn from the seed
//
//   library=PATH provider=NAME commands=N window=N   nodes are hosts, between which a network lies: see
//                                                    stress_proxies.hpp
//   traffic=drawn|hub      see two_hop_stress_plan.hpp
//   leaves=RANK            that rank never dispatches its last call; leaves_combine=RANK: never combines it
//   combine=drawn|never|always   whether what a dispatch delivered is combined
//   graph=on               dispatch is launched behind each notify as in a graph, whatever came of it; else now and
//   then trace, timeout_ms, absent, plant, abort_at, delays     see low_latency_stress.cpp and stress_cpu.hpp
//
// A call is notify, the counts that a second thread of the host finds meanwhile, and dispatch. Token counts, choices
// and values change in every call. Rings may be shorter than the proved least, to see them hang.
// Exit: 0 right, 1 wrong result, 2 usage, 3 a wait ran out of time, 4 a record where none belongs.
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "moe/pipeline_cpu.hpp"
#include "moe/two_hop/inbox.hpp"
#include "two_hop_stress_calls.hpp"
#include "two_hop_stress_combine.hpp"

using namespace tracekern;

namespace {

// The other ranks would wait for this one until their time is over.
[[noreturn]] void end_at_once(int code) {
    std::fflush(stderr);
    std::_Exit(code);
}

// The records of one kernel.
struct KernelTrace {
    KernelTrace(const StressOptions& options, uint32_t num_blocks, uint32_t warps_per_block)
        : headers(TraceRegion::num_headers(options, size_t{num_blocks} * warps_per_block)),
          records(TraceRegion::num_records(options, size_t{num_blocks} * warps_per_block)),
          region(options, num_blocks, warps_per_block, headers.data(), records.data()) {}

    std::vector<TrackHeader> headers;
    std::vector<WideRecord> records;
    TraceRegion region;
};

template <class Family>
class Rank {
public:
    Rank(const TwoHopStress& options,
         const TwoHopConfig& config,
         CpuCommunicator& comm,
         const std::vector<TwoHopInputs>& inputs)
        : options_(options),
          comm_(comm),
          inputs_(inputs),
          buffer_(comm, config, PipelineBackendCpu(options.executor), /*first_stage=*/0),
          came_(options.config),
          due_(options.config),
          notify_trace_(
              options.stress, options.config.blocks_of(TwoHopStage::notify_dispatch), options.config.warps_per_block),
          dispatch_trace_(
              options.stress, options.config.blocks_of(TwoHopStage::dispatch), options.config.warps_per_block),
          combine_trace_(
              options.stress, options.config.blocks_of(TwoHopStage::combine), options.config.warps_per_block),
          combined_(options.config) {}

    const auto& args() { return buffer_.args(); }

    // Returns the exit code.
    int run() {
        for (uint32_t i = 0; i < options_.num_calls; ++i) {
            std::mt19937 random = options_.random(i, kMaxRanks + 1 + rank());
            const TwoHopOracle oracle(options_.config, inputs_[i], rank());
            TwoHopCall call = begin_call(inputs_[i][rank()]);
            call.expert_alignment = random() % 2 ? 1 : 1 + static_cast<uint32_t>(random() % 8);
            // In graphs nobody looks between the two: there is room for whatever may come.
            const bool is_graph = options_.always_graph || random() % 4 == 0;
            const MoeShape& shape = options_.config.shape;
            if (is_graph) {
                call.recv_capacity = shape.num_ranks * shape.max_tokens;
                call.forward_capacity = options_.config.num_nodes * shape.max_tokens;
            }
            const std::optional<RecvCounts> counts = notify(call, i);
            if (!notify_trace_.region.is_whole()) end_at_once(4);
            if (!is_graph) {
                if (comm_.failed()) return fault();
                if (!counts) end_at_once(1);
                call.recv_capacity = counts->num_recv_tokens;
                call.forward_capacity = counts->num_rdma_recv_tokens;
            }
            if (rank() == options_.leaves && i + 1 == options_.num_calls) return 0;
            buffer_.dispatch(call, {dispatch_trace_.region.begin_launch()}, /*stream=*/0);
            if (!dispatch_trace_.region.is_whole()) end_at_once(4);
            if (comm_.failed()) return fault();
            if (!counts || !is_right(*counts, oracle.counts(call.expert_alignment), i)) end_at_once(1);
            if (buffer_.take_overflow() != 0) end_at_once(1);
            due_.clear();
            oracle.fill(due_.call);
            require_due(i);
            if (options_.repeats(i)) {
                if (const int code = repeat(call, i)) return code;
            }
            if (options_.combines(i)) {
                if (const int code = combine(call, i)) return code;
            }
        }
        return 0;
    }

private:
    void require_due(uint32_t i) const {
        const std::string wrong = came_.difference(due_);
        if (wrong.empty()) return;
        const char* run = options_.name.c_str();
        std::fprintf(stderr, "rank %u: wrong %s in call %u of run %s\n", rank(), wrong.c_str(), i, run);
        end_at_once(1);
    }

    // Sends the same tokens once more, with the handle. Returns the exit code; 0: right.
    int repeat(const TwoHopCall& call, uint32_t i) {
        memset(call.recv_x, 0xff, uint64_t{call.recv_capacity} * options_.config.row().hidden_bytes);
        buffer_.cached_dispatch(call, {dispatch_trace_.region.begin_launch()}, /*stream=*/0);
        if (!dispatch_trace_.region.is_whole()) end_at_once(4);
        if (comm_.failed()) return fault();
        require_due(i);
        return 0;
    }

    // Returns the exit code; 0: right.
    int combine(TwoHopCall& call, uint32_t i) {
        const bool weighs = options_.random(i, 4 * kMaxRanks)() % 2;
        const CombineNumbers numbers{options_.seed, i};
        combined_.put(call, numbers, inputs_[i], rank(), weighs);
        if (rank() == options_.leaves_combine && i + 1 == options_.num_calls) return 0;
        buffer_.combine(call, {combine_trace_.region.begin_launch()}, /*stream=*/0);
        if (!combine_trace_.region.is_whole()) end_at_once(4);
        if (comm_.failed()) return fault();
        if (!combined_.is_right(numbers, inputs_[i][rank()], rank(), weighs)) end_at_once(1);
        return 0;
    }

    uint32_t rank() const { return comm_.args().rank; }
    int fault() const {
        std::fprintf(stderr, "in run %s\n", options_.name.c_str());
        return report_fault(comm_.fault(), kTwoHopStageNames[comm_.fault().stage]);
    }

    TwoHopCall begin_call(const TwoHopInput& input) {
        came_.clear();
        TwoHopCall call = came_.call;
        call.num_tokens = input.num_tokens;
        call.x = reinterpret_cast<const char*>(input.x.data());
        call.x_scales = input.x_scales.data();
        call.topk_idx = input.topk_idx.data();
        call.topk_weights = input.topk_weights.data();
        call.is_token_in_rank = input.is_token_in_rank.data();
        call.num_tokens_per_rank = input.num_tokens_per_rank.data();
        call.num_tokens_per_rdma_rank = input.num_tokens_per_rdma_rank.data();
        call.num_tokens_per_expert = input.num_tokens_per_expert.data();
        return call;
    }

    // Runs notify while another thread looks for its counts; returns them. None: they were never told.
    std::optional<RecvCounts> notify(const TwoHopCall& call, uint32_t i) {
        const uint64_t ticket = i + 1;
        std::optional<RecvCounts> counts;
        std::atomic<bool> has_ended = false;
        std::jthread poller([&] {
            for (bool is_last = false; !counts && !is_last;) {
                is_last = has_ended.load(std::memory_order_acquire);
                counts = buffer_.find_counts(ticket);
                if (!counts) std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
        });
        if (buffer_.notify(call, {notify_trace_.region.begin_launch()}, /*stream=*/0) != ticket) end_at_once(1);
        has_ended.store(true, std::memory_order_release);
        poller.join();
        return counts;
    }

    bool is_right(const RecvCounts& came, const RecvCounts& due, uint32_t i) const {
        const bool is_right = came.num_recv_tokens == due.num_recv_tokens &&
                              came.num_rdma_recv_tokens == due.num_rdma_recv_tokens &&
                              came.num_recv_tokens_per_expert == due.num_recv_tokens_per_expert;
        if (!is_right)
            std::fprintf(stderr, "rank %u: wrong counts in call %u of run %s\n", rank(), i, options_.name.c_str());
        return is_right;
    }

    const TwoHopStress& options_;
    CpuCommunicator& comm_;
    const std::vector<TwoHopInputs>& inputs_;
    TwoHopBuffer<PipelineBackendCpu, Family> buffer_;
    TwoHopOutputs came_, due_;
    KernelTrace notify_trace_, dispatch_trace_, combine_trace_;
    Combined combined_;
};

template <class Comm>
int run(const TwoHopStress& options) {
    using Family = TwoHopOn<Comm>;
    const uint32_t num_ranks = options.config.shape.num_ranks;
    const std::vector<uint32_t> host_of = hosts_of(num_ranks, options.config.nodes().peers);
    const uint64_t heap_bytes = Family::heap_bytes(options.config);
    const StressHeaps heaps(num_ranks, heap_bytes);
    const std::vector<TwoHopInputs> inputs = draw_inputs(options);
    const auto library = kIsFar<Comm> ? std::make_shared<FabricLibrary>(options.network.library) : nullptr;
    std::vector<std::unique_ptr<CpuCommunicator>> comms;
    std::vector<std::unique_ptr<Rank<Family>>> ranks;
    std::vector<std::unique_ptr<RankProxy>> proxies;
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
        comms.push_back(std::make_unique<CpuCommunicator>(rank,
                                                          kIsFar<Comm> ? heaps.of_host(rank, host_of) : heaps.addresses,
                                                          options.stress.timeout_ns,
                                                          heaps.clock));
        TwoHopConfig config = options.config;
        if constexpr (kIsFar<Comm>) {
            proxies.push_back(options.network.open(library, comms[rank]->args(), heap_bytes));
            config.commands = &proxies[rank]->ring();
            config.far_heap = proxies[rank]->far_heap();
        }
        ranks.push_back(std::make_unique<Rank<Family>>(options, config, *comms[rank], inputs));
        if constexpr (kIsFar<Comm>) {
            const auto inbox = std::make_shared<TwoHopInbox>(ranks[rank]->args());
            proxies[rank]->proxy().reset(
                [inbox](uint32_t peer, const Immediate& imm) { return inbox->take(peer, imm); },
                [inbox](uint32_t peer, const Immediate& imm) { inbox->complete(peer, imm); });
        }
    }
    meet_all(proxies, host_of);
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

int run_shape(TwoHopStress& options, const TwoHopNumbers& numbers) {
    options.config = numbers.config();
    options.name = numbers.text() + std::to_string(options.num_calls) + " " + std::to_string(options.seed);
    return options.network.library.empty() ? run<CommArgs>(options) : run<FarArgs>(options);
}

}  // namespace

int main(int argc, char** argv) {
    const bool is_shape = argc > 1 && choose(argv[1], std::initializer_list<const char*>{"run", "shapes"}) == 0;
    const int num_fixed = 3 + (is_shape ? TwoHopNumbers::kCount : 1) + 2;
    if (argc < num_fixed) {
        std::fprintf(stderr, "usage: see the head of two_hop_stress.cpp\n");
        return 2;
    }
    TwoHopStress options{};
    options.executor =
        static_cast<CpuExecutor>(choose(argv[2], std::initializer_list<const char*>{"fibers", "threads"}));
    options.num_calls = StressOptions::number(argv[num_fixed - 2]);
    options.seed = StressOptions::number(argv[num_fixed - 1]);
    OptionSetters setters = cpu_setters();
    options.network.add_setters(setters);
    setters["combine"] = [&](const std::string& name) {
        options.combine = static_cast<Combine>(choose(name, kCombineNames));
    };
    setters["leaves_combine"] = [&](const std::string& value) {
        options.leaves_combine = StressOptions::number(value);
    };
    setters["leaves"] = [&](const std::string& value) { options.leaves = StressOptions::number(value); };
    setters["graph"] = [&](const std::string& value) { options.always_graph = value == "on"; };
    setters["traffic"] = [&](const std::string& name) {
        options.traffic = static_cast<Traffic>(choose(name, kTrafficNames));
    };
    options.stress = StressOptions::parse(argc - num_fixed, argv + num_fixed, setters);
    int code = 0;
    try {
        if (is_shape) {
            code = run_shape(options, TwoHopNumbers::parse(argv + 3));
        } else {
            std::mt19937 random(options.seed);
            for (uint32_t left = StressOptions::number(argv[3]); left != 0 && code == 0; --left) {
                code = run_shape(options, TwoHopNumbers::draw(random));
                ++options.seed;
            }
        }
    } catch (const std::invalid_argument& error) {
        std::fprintf(stderr, "two_hop_stress: %s\n", error.what());
        return 2;
    }
    if (code == 0) std::puts("ok");
    return code;
}
