// One rank's end of two-hop dispatch and combine: state, epochs, each kernel as a launch, and what notify tells the
// host.
#pragma once

#include <chrono>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "moe/pipeline.hpp"
#include "moe/two_hop/family.h"

namespace tracekern {

struct RecvCounts {
    uint32_t num_recv_tokens;
    uint32_t num_rdma_recv_tokens;
    std::vector<uint32_t> num_recv_tokens_per_expert;
};

// Family: TwoHop, or TwoHopOn<FarArgs>.
template <class OwnBackend, class Family = TwoHop>
class TwoHopBuffer : public RankKernels<Family, OwnBackend> {
    using Base = RankKernels<Family, OwnBackend>;
    using Base::args_, Base::config_;

public:
    // config: with set_grid().
    TwoHopBuffer(typename OwnBackend::Communicator& comm,
                 const TwoHopConfig& config,
                 OwnBackend backend,
                 uint32_t first_stage)
        : Base(comm, config, std::move(backend), first_stage) {
        args_.host_counts = static_cast<HostCounts*>(this->backend_.allocate_for_host(count_bytes()));
        this->prepare();
        reset();
    }

    void reset() {
        epoch_ = kFirstEpoch;
        this->reset_state();
        memset(args_.host_counts, 0, count_bytes());
    }

    // Launches notify_dispatch. Returns the ticket for find_counts().
    uint64_t notify(const TwoHopCall& call, TraceChoice trace, uint64_t stream) {
        call_ = call;
        call_.ticket = ++ticket_ & kEpochMask;
        launch_with(config_.row(), TwoHopStage::notify_dispatch, trace, stream);
        return call_.ticket;
    }

    // Launches dispatch of the call, with what depends on its counts.
    void dispatch(const TwoHopCall& call, TraceChoice trace, uint64_t stream) {
        call_ = call;
        launch_with(config_.row(), TwoHopStage::dispatch, trace, stream);
        epoch_ = next_epoch(epoch_);
    }

    // Launches dispatch with what an earlier one and its notify wrote: no experts, no weights.
    void cached_dispatch(const TwoHopCall& call, TraceChoice trace, uint64_t stream) {
        use_handle(call, HandleUse::dispatch);
        launch_with(config_.cached_row(), TwoHopStage::dispatch, trace, stream);
        epoch_ = next_epoch(epoch_);
    }

    // Launches combine, with what a dispatch wrote.
    void combine(const TwoHopCall& call, TraceChoice trace, uint64_t stream) {
        use_handle(call, call.has_weights ? HandleUse::weighted_combine : HandleUse::combine);
        launch_with(config_.combine_row(), TwoHopStage::combine, trace, stream);
        epoch_ = next_epoch(epoch_);
    }

    // What notify_dispatch told of that call, as soon as it has; none within the limit. Called from any thread.
    std::optional<RecvCounts> wait_counts(uint64_t ticket, uint32_t limit_us) const {
        const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(limit_us);
        while (true) {
            if (auto counts = find_counts(ticket)) return counts;
            if (std::chrono::steady_clock::now() >= until) return std::nullopt;
            std::this_thread::sleep_for(std::chrono::microseconds(5));
        }
    }

    // The same, now.
    std::optional<RecvCounts> find_counts(uint64_t ticket) const {
        HostCounts& told = *args_.host_counts;
        bool is_whole = true;
        const auto take = [&](const uint64_t& word) {
            // Relaxed would do, since each word is its own payload.
            const uint64_t seen = __atomic_load_n(&word, __ATOMIC_ACQUIRE);
            is_whole = is_whole && was_told<TwoHopChannel::host_counts>(seen, ticket);
            return flag_value(seen);
        };
        RecvCounts counts{take(told.moe_recv_counter), take(told.moe_recv_rdma_counter), {}};
        for (uint32_t expert = 0; expert < args_.shape.num_local_experts(); ++expert) {
            counts.num_recv_tokens_per_expert.push_back(take(told.moe_recv_expert_counter[expert]));
        }
        if (!is_whole) return std::nullopt;
        return counts;
    }

    // Rows of the last call since it was asked before that had memory for fewer; 0: none.
    uint32_t take_overflow() {
        return flag_value(__atomic_exchange_n(&args_.host_counts->overflow, 0, __ATOMIC_RELAXED));
    }

    // Of the next call, as records keep it.
    uint32_t epoch() const { return epoch_on_record(epoch_); }

private:
    // call.told: the number of the handle's dispatch.
    void use_handle(const TwoHopCall& call, HandleUse use) {
        call_ = call;
        call_.told |= static_cast<uint32_t>(use) << kHandleNumberBits;
    }
    void launch_with(const RowLayout& row, TwoHopStage stage, TraceChoice trace, uint64_t stream) {
        this->begin_launches(stream);
        args_.call = call_;
        args_.row = row;
        this->launch(stage, trace);
    }
    uint64_t count_bytes() const { return HostCounts::bytes(args_.shape.num_local_experts()); }

    TwoHopCall call_{};
    uint64_t ticket_ = 0;
    uint64_t epoch_ = kFirstEpoch;
};

}  // namespace tracekern
