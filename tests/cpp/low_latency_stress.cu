// All ranks of the low latency kernels in one process on one GPU, side by side: a communicator and a stream each, their
// calls back to back with no barrier in between, every result checked bit by bit. The twin of low_latency_stress.cpp.
//
//   low_latency_stress RANKS SMS WARPS TOKENS HIDDEN EXPERTS TOPK ITERATIONS SEED [OPTION=VALUE...]
//     SMS                    of a rank; 0: an equal part of the GPU, of which 4 are left free
//     options of low_latency_stress.cpp, and
//     graph=CALLS            captures so many calls in a graph, which an iteration replays with new tokens and choices
//
// By hand: nvcc -arch=sm_90 -std=c++20 -O2 -Icsrc -Xcompiler -ffp-contract=off -DTK_RANDOM_DELAYS
//     -o low_latency_stress tests/cpp/low_latency_stress.cu
// -DTK_PLANTED_FAULTS for plant=. TK_POISON_CONSUMED is for the CPU alone: rows that are never the same twice tell old
// ones apart here.
//
// A kernel waits for none that another rank launches in a later step of a turn. So the host gives a step to all ranks,
// then the next, copies included, and everything else that could hold up a launch (memory, loading) is done before:
// whichever launch the device or the driver holds back, all that it could wait for is on its way.
//
// Exit: 0 right, 1 wrong result, 2 usage or no room, 3 a wait ran out of time, 4 a record where none belongs, 6 an
// error of CUDA.
#include <algorithm>
#include <memory>
#include <optional>

#include "low_latency_stress_calls.hpp"
#include "moe/entry.h"
#include "moe/low_latency/buffer.hpp"
#include "moe/pipeline_cuda.hpp"
#include "stress_cuda.hpp"

// Compiled here and not taken from the family's own kernels.cu: -D changes them.
TK_FAMILY_KERNELS(LowLatency)

namespace tracekern {

#ifdef TK_PLANTED_FAULTS
inline void plant(PlantedFault fault) {
    plant_in_kernels<LowLatency>(fault);
}
#endif

}  // namespace tracekern

using namespace tracekern;

namespace {

constexpr uint32_t kBatch = 4;  // turns, or replays, in a row before the host waits for results
constexpr uint32_t kSpareSms = 4;

struct Options : LowLatencyStress {
    uint32_t graph_calls = 0;
};

// Turns one behind the other: their calls numbered through.
struct Script {
    std::vector<CallPlan> calls;
    std::vector<Step> steps;
    std::vector<bool> is_combined;  // [call]

    void append(const Turn& turn) {
        const auto first = static_cast<uint32_t>(calls.size());
        calls.insert(calls.end(), turn.calls.begin(), turn.calls.end());
        is_combined.resize(calls.size());
        for (const Step& step : turn.steps) {
            steps.push_back({first + step.call, step.stage});
            const bool combines = step.stage == LowLatencyStage::combine || step.stage == LowLatencyStage::combine_recv;
            if (combines) is_combined[first + step.call] = true;
        }
    }

    static Script of_turns(const Options& options, uint32_t first, uint32_t count) {
        Script script;
        for (uint32_t i = 0; i < count; ++i) script.append(Turn::draw(options, first + i));
        return script;
    }
    static Script of_calls(const Options& options, uint32_t num_calls) {
        Script script;
        for (uint32_t i = 0; script.calls.size() < num_calls; ++i) {
            const Turn turn = Turn::draw(options, i);
            if (script.calls.size() + turn.calls.size() <= num_calls) script.append(turn);
        }
        return script;
    }
};

// How much memory a rank needs: sets of calls whose tensors go to the device and back together.
struct BatchSize {
    uint32_t num_sets;
    uint32_t calls_per_set;
    uint32_t num_launches;  // that may record

    static BatchSize of(const Options& options) {
        if (options.graph_calls) return {kBatch, options.graph_calls, 0};
        return {1, kBatch * Turn::kMaxCalls, kBatch * Turn::kMaxSteps};
    }
};

// All steps of a script on one stream, as one launch.
class Graph {
public:
    template <class LaunchAll>
    Graph(const SideStream& stream, LaunchAll launch_all) {
        const auto handle = reinterpret_cast<cudaStream_t>(stream.handle());
        cudaGraph_t graph = nullptr;
        TK_CUDA(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal));
        launch_all();
        TK_CUDA(cudaStreamEndCapture(handle, &graph));
        TK_CUDA(cudaGraphInstantiate(&whole_, graph, 0));
        TK_CUDA(cudaGraphDestroy(graph));
        TK_CUDA(cudaGraphUpload(whole_, handle));
    }
    ~Graph() { cudaGraphExecDestroy(whole_); }
    Graph(const Graph&) = delete;

    void launch(const SideStream& stream) const {
        TK_CUDA(cudaGraphLaunch(whole_, reinterpret_cast<cudaStream_t>(stream.handle())));
    }

private:
    cudaGraphExec_t whole_ = nullptr;
};

