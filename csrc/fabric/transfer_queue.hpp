// Transfers that have started: which writes are posted, which are left, and which have ended. The worker's.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fabric/callbacks.hpp"
#include "fabric/domain.hpp"
#include "fabric/transfer.hpp"

namespace tracekern {

class TransferQueue {
public:
    TransferQueue(const FabricLibrary& library,
                  const std::vector<std::unique_ptr<Domain>>& domains,
                  CallbackThread& callbacks,
                  WorkerTrace& trace)
        : library_(library), domains_(domains), callbacks_(callbacks), trace_(trace), under_way_(domains.size(), 0) {}

    uint64_t num_under_way() const { return num_under_way_; }

    // It is queued from now on, whether its peer is known or not.
    void admit(Transfer& transfer) {
        transfer.number = ++num_admitted_;
        if (!trace_.is_on()) return;
        const uint64_t at = transfer.submitted ? transfer.submitted : trace_.now();
        constexpr EngineTrack kTrack = EngineTrack::transfers;
        uint64_t bytes = 0;
        for (const TransferPiece& piece : transfer.pieces) bytes += piece.bytes;
        transfer.whole = trace_.begin<TransferEvent::transfer>(kTrack, at, transfer.number, bytes);
        transfer.queued =
            trace_.begin<TransferEvent::queued>(kTrack, at, transfer.number, transfer.pieces.size(), active_.size());
    }
    void start(const std::shared_ptr<Transfer>& transfer) {
        active_.push_back(transfer);
        post_one(transfer);  // at once: others may have thousands to go
    }

    // Posts what there is room for.
    bool post_more() {
        bool is_busy = false;
        for (size_t turn = active_.size(); turn > 0; --turn) {
            const auto transfer = std::move(active_.front());
            active_.pop_front();
            while (post_one(transfer)) is_busy = true;
            if (transfer->num_posted < transfer->pieces.size() && transfer->error.empty()) active_.push_back(transfer);
        }
        return is_busy;
    }

    // Takes a write that has ended.
    void take(Operation* operation, const std::string& error) {
        const auto transfer = transfers_.at(static_cast<Transfer*>(operation->owner));
        --under_way_[operation->index];
        --num_under_way_;
        trace_.end_write(static_cast<uint32_t>(operation->index), operation->write, trace_.now());
        give_back(operation);
        ++transfer->num_ended;
        if (!error.empty() && transfer->error.empty()) transfer->error = "write: " + error;
        end_if_over(transfer);
    }

    void end(const std::shared_ptr<Transfer>& transfer, const std::string& error) {
        const uint64_t at = trace_.now();
        trace_.end(EngineTrack::transfers, transfer->queued, at);  // one that was never posted
        trace_.end(EngineTrack::transfers, transfer->whole, at);
        if (!error.empty()) trace_.mark<TransferEvent::failed>(EngineTrack::transfers, at, transfer->number);
        transfer->on_done.tell(error, callbacks_);
    }
    // Those that have writes left to post.
    void fail_active(const std::string& why) {
        for (const auto& transfer : std::exchange(active_, {})) {
            if (transfer->error.empty()) transfer->error = why;
            end_if_over(transfer);
        }
    }

private:
    static constexpr uint32_t kWindow = 256;  // writes under way in a domain

    // Posts the next write of a transfer; false: no room now, or none is left.
    bool post_one(const std::shared_ptr<Transfer>& transfer) {
        if (transfer->num_posted == transfer->pieces.size() || !transfer->error.empty()) return false;
        const TransferPiece& piece = transfer->pieces[transfer->num_posted];
        if (under_way_[piece.domain] == kWindow) return false;
        const auto& way = transfer->targets->ways[piece.target * domains_.size() + piece.domain];
        const MemoryRegion* src = transfer->src.get();
        Operation* operation = take_operation();
        operation->owner = transfer.get();
        operation->index = piece.domain;
        const WritePiece write{src ? src->at + piece.src : nullptr,
                               piece.bytes,
                               src ? src->ways[piece.domain].local : nullptr,
                               way.peer,
                               way.base + piece.dst,
                               way.key,
                               transfer->imm.has_value(),
                               transfer->imm.value_or(0)};
        const uint64_t at = trace_.now();
        const int64_t result = domains_[piece.domain]->post_write(write, operation);
        if (result != 0) {
            give_back(operation);
            if (result == -FI_EAGAIN) return false;
            transfer->error = library_.describe("write", result);
            end_if_over(transfer);
            return false;
        }
        if (trace_.is_on()) record_post(*transfer, piece, way.number, *operation, at);
        if (transfer->num_posted++ == 0) transfers_[transfer.get()] = transfer;
        ++under_way_[piece.domain];
        ++num_under_way_;
        return true;
    }

    void record_post(Transfer& transfer, const TransferPiece& piece, uint32_t peer, Operation& operation, uint64_t at) {
        if (transfer.num_posted == 0) trace_.end(EngineTrack::transfers, transfer.queued, at);
        constexpr uint64_t kMost = ~uint32_t{0};
        operation.write = transfer.imm ? trace_.begin_write<TransferEvent::write_imm>(
                                             piece.domain, at, transfer.number, peer, *transfer.imm)
                                       : trace_.begin_write<TransferEvent::write>(
                                             piece.domain, at, transfer.number, peer, std::min(piece.bytes, kMost));
    }

    void end_if_over(const std::shared_ptr<Transfer>& transfer) {
        if (!transfer->is_over()) return;
        end(transfer, transfer->error);
        transfers_.erase(transfer.get());
    }

    Operation* take_operation() {
        if (!free_operations_) {
            operations_.push_back(std::make_unique<Operation>());
            return operations_.back().get();
        }
        return std::exchange(free_operations_, free_operations_->next);
    }
    void give_back(Operation* operation) {
        operation->owner = nullptr;
        operation->next = std::exchange(free_operations_, operation);
    }

    const FabricLibrary& library_;
    const std::vector<std::unique_ptr<Domain>>& domains_;
    CallbackThread& callbacks_;
    WorkerTrace& trace_;
    uint64_t num_admitted_ = 0;
    std::deque<std::shared_ptr<Transfer>> active_;  // that have writes left to post
    std::unordered_map<Transfer*, std::shared_ptr<Transfer>> transfers_;
    std::vector<uint32_t> under_way_;  // writes in each domain
    uint64_t num_under_way_ = 0;
    std::vector<std::unique_ptr<Operation>> operations_;
    Operation* free_operations_ = nullptr;
};

}  // namespace tracekern
