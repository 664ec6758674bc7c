// What a proxy records of its puts and of those that come to it: two tracks of a capture, in host time.
#pragma once

#include <algorithm>
#include <memory>

#include "comm/command.h"
#include "fabric/trace.hpp"

namespace tracekern {

// The tracks of a proxy. The thread that does its turns writes both.
enum class ProxyTrack : uint32_t { puts, arrivals };
inline constexpr const char* kProxyTrackNames[] = {"proxy puts", "proxy arrivals"};

class ProxyTrace {
    template <class Record>
    static auto of_kind(PutKind kind, Record record) {
        using Event = TransferEvent;
        switch (kind) {
            case PutKind::credit:
                return record.template operator()<Event::put_credit, Event::credit_came>();
            case PutKind::message:
                return record.template operator()<Event::put_message, Event::message_came>();
            case PutKind::count:
                return record.template operator()<Event::put_count, Event::count_came>();
            case PutKind::row:
                return record.template operator()<Event::put_row, Event::row_came>();
            case PutKind::results:
                return record.template operator()<Event::put_results, Event::results_came>();
            case PutKind::chunk:
                return record.template operator()<Event::put_chunk, Event::chunk_came>();
            case PutKind::head:
                return record.template operator()<Event::put_head, Event::head_came>();
            default:
                return record.template operator()<Event::put_word, Event::word_came>();
        }
    }

public:
    // A put on record, while it lasts.
    struct Put {
        HostTrack::Open whole, command;
        uint32_t recording = 0;  // 0: not recorded
    };

    // number: this proxy's, which no other has.
    void start(const LaunchDescriptor& launch, uint64_t number) {
        constexpr uint32_t kNumTracks = 2;
        ++recording_;
        puts_ = std::make_unique<HostTrack>(launch, static_cast<uint32_t>(ProxyTrack::puts), kNumTracks);
        arrivals_ = std::make_unique<HostTrack>(launch, static_cast<uint32_t>(ProxyTrack::arrivals), kNumTracks);
        puts_->mark<TransferEvent::engine>(HostTrack::now(), number);
    }
    void introduce(uint32_t rank, uint64_t number) { puts_->mark<TransferEvent::peer>(HostTrack::now(), rank, number); }
    void stop() {
        puts_.reset();
        arrivals_.reset();
    }

    // A command was taken, with so many others before it to the same peer.
    Put take(const Command& command, uint64_t ahead) {
        if (!puts_) return {};
        const Immediate imm = unpack_immediate(command.imm);
        const uint64_t now = HostTrack::now();
        Put put;
        put.recording = recording_;
        put.whole = of_kind(imm.kind, [&]<TransferEvent kPut, TransferEvent>() {
            const uint32_t bytes = std::min(command.bytes, kMostBytes);
            return puts_->begin<kPut>(now, command.peer, imm.which, imm.n, imm.epoch, bytes);
        });
        put.command = puts_->begin<TransferEvent::command>(now, command.peer, ahead);
        return put;
    }
    // It was posted then.
    void post(const Put& put, uint64_t at) {
        if (is_of_this(put)) puts_->end(put.command, at);
    }
    // 0 where nothing is recorded.
    uint64_t now() const { return puts_ ? HostTrack::now() : 0; }
    void complete(const Put& put) {
        if (is_of_this(put)) puts_->end(put.whole, HostTrack::now());
    }
    void arrive(uint32_t source, const Immediate& imm) {
        if (!arrivals_) return;
        of_kind(imm.kind, [&]<TransferEvent, TransferEvent kCame>() {
            arrivals_->mark<kCame>(HostTrack::now(), source, imm.which, imm.n, imm.epoch);
        });
    }

private:
    static constexpr uint32_t kMostBytes = (1u << 18) - 1;  // that a record has room for

    bool is_of_this(const Put& put) const { return puts_ && put.recording == recording_; }

    std::unique_ptr<HostTrack> puts_, arrivals_;
    uint32_t recording_ = 0;
};

}  // namespace tracekern
