// All ranks of the P2P pipeline in one process on one GPU, side by side: a communicator and a stream each, their calls
// back to back with no barrier in between, every result checked bit by bit. The twin of p2p_stress.cpp.
//
//   p2p_stress VARIANT NUMBER RANKS BLOCKS WARPS TOKENS HIDDEN EXPERTS TOPK ITERATIONS SEED [OPTION=VALUE...]
//     options of p2p_stress.cpp, and
//     rival=BLOCKS           beside each rank a kernel of another library, see rival_collective.cuh
//     rival_ms=N             how long that waits; default 5000
//
// By hand: nvcc -arch=sm_90 -std=c++20 -O2 -Icsrc -DTK_RANDOM_DELAYS -o p2p_stress tests/cpp/p2p_stress.cu
// -DTK_PLANTED_FAULTS for plant=; -DTK_ALL_NUMBERS for fp32 and fp16, which take the compiler three times as long.
// TK_POISON_CONSUMED is for the CPU alone: rows that are never the same twice tell old ones apart here.
//
// Kernels of a rank wait for those that the other ranks have launched before or launch next, in the same stage of the
// same call or an earlier one. So the host launches one stage of all ranks, then the next, and everything that could
// hold up a launch (memory, loading, a copy that waits) is done before or stands in the rank's own stream: whichever
// launch the device or the driver holds back, all that it could wait for is on its way.
//
// Exit: 0 right, 1 wrong result, 2 usage or no room, 3 a wait ran out of time, 4 a record where none belongs, 5 a rival
// ran out of time, 6 an error of CUDA.
#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>

#include "moe/entry.h"
#include "moe/pipeline_cuda.hpp"
#include "p2p_stress_common.hpp"
#include "rival_collective.cuh"
#include "stress_cuda.hpp"

namespace tracekern {

// The kernels are compiled here and not taken from the family's own kernels.cu: -D changes them.
#ifdef TK_ALL_NUMBERS
using StressFamily = P2P;
#else
struct StressFamily : P2P {
    template <class F>
    static void with_kernels(const P2PConfig& config, F f) {
        if (config.number != NumberType::bf16) throw std::invalid_argument("built for bf16 alone");
        with_p2p_variant(config.variant, [&]<P2PVariant kVariant>() { f(p2p_kernels_of_call<kVariant, BFloat16>()); });
    }
};
#endif

}  // namespace tracekern

TK_FAMILY_KERNELS(StressFamily)

namespace tracekern {

#ifdef TK_PLANTED_FAULTS
inline void plant(PlantedFault fault) {
    plant_in_kernels<StressFamily>(fault);
}
#endif

}  // namespace tracekern

using namespace tracekern;

namespace {

constexpr uint32_t kBatch = 8;  // calls in a row before the host waits for results

struct Options : P2PStress {
    RivalOptions rival;
};

// Blocks that the GPU holds at once of any kernel of a call.
uint32_t room_for_blocks(const Options& options) {
    const P2PConfig& config = options.config;
    P2PArgs args{};
    args.shape = config.shape;
    args.layout = P2PLayout::make(config.shape, config.variant, config.partitions);
    uint32_t room = ~0u;
    for_each_room<StressFamily>(config, args, [&](P2PStage, uint32_t of_body) { room = std::min(room, of_body); });
    return room;
}

// Inputs and outputs of the calls of a batch, on the device and, laid out alike, in host memory that copies go from and
// to without waiting. A line more than it takes: without a token there would be nothing to allocate.
class BatchMemory {
public:
    explicit BatchMemory(const MoeShape& shape)
        : rows_bytes_(whole_lines(uint64_t{shape.max_tokens} * shape.row_bytes())),
          choices_bytes_(whole_lines(uint64_t{shape.max_flat()} * sizeof(int32_t))),
          input_bytes_(rows_bytes_ + 2 * choices_bytes_),
          total_bytes_(kBatch * (input_bytes_ + rows_bytes_) + 128),
          device_(total_bytes_),
          host_(total_bytes_) {}

    // Lays the input of a call ready, and an output of which no bit is right.
    template <class T>
    void put(uint32_t slot, const Input<T>& input) {
        char* const at = host_.as<char>() + slot * input_bytes_;
        std::copy(input.x.begin(), input.x.end(), reinterpret_cast<T*>(at));
        std::copy(input.topk_idx.begin(), input.topk_idx.end(), reinterpret_cast<int32_t*>(at + rows_bytes_));
        std::copy(input.topk_weights.begin(),
                  input.topk_weights.end(),
                  reinterpret_cast<float*>(at + rows_bytes_ + choices_bytes_));
        memset(host_.as<char>() + out_offset(slot), 0xff, rows_bytes_);
    }
    void upload(const SideStream& stream) const {
        const auto handle = reinterpret_cast<cudaStream_t>(stream.handle());
        TK_CUDA(cudaMemcpyAsync(device_.as<void>(), host_.as<void>(), total_bytes_, cudaMemcpyHostToDevice, handle));
    }
    void download(const SideStream& stream) const {
        const uint64_t first = out_offset(0);
        stream.copy_to_host(host_.as<char>() + first, device_.as<char>() + first, total_bytes_ - first);
    }

