// Transfers that have started: which writes are posted, which are left, and which have ended. The worker's.
//
// A transfer ends for its user once: when all of it has arrived, with the first thing that went wrong as soon as
// nothing of it is posted any more, or when its time is over. In the last case it stays here, and its memory with it,
// until the provider has given all of its writes back.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fabric/callbacks.hpp"
#include "fabric/domain.hpp"
#include "fabric/peer.hpp"
#include "fabric/transfer.hpp"

namespace tracekern {

class TransferQueue {
public:
    TransferQueue(const FabricLibrary& library,
                  const std::vector<std::unique_ptr<Domain>>& domains,
                  CallbackThread& callbacks,
                  WorkerTrace& trace)
        : library_(library), domains_(domains), callbacks_(callbacks), trace_(trace), under_way_(domains.size(), 0) {}

    // Writes that are waited for: not those of transfers that have ended for their user.
    uint64_t num_under_way() const { return num_under_way_; }

    // It is queued from now on, whether its peer is known or not.
    void admit(Transfer& transfer) {
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
        earliest_ = std::min(earliest_, transfer->until);
        transfer->place = transfers_.size();
        transfers_.push_back(transfer);
        post_one(transfer);  // at once: others may have thousands to go
        if (transfer->has_more()) active_.push_back(transfer);
    }

    bool has_active() const { return !active_.empty(); }
    // Posts what there is room for.
    bool post_more() {
        bool is_busy = false;
        for (size_t turn = active_.size(); turn > 0; --turn) {
            const auto transfer = std::move(active_.front());
            active_.pop_front();
            while (post_one(transfer)) is_busy = true;
            if (transfer->has_more()) active_.push_back(transfer);
        }
        return is_busy;
    }

    // Takes a write that has ended.
    void take(Operation* operation, const std::string& error) {
        Transfer& transfer = *static_cast<Transfer*>(operation->owner);
        Peer& peer = *transfer.targets->peers[operation->target];
        const uint32_t count = operation->num_pieces;
        const uint64_t at = trace_.now();
        for (uint32_t i = 0; i < count; ++i) {
            trace_.end_write(static_cast<uint32_t>(operation->index), operation->writes[i], at);
        }
        if (!transfer.is_reported) leave_window(operation->index);
        give_back(operation);
        --peer.num_under_way;
        transfer.num_ended += count;
        if (error.empty()) {
            peer.is_heard = true;
            // No piece with an immediate is posted before those without have arrived.
            if (transfer.has_imm(transfer.num_arrived)) peer.num_confirmed_imms += count;
            transfer.num_arrived += count;
        } else {
            peer.is_suspect = true;
            fail(transfer, {Outcome::failed, "write to " + peer.name + ": " + error});
        }
        end_if_over(transfer);
    }

    // Posts no more of it, and ends it when what is posted has ended. Returns whether it was here and had more to post.
    bool cancel(uint64_t number) {
        for (const auto& transfer : transfers_) {
            if (transfer->number != number || !transfer->has_more()) continue;
            fail(*transfer, {Outcome::cancelled, "cancelled"});
            end_if_over(*transfer);
            return true;
        }
        return false;
    }

    // Those whose time is over. What they have posted may still arrive, and is still read.
    void end_late(TimePoint now) {
        if (now < earliest_) return;
        earliest_ = TimePoint::max();
        for (const auto& transfer : all_that([&](const Transfer& one) { return !one.is_reported; })) {
            if (now < transfer->until) {
                earliest_ = std::min(earliest_, transfer->until);
            } else {
                give_up(*transfer, name_of(*transfer->targets), "the time limit is over");
            }
        }
    }
    // All to a peer that will not answer any more.
    void give_up_on(const Peer& peer, const std::string& why) {
        for (const auto& transfer : all_that([&](const Transfer& one) { return one.targets->has(peer); })) {
            give_up(*transfer, peer.name, why);
        }
    }
    void give_up_on_all(const std::string& why) {
        for (const auto& transfer : all_that([](const Transfer&) { return true; })) {
            give_up(*transfer, name_of(*transfer->targets), why);
        }
    }
    // Posts no more to memory of a peer.
    void fail_unposted(const Peer& peer, uint64_t region, const std::string& why) {
        fail_those([&](const Transfer& one) { return one.targets->has(peer, region) && one.has_more(); }, why);
    }
    void fail_unposted_to(const Peer& peer, const std::string& why) {
        fail_those([&](const Transfer& one) { return one.targets->has(peer) && one.has_more(); }, why);
    }
    void fail_all_unposted(const std::string& why) {
        fail_those([](const Transfer& one) { return one.has_more(); }, why);
    }