// What one rank launches, where, and what comes of it.
class Rank {
public:
    Rank(const Options& options, uint32_t rank, const BatchSize& size)
        : options_(options),
          rank_(rank),
          layout_(options.config.shape),
          set_bytes_(size.calls_per_set * layout_.bytes),
          scale_(expert_scale(options.config.shape)),
          device_scale_(scale_.size() * sizeof(float)),
          comm_(rank,
                options.config.shape.num_ranks,
                LowLatency::heap_bytes(options.config),
                options.stress.timeout_ns,
                /*by_descriptor=*/false),
          device_(set_bytes_),
          host_(size.num_sets * set_bytes_),
          regions_(options.stress, options.config.num_blocks, options.config.warps_per_block, size.num_launches) {
        copy_to_device(device_scale_.as<void>(), scale_.data(), scale_.size() * sizeof(float));
    }

    // The last step before launches: the buffer loads all kernels.
    void connect(const std::vector<std::unique_ptr<Rank>>& ranks) {
        for (const auto& peer : ranks) {
            if (peer->rank_ != rank_) comm_.attach_peer(peer->comm_);
        }
        buffer_.emplace(comm_, options_.config, PipelineBackendCuda(), /*first_stage=*/0);
    }

    // The input of a call, and outputs of which no bit is right.
    void put(uint32_t set, uint32_t call, const CallPlan& plan, const std::vector<Input>& inputs) {
        layout_.put(host(set, call), plan, inputs[rank_]);
    }
    void upload(uint32_t set) const {
        const auto handle = reinterpret_cast<cudaStream_t>(stream_.handle());
        TK_CUDA(cudaMemcpyAsync(device_.as<void>(), host(set, 0), set_bytes_, cudaMemcpyHostToDevice, handle));
    }
    void download(uint32_t set) const { stream_.copy_to_host(host(set, 0), device_.as<void>(), set_bytes_); }

    void launch(const Script& script, size_t step) {
        const auto [call, stage] = script.steps[step];
        const CallPlan& plan = script.calls[call];
        const uint32_t num_tokens = Input::draw_num_tokens(options_, plan, rank_);
        char* memory = device_.as<char>() + call * layout_.bytes;
        const uint32_t topk = options_.config.shape.topk;
        const LowLatencyCall args = layout_.call(memory, plan, num_tokens, topk, device_scale_.as<float>());
        const TraceChoice trace = options_.graph_calls ? TraceChoice{} : regions_[step].begin_launch();
        buffer_->run({stage}, args, plan.use_fp8, {trace}, stream_.handle());
    }
    void capture(const Script& script) {
        graph_.emplace(stream_, [&] {
            for (size_t step = 0; step < script.steps.size(); ++step) launch(script, step);
        });
    }
    void replay() const { graph_->launch(stream_); }
    void synchronize() const { stream_.synchronize(); }

    bool failed() const { return comm_.failed(); }
    int report() const { return report_fault(comm_.fault(), kLowLatencyStageNames[comm_.fault().stage]); }

    bool is_right(
        uint32_t set, uint32_t call, const CallPlan& plan, bool is_combined, const std::vector<Input>& inputs) const {
        const CallCheck check(options_, layout_, host(set, call), rank_, plan, inputs);
        return check.received() && (!is_combined || check.combined(scale_));
    }
    bool records_are_whole(size_t num_launches) {
        for (size_t launch = 0; launch < num_launches; ++launch) {
            if (!regions_[launch].is_whole()) return false;
        }
        return true;
    }

private:
    char* host(uint32_t set, uint32_t call) const { return host_.as<char>() + set * set_bytes_ + call * layout_.bytes; }

    const Options& options_;
    const uint32_t rank_;
    const CallLayout layout_;
    const uint64_t set_bytes_;
    const std::vector<float> scale_;
    const DeviceMemory device_scale_;
    const SideStream stream_;
    CudaCommunicator comm_;
    const DeviceMemory device_;
    const MappedMemory host_;  // laid out like the device's, once for each set
    BatchRegions regions_;
    std::optional<LowLatencyBuffer<PipelineBackendCuda>> buffer_;
    std::optional<Graph> graph_;
};

class Ranks {
public:
    explicit Ranks(const Options& options) : options_(options), random_(options.seed) {
        const uint32_t num_ranks = options.config.shape.num_ranks;
        for (uint32_t rank = 0; rank < num_ranks; ++rank) {
            ranks_.push_back(std::make_unique<Rank>(options, rank, BatchSize::of(options)));
        }
        for (auto& rank : ranks_) rank->connect(ranks_);
        for (uint32_t rank = 0; rank < num_ranks; ++rank) {
            if (rank != options.stress.absent) order_.push_back(rank);
        }
        synchronize_device();  // from here on only streams are waited for
    }