    MoeCall call(uint32_t slot, uint32_t num_tokens, const float* scale) const {
        char* const at = device_.as<char>() + slot * input_bytes_;
        return {at,
                reinterpret_cast<const int32_t*>(at + rows_bytes_),
                reinterpret_cast<const float*>(at + rows_bytes_ + choices_bytes_),
                Experts{scale},
                device_.as<char>() + out_offset(slot),
                num_tokens};
    }
    template <class T>
    const T* out(uint32_t slot) const {
        return reinterpret_cast<const T*>(host_.as<char>() + out_offset(slot));
    }

private:
    uint64_t out_offset(uint32_t slot) const { return kBatch * input_bytes_ + slot * rows_bytes_; }

    const uint64_t rows_bytes_, choices_bytes_, input_bytes_, total_bytes_;
    const DeviceMemory device_;
    const MappedMemory host_;
};

// What one rank launches, where, and what comes of it.
template <class T>
class Rank {
public:
    Rank(const Options& options, uint32_t rank)
        : options_(options),
          rank_(rank),
          launches_(launches_of_call<StressFamily>(options.config)),
          scale_(options.expert_scale()),
          device_scale_(scale_.size() * sizeof(float)),
          comm_(rank,
                options.config.shape.num_ranks,
                StressFamily::heap_bytes(options.config),
                options.stress.timeout_ns,
                /*by_descriptor=*/false),
          memory_(options.config.shape),
          regions_(
              options.stress, options.config.num_blocks, options.config.warps_per_block, kBatch * launches_.size()) {
        copy_to_device(device_scale_.as<void>(), scale_.data(), scale_.size() * sizeof(float));
    }

    // The last step before launches: the pipeline loads all kernels.
    void connect(const std::vector<std::unique_ptr<Rank>>& ranks) {
        for (const auto& peer : ranks) {
            if (peer->rank_ != rank_) comm_.attach_peer(peer->comm_);
        }
        pipeline_.emplace(comm_, options_.config, PipelineBackendCuda());
    }

    const std::vector<LaunchOfCall>& launches() const { return launches_; }

    // For the calls from `first` on.
    void upload(uint32_t first, uint32_t count) {
        inputs_.clear();
        for (uint32_t slot = 0; slot < count; ++slot) {
            memory_.put(slot, inputs_.emplace_back(options_, rank_, first + slot));
        }
        memory_.upload(stream_);
    }
    void launch(uint32_t slot, size_t stage) {
        if (stage == 0) {
            static_cast<MoeCall&>(pipeline_->args()) =
                memory_.call(slot, inputs_[slot].num_tokens, device_scale_.as<float>());
        }
        pipeline_->args().partition = launches_[stage].partition;
        pipeline_->run(
            launches_[stage].stage, regions_[slot * launches_.size() + stage].begin_launch(), stream_.handle());
    }
    // Behind the whole batch: between two calls it would keep them apart.
    void download() const { memory_.download(stream_); }
    void synchronize() const { stream_.synchronize(); }

    bool failed() const { return comm_.failed(); }
    int report() const { return report_fault(comm_.fault(), kP2PStageNames[comm_.fault().stage]); }

    // The exit code for the batch, which nobody gave up on.
    int check(uint32_t first) {
        for (uint32_t slot = 0; slot < inputs_.size(); ++slot) {
            for (size_t stage = 0; stage < launches_.size(); ++stage) {
                if (!regions_[slot * launches_.size() + stage].is_whole()) return 4;
            }
            const int code =
                check_result(options_, rank_, first + slot, inputs_[slot], scale_, memory_.template out<T>(slot));
            if (code) return code;
        }
        return 0;
    }

private:
    const Options& options_;
    const uint32_t rank_;
    const std::vector<LaunchOfCall> launches_;
    const std::vector<float> scale_;
    const DeviceMemory device_scale_;
    const SideStream stream_;
    CudaCommunicator comm_;
    BatchMemory memory_;
    BatchRegions regions_;
    std::vector<Input<T>> inputs_;  // [slot]
    std::optional<PipelineCuda<StressFamily>> pipeline_;
};

template <class T>
class Ranks {
public:
    explicit Ranks(const Options& options) : options_(options), random_(options.seed) {
        const uint32_t num_ranks = options.config.shape.num_ranks;
        for (uint32_t rank = 0; rank < num_ranks; ++rank) ranks_.push_back(std::make_unique<Rank<T>>(options, rank));
        for (auto& rank : ranks_) rank->connect(ranks_);
        if (options.rival.num_blocks) rivals_.emplace(options.rival, num_ranks);
        for (uint32_t rank = 0; rank < num_ranks; ++rank) {
            if (rank != options.stress.absent) order_.push_back(rank);
        }
        synchronize_device();  // from here on only streams are waited for
    }