    bool is_writing_to(const Peer& peer, uint64_t region) const {
        return !all_that([&](const Transfer& one) { return one.targets->has(peer, region); }).empty();
    }
    bool is_reading(const MemoryRegion& region) const {
        return !all_that([&](const Transfer& one) { return one.src.get() == &region; }).empty();
    }

    // Ends for its user a transfer that is not here, or not any more.
    void end(Transfer& transfer, const Result& result) {
        const uint64_t at = trace_.now();
        trace_.end(EngineTrack::transfers, transfer.queued, at);  // one that was never posted
        trace_.end(EngineTrack::transfers, transfer.whole, at);
        if (result.outcome != Outcome::done) {
            trace_.mark<TransferEvent::failed>(EngineTrack::transfers, at, transfer.number);
        }
        transfer.is_reported = true;
        transfer.on_done.tell(result, callbacks_);
    }

    // The endpoints are closed: no provider will give anything back, or read anything.
    void forget_all() {
        transfers_.clear();
        active_.clear();
    }

private:
    static constexpr uint32_t kWindow = 256;  // writes under way in a domain
    // Of them to one peer: one that is stopped leaves room for the others.
    static constexpr uint32_t kPeerWindow = kWindow - 64;
    static constexpr uint64_t kTogether = 256 << 10;  // bytes of pieces that are written as one

    // Posts the next write of a transfer; false: no room now, or none is left.
    bool post_one(const std::shared_ptr<Transfer>& transfer) {
        if (!transfer->has_more() || transfer->is_waiting()) return false;
        const TransferPiece& piece = transfer->pieces[transfer->num_posted];
        Peer& peer = *transfer->targets->peers[piece.target];
        if (under_way_[piece.domain] == kWindow || peer.num_under_way >= kPeerWindow * domains_.size()) return false;
        const Write write = next_write(*transfer);
        Operation* operation = take_operation();
        operation->owner = transfer.get();
        operation->index = piece.domain;
        operation->target = piece.target;
        operation->num_pieces = write.num_pieces;
        const uint64_t at = trace_.now();
        const int64_t result = domains_[piece.domain]->post_write(write, operation);
        if (result != 0) {
            give_back(operation);
            if (result == -FI_EAGAIN) {
                peer.is_suspect |= peer.num_under_way == 0;  // a connection is made, to one who may be gone
                return false;
            }
            peer.is_suspect = true;
            fail(*transfer, {Outcome::failed, library_.describe("write to " + peer.name, result)});
            end_if_over(*transfer);
            return false;
        }
        if (trace_.is_on()) record_post(*transfer, *operation, at);
        transfer->num_posted += write.num_pieces;
        ++peer.num_under_way;
        ++under_way_[piece.domain];
        ++num_under_way_;
        return true;
    }

    Write next_write(const Transfer& transfer) const {
        const TransferPiece* pieces = &transfer.pieces[transfer.num_posted];
        const auto& way = transfer.targets->ways[pieces->target * domains_.size() + pieces->domain];
        const MemoryRegion* src = transfer.src.get();
        Write write;  // not zeroed, for the sake of short ones: only num_pieces of each array are read
        write.peer = way.at;
        write.num_pieces = count_together(transfer);
        for (uint32_t i = 0; i < write.num_pieces; ++i) {
            write.src[i] = {src ? src->at + pieces[i].src : nullptr, pieces[i].bytes};
            write.dst[i] = {way.base + pieces[i].dst, pieces[i].bytes, way.key};
        }
        write.local = src ? src->ways[pieces->domain].local : nullptr;
        write.has_imm = transfer.has_imm(transfer.num_posted);
        write.imm = transfer.imm.value_or(0);
        return write;
    }
    // How many of the pieces that come next are written as one: short ones to one peer through one domain, since a
    // confirmation costs more than they do. An immediate alone goes alone.
    uint32_t count_together(const Transfer& transfer) const {
        if (!transfer.src) return 1;
        const auto first = transfer.pieces.begin() + static_cast<ptrdiff_t>(transfer.num_posted);
        const bool is_before_imms = transfer.num_posted < transfer.num_before_imms;
        const size_t end = is_before_imms ? transfer.num_before_imms : transfer.pieces.size();
        const size_t most = std::min<size_t>(domains_[first->domain]->max_pieces(), end - transfer.num_posted);
        uint64_t bytes = first->bytes;
        uint32_t count = 1;
        for (; count < most; ++count) {
            const TransferPiece& next = first[count];
            bytes += next.bytes;
            if (next.target != first->target || next.domain != first->domain || bytes > kTogether) break;
        }
        return count;
    }

