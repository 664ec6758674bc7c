// What immediates of ranks of other hosts mean to low latency: which flag of this rank each raises. For the proxy's
// thread.
#pragma once

#include <vector>

#include "comm/proxy_side.hpp"
#include "moe/low_latency/layout.h"

namespace tracekern {

// An epoch says of which slot an immediate is. It is that of the slot's latest call from the same rank, or of the call
// before or behind it: see put.h.
class LowLatencyInbox {
public:
    explicit LowLatencyInbox(const LowLatencyArgsOn<FarArgs>& args)
        : args_(args),
          latest_(size_t{kNumSlots} * args.shape.num_ranks, kNeverEpoch),
          results_(size_t{kNumSlots} * args.shape.num_experts) {}

    // False: no rank that keeps to the protocol sends this.
    bool operator()(uint32_t source, const Immediate& imm) {
        args_.call.slot = imm.epoch % kNumSlots;
        uint64_t& latest = latest_[args_.call.slot * args_.shape.num_ranks + source];
        const uint64_t epoch = take_epoch(latest, imm);
        if (epoch == kNeverEpoch) return false;
        if (imm.kind == PutKind::word) return imm.which == kAckWord && take_ack(source, epoch, imm.n);
        if (imm.which >= args_.shape.num_local_experts() || imm.n > args_.shape.max_tokens) return false;
        switch (imm.kind) {
            case PutKind::message:
                return imm.n < args_.shape.max_tokens && take_message(source, epoch, imm);
            case PutKind::count:
                return take_count(source, epoch, imm);
            case PutKind::row:
            case PutKind::results:
                return take_result(source, epoch, imm);
            default:
                return false;
        }
    }

private:
    // Of the results of one expert of another rank.
    struct Results {
        uint64_t epoch = kNeverEpoch;
        uint32_t num_combines = 0;  // whose results are all here
        uint32_t num_rows = 0;      // of the next one
        uint32_t num_due = 0;
        bool is_told = false;  // num_due
    };

    uint32_t rank() const { return args_.comm.rank; }

    bool take_message(uint32_t source, uint64_t epoch, const Immediate& imm) {
        uint64_t* flag = args_.message_flag(rank(), imm.which, source, imm.n);
        raise_flag<LowLatencyChannel::message>(flag, make_flag(epoch, 0));
        return true;
    }
    // As dispatch.h has it: -n - 1.
    bool take_count(uint32_t source, uint64_t epoch, const Immediate& imm) {
        raise_flag<LowLatencyChannel::count>(args_.count_flag(rank(), imm.which, source), make_flag(epoch, ~imm.n));
        return true;
    }
    bool take_ack(uint32_t source, uint64_t epoch, uint32_t number) {
        raise_flag<LowLatencyChannel::ack>(args_.ack(rank(), source), make_flag(epoch, number));
        return true;
    }
    // Rows come in any order, and before or behind their number.
    bool take_result(uint32_t source, uint64_t epoch, const Immediate& imm) {
        const uint32_t expert = source * args_.shape.num_local_experts() + imm.which;
        Results& results = results_[args_.call.slot * args_.shape.num_experts + expert];
        if (is_ahead(make_flag(results.epoch, 0), make_flag(epoch, 0))) return true;  // nobody waits for it any more
        if (results.epoch != epoch) results = {.epoch = epoch};
        if (imm.kind == PutKind::row) {
            ++results.num_rows;
        } else {
            results.num_due = imm.n;
            results.is_told = true;
        }
        if (!results.is_told || !have_come<LowLatencyChannel::results>(results.num_rows, results.num_due)) return true;
        results = {.epoch = epoch, .num_combines = results.num_combines + 1};
        uint64_t* flag = args_.result_flag(rank(), expert);
        raise_flag<LowLatencyChannel::results>(flag, make_flag(epoch, results.num_combines));
        return true;
    }

    LowLatencyArgsOn<FarArgs> args_;  // `call` but for its slot is nobody's
    std::vector<uint64_t> latest_;    // [slot][rank] epoch
    std::vector<Results> results_;    // [slot][expert]
};

}  // namespace tracekern