    int run() {
        for (uint32_t first = 0; first < options_.iterations; first += kBatch) {
            run_batch(first, std::min(kBatch, options_.iterations - first));
            if (const int code = check(first)) return code;
        }
        return 0;
    }

private:
    void run_batch(uint32_t first, uint32_t count) {
        for (uint32_t rank : order_) ranks_[rank]->upload(first, count);
        if (rivals_) synchronize();  // else rivals, which upload nothing, would all come first
        for (uint32_t slot = 0; slot < count; ++slot) {
            // Another one each time: who comes first, and who last, is not to be the same rank always.
            std::shuffle(order_.begin(), order_.end(), random_);
            if (rivals_) launch_rivals(0);
            for (size_t stage = 0; stage < ranks_[0]->launches().size(); ++stage) {
                for (uint32_t rank : order_) ranks_[rank]->launch(slot, stage);
            }
            if (rivals_) launch_rivals(1);
        }
        for (uint32_t rank : order_) ranks_[rank]->download();
        synchronize();
    }

    void synchronize() const {
        for (uint32_t rank : order_) ranks_[rank]->synchronize();
    }

    // Of every second rank. Launches on streams that have nothing to do with each other come to the device in their
    // order if there is time in between.
    void launch_rivals(uint32_t parity) {
        constexpr auto kInBetween = std::chrono::milliseconds(1);
        if (parity == 1) std::this_thread::sleep_for(kInBetween);
        for (uint32_t rank = parity; rank < rivals_->num_ranks(); rank += 2) rivals_->launch(rank);
        if (parity == 0) std::this_thread::sleep_for(kInBetween);
    }

    int check(uint32_t first) {
        const bool rival_gave_up = rivals_ && rivals_->gave_up();
        int worst = 0;
        for (uint32_t rank : order_) {
            if (ranks_[rank]->failed()) worst = ranks_[rank]->report();
        }
        if (worst) return worst;  // what came out of the calls of this batch means nothing
        for (uint32_t rank : order_) {
            const int code = ranks_[rank]->check(first);
            worst = code == 1 || worst == 1 ? 1 : std::max(worst, code);
        }
        if (worst || !rival_gave_up) return worst;
        std::fprintf(stderr, "a rival gave up in iterations %u to %u\n", first, first + kBatch - 1);
        return 5;
    }

    const Options& options_;
    std::mt19937 random_;
    std::vector<std::unique_ptr<Rank<T>>> ranks_;
    std::optional<Rivals> rivals_;
    std::vector<uint32_t> order_;  // of launches
};

int run(const Options& options) {
    const uint32_t num_ranks = options.config.shape.num_ranks;
    const uint32_t room = room_for_blocks(options);
    const uint32_t num_blocks = options.config.num_blocks;
    if (uint64_t{num_blocks} * num_ranks > room) {
        std::fprintf(stderr,
                     "%u ranks of %u blocks of %u warps: this GPU holds %u blocks at once\n",
                     num_ranks,
                     num_blocks,
                     options.config.warps_per_block,
                     room);
        return 2;
    }
    int code = 2;
    with_number_type(options.config.number, [&]<class T>() { code = Ranks<T>(options).run(); });
    return code;
}

}  // namespace

int main(int argc, char** argv) {
    // A queue of the device for each stream, unless the caller wants fewer: what shares one may wait for one another.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
    try {
        Options options{};
        OptionSetters setters;
        setters["rival"] = [&](const std::string& value) { options.rival.num_blocks = StressOptions::number(value); };
        setters["rival_ms"] = [&](const std::string& value) {
            options.rival.timeout_ns = std::stoull(value) * 1'000'000;
        };
        static_cast<P2PStress&>(options) = P2PStress::parse({argv + 1, argv + argc}, setters);
        const int code = run(options);
        if (code == 0) std::puts("ok");
        return code;
    } catch (const std::invalid_argument& error) {
        std::fprintf(stderr, "p2p_stress: %s\n", error.what());
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "p2p_stress: %s\n", error.what());
        return 6;
    }
}
