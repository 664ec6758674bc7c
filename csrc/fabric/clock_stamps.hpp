// Round trips to peers while an engine records: what they say of the clocks of two hosts. The worker's.
//
// One question is under way at a time, so that round trips are on record in the order of their begins.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "fabric/messages.hpp"
#include "fabric/peer.hpp"
#include "fabric/trace.hpp"

namespace tracekern {

class ClockStamps {
public:
    // Sends a message of this kind with this text.
    using Send = std::function<void(Peer&, MessageKind, const std::string&)>;

    ClockStamps(WorkerTrace& trace, Send send) : trace_(trace), send_(std::move(send)) {}

    void look(std::map<uint64_t, Peer>& peers, TimePoint now) {
        if (trace_.is_on() && now >= next_) ask_next(peers, now);
    }

    static std::string answer(const std::string& question) {
        return question + Packer().number(HostTrack::now()).take();
    }

    // An answer has come; the next question follows at once.
    void take(std::map<uint64_t, Peer>& peers, const Peer& peer, const std::string& answer) {
        const uint64_t came = HostTrack::now();
        Unpacker unpacker(answer, "answer about the time");
        const uint64_t asked = unpacker.number<uint64_t>(), told = unpacker.number<uint64_t>();
        unpacker.end();
        if (asked != asked_ || !trace_.is_on()) return;  // too late, or for another recording
        const auto ahead = static_cast<int64_t>(told - asked);
        if (ahead > -kBias && ahead < kBias) {
            RecordedSpan span = trace_.begin<TransferEvent::round_trip>(
                EngineTrack::clocks, asked, peer.number, static_cast<uint64_t>(ahead + kBias));
            trace_.end(EngineTrack::clocks, span, came);
        }
        ask_next(peers, std::chrono::steady_clock::now());
    }

private:
    static constexpr int64_t kBias = int64_t{1} << 44;  // of field `ahead`: hosts are less than 4 h apart
    static constexpr uint32_t kInARow = 8;
    static constexpr auto kLimit = std::chrono::milliseconds(100), kPause = std::chrono::milliseconds(1000);

    // The last peer that was asked once more, or the next one; after all of them a pause.
    void ask_next(std::map<uint64_t, Peer>& peers, TimePoint now) {
        asked_ = 0;
        if (num_asked_ == kInARow) {
            num_asked_ = 0;
            ++engine_;
        }
        auto place = peers.lower_bound(engine_);
        while (place != peers.end() && place->second.state != Peer::State::ready) ++place;
        if (place == peers.end()) {
            engine_ = 0;
            num_asked_ = 0;
            next_ = now + kPause;
            return;
        }
        if (place->first != engine_) num_asked_ = 0;
        engine_ = place->first;
        ++num_asked_;
        next_ = now + kLimit;
        asked_ = HostTrack::now();
        send_(place->second, MessageKind::ask_time, Packer().number(asked_).take());
    }

    WorkerTrace& trace_;
    const Send send_;
    uint64_t engine_ = 0;     // that was asked, or is next
    uint32_t num_asked_ = 0;  // in a row
    uint64_t asked_ = 0;      // when; 0: no question is under way
    TimePoint next_;          // when the next question is due, whatever comes
};

}  // namespace tracekern