    void record_post(Transfer& transfer, Operation& operation, uint64_t at) {
        if (transfer.num_posted == 0) trace_.end(EngineTrack::transfers, transfer.queued, at);
        constexpr uint64_t kMost = ~uint32_t{0};
        const auto domain = static_cast<uint32_t>(operation.index);
        const uint32_t peer = transfer.targets->peers[operation.target]->number;
        for (uint32_t i = 0; i < operation.num_pieces; ++i) {
            const uint64_t bytes = std::min(transfer.pieces[transfer.num_posted + i].bytes, kMost);
            operation.writes[i] =
                transfer.has_imm(transfer.num_posted)
                    ? trace_.begin_write<TransferEvent::write_imm>(domain, at, transfer.number, peer, *transfer.imm)
                    : trace_.begin_write<TransferEvent::write>(domain, at, transfer.number, peer, bytes);
        }
    }

    static std::string name_of(const Targets& targets) {
        const size_t count = targets.peers.size();
        return count == 1 ? targets.peers[0]->name : "a group of " + std::to_string(count) + " peers";
    }
    static void fail(Transfer& transfer, Result result) {
        if (transfer.result.outcome == Outcome::done) transfer.result = std::move(result);
    }
    template <class Which>
    void fail_those(Which which, const std::string& why) {
        for (const auto& transfer : all_that(which)) {
            fail(*transfer, {Outcome::failed, "write to " + name_of(*transfer->targets) + ": " + why});
            end_if_over(*transfer);
        }
    }
    void give_up(Transfer& transfer, const std::string& who, const std::string& why) {
        if (transfer.is_reported) return;
        const bool is_doubtful = transfer.num_ended < transfer.num_posted;
        fail(transfer, {Outcome::failed, ""});  // posts no more
        for (const auto& operation : operations_) {
            if (operation->owner == &transfer) leave_window(operation->index);
        }
        transfer.result = {is_doubtful ? Outcome::stalled : Outcome::failed, "write to " + who + ": " + why};
        report(transfer);
        if (!is_doubtful) forget(transfer);
    }
    void end_if_over(Transfer& transfer) {
        if (!transfer.is_over()) return;
        if (!transfer.is_reported) report(transfer);
        forget(transfer);
    }
    void report(Transfer& transfer) {
        Result result = std::move(transfer.result);
        if (result.outcome != Outcome::done) result.why += ": " + transfer.progress();
        end(transfer, result);
    }
    template <class Which>
    std::vector<std::shared_ptr<Transfer>> all_that(Which which) const {
        std::vector<std::shared_ptr<Transfer>> found;
        for (const auto& transfer : transfers_) {
            if (which(*transfer)) found.push_back(transfer);
        }
        return found;
    }

    void forget(Transfer& transfer) {
        auto& last = transfers_.back();
        last->place = transfer.place;
        transfers_[transfer.place].swap(last);
        transfers_.pop_back();  // may end it
    }
    void leave_window(uint64_t domain) {
        --under_way_[domain];
        --num_under_way_;
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
    std::deque<std::shared_ptr<Transfer>> active_;      // that have writes left to post
    std::vector<std::shared_ptr<Transfer>> transfers_;  // all, each at its place
    TimePoint earliest_ = TimePoint::max();             // no transfer's time is over before
    std::vector<uint32_t> under_way_;                   // writes in each domain, as num_under_way_
    uint64_t num_under_way_ = 0;
    std::vector<std::unique_ptr<Operation>> operations_;
    Operation* free_operations_ = nullptr;
};

}  // namespace tracekern