    int run_turns() {
        for (uint32_t first = 0; first < options_.iterations; first += kBatch) {
            const auto script = Script::of_turns(options_, first, std::min(kBatch, options_.iterations - first));
            put(0, script.calls);
            for_all([](Rank& rank) { rank.upload(0); });
            for (size_t step = 0; step < script.steps.size(); ++step) {
                for_all([&](Rank& rank) { rank.launch(script, step); });
            }
            for_all([](Rank& rank) { rank.download(0); });
            for_all([](Rank& rank) { rank.synchronize(); });
            if (const int code = check_faults()) return code;
            if (const int code = check(0, script)) return code;
            for (uint32_t rank : order_) {
                if (!ranks_[rank]->records_are_whole(script.steps.size())) return 4;
            }
        }
        return 0;
    }

    // Tokens and choices are new in each replay: what it copies to the device and back stands before and behind it in
    // the rank's own stream.
    int run_replays() {
        Script script = Script::of_calls(options_, options_.graph_calls);
        for_all([&](Rank& rank) { rank.capture(script); });
        for_all([](Rank& rank) { rank.synchronize(); });
        for (uint32_t first = 0; first < options_.iterations; first += kBatch) {
            const uint32_t num_sets = std::min(kBatch, options_.iterations - first);
            for (uint32_t set = 0; set < num_sets; ++set) put(set, of_replay(script, first + set).calls);
            for (uint32_t set = 0; set < num_sets; ++set) {
                for_all([&](Rank& rank) { rank.upload(set); });
                for_all([](Rank& rank) { rank.replay(); });
                for_all([&](Rank& rank) { rank.download(set); });
            }
            for_all([](Rank& rank) { rank.synchronize(); });
            if (const int code = check_faults()) return code;
            for (uint32_t set = 0; set < num_sets; ++set) {
                if (const int code = check(set, of_replay(script, first + set))) return code;
            }
        }
        return 0;
    }

private:
    static Script of_replay(Script script, uint32_t replay) {
        for (CallPlan& plan : script.calls) plan.content += (replay + 1) * 100'003;
        return script;
    }

    // In another order each time: who comes first, and who last, is not to be the same rank always.
    template <class Visit>
    void for_all(Visit visit) {
        std::shuffle(order_.begin(), order_.end(), random_);
        for (uint32_t rank : order_) visit(*ranks_[rank]);
    }

    void put(uint32_t set, const std::vector<CallPlan>& calls) {
        inputs_.resize(set);  // of the sets before
        auto& of_set = inputs_.emplace_back();
        for (uint32_t call = 0; call < calls.size(); ++call) {
            const auto& inputs = of_set.emplace_back(draw_inputs(options_, calls[call]));
            for (auto& rank : ranks_) rank->put(set, call, calls[call], inputs);
        }
    }

    // After a fault what came out of the calls of this batch means nothing.
    int check_faults() const {
        int code = 0;
        for (uint32_t rank : order_) {
            if (ranks_[rank]->failed()) code = ranks_[rank]->report();
        }
        return code;
    }
    int check(uint32_t set, const Script& script) const {
        for (uint32_t call = 0; call < script.calls.size(); ++call) {
            for (uint32_t rank : order_) {
                const auto& inputs = inputs_[set][call];
                if (!ranks_[rank]->is_right(set, call, script.calls[call], script.is_combined[call], inputs)) return 1;
            }
        }
        return 0;
    }

    const Options& options_;
    std::mt19937 random_;
    std::vector<std::unique_ptr<Rank>> ranks_;
    std::vector<uint32_t> order_;                          // of launches
    std::vector<std::vector<std::vector<Input>>> inputs_;  // [set][call][rank]
};

Options parse(std::vector<char*> arguments) {
    Options options{};
    OptionSetters setters;
    setters["graph"] = [&](const std::string& value) { options.graph_calls = StressOptions::number(value); };
    std::string share;
    if (arguments.size() > 1 && std::string(arguments[1]) == "0") {
        share = std::to_string((num_multiprocessors() - kSpareSms) / StressOptions::number(arguments[0]));
        arguments[1] = share.data();
    }
    static_cast<LowLatencyStress&>(options) = LowLatencyStress::parse(arguments, setters);
    const bool is_drawn = !options.pattern && !options.stress.trace;
    if (options.graph_calls && !is_drawn) throw std::invalid_argument("graph: takes neither a pattern nor a trace");
    return options;
}

}  // namespace

int main(int argc, char** argv) {
    // A queue of the device for each stream, unless the caller wants fewer: what shares one may wait for one another.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
    try {
        const Options options = parse({argv + 1, argv + argc});
        Ranks ranks(options);
        const int code = options.graph_calls ? ranks.run_replays() : ranks.run_turns();
        if (code == 0) std::puts("ok");
        return code;
    } catch (const std::invalid_argument& error) {
        std::fprintf(stderr, "low_latency_stress: %s\n", error.what());
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "low_latency_stress: %s\n", error.what());
        return 6;
    }
}
