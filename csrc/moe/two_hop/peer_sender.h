// On one node there is no first hop: a team of warps for each peer sends it rows, in dispatch tokens that it wants,
// straight from x, in combine what this rank made of the peer's tokens.
//
// Warps take the rows in turns, and the coordinator tells the peer of whole chunks, behind the slowest of them. A row
// waits for room for itself alone: the rows before it were sent, and all of them but those of its own chunk told of, so
// that with as many slots as a chunk there will be room.
#pragma once

#include "moe/two_hop/forwarder.h"
#include "moe/two_hop/notify.h"
#include "moe/two_hop/return_sender.h"
#include "moe/two_hop/sender.h"
#include "moe/two_hop/turns.h"

namespace tracekern {

template <class Rec, class Comm, bool kIsCombine>
class PeerSender {
    using Context = TwoHopContext<Rec, Comm>;

public:
    // A block's warps are teams for peers, the first for another one in each channel.
    TK_DEVICE PeerSender(Context& context, const Teams& teams, uint32_t target_peer)
        : context_(context),
          warp_(context.warp),
          args_(context.args),
          channel_(context.channel()),
          peer_(target_peer),
          rank_(context.args.neighbour(target_peer)),
          is_coordinator_(teams.is_coordinator(context.warp.warp)),
          turns_(context, warp_.template shared<TurnFlags>(), teams, target_peer, TwoHopRing::nvl) {}

    TK_DEVICE bool run() {
        if (!wait_peer_counts(context_, peer_)) return false;  // it has read what is written over now
        const auto [first, end] = rows();
        const uint32_t count = end - first;
        if (is_coordinator_) {
            if constexpr (!kIsCombine) {
                pass_prefix(first, end);
                note_places();
            }
            uint32_t told = 0;
            return turns_.follow(count, [&](uint32_t, uint32_t sent) {
                if (sent - told < args_.rings.nvl_chunk && sent < count) return;
                signal_tail(sent);
                told = sent;
            });
        }
        if constexpr (kIsCombine) {
            TK_NO_UNROLL
            for (uint32_t i = turns_.index(); i < count; i += turns_.num_workers()) {
                if (!wait_room(i)) return false;
                send_row(first + i, i);
                turns_.done(i);
            }
            return true;
        } else {
            return send_tokens();
        }
    }

private:
    // Of combine: those of combine_x. Of dispatch: how many of the peer's tokens are in the channels before, and with
    // this one.
    TK_DEVICE TaskRange rows() const {
        const uint32_t channels = args_.num_channels;
        if constexpr (kIsCombine) {
            const int32_t* first_rows = args_.call.recv_gbl_channel_prefix_matrix + uint64_t{rank_} * channels;
            const bool is_last = channel_ + 1 == channels;
            const int32_t end = is_last ? args_.call.recv_gbl_rank_prefix_sum[rank_] : first_rows[channel_ + 1];
            return {static_cast<uint32_t>(first_rows[channel_]), static_cast<uint32_t>(end)};
        } else {
            const int32_t* sums = args_.call.gbl_channel_prefix_matrix + uint64_t{rank_} * channels;
            const int32_t before = channel_ == 0 ? 0 : sums[channel_ - 1];
            return {static_cast<uint32_t>(before), static_cast<uint32_t>(sums[channel_])};
        }
    }

    TK_DEVICE bool wait_room(uint32_t position) {
        const uint32_t slots = args_.rings.nvl_slots, wanted = position + 1;
        if (wanted <= known_head_ + slots) return true;
        const RingWait whom = context_.ring_wait(TwoHopRing::nvl, rank_, known_head_, position);
        if constexpr (kIsCombine) {
            const auto* flag = args_.template own<uint64_t>(args_.return_head_flag(channel_, peer_, 0));
            TK_WAIT(context_.recorder, TwoHopEvent::wait_return_ring, rank_, channel_);
            const WaitResult came = wait_at_least<TwoHopChannel::return_head>(
                warp_, context_.comm, flag, context_.epoch, wanted - slots, whom);
            TK_END_IF(came.ok, 0, wanted);
            known_head_ = came.value;
            return came.ok;
        } else {
            const auto wait_now = [&] {
                const auto* flag = args_.template own<uint64_t>(args_.peer_head_flag(channel_, peer_));
                return wait_at_least<TwoHopChannel::peer_head>(
                    warp_, context_.comm, flag, context_.epoch, wanted - slots, whom);
            };
            const WaitResult came =
                record_wait<TwoHopEvent::wait_peer_ring>(context_, wait_now, rank_, channel_, wanted);
            known_head_ = came.value;
            return came.ok;
        }
    }

    // Released: the rows, which this team's warps released to this one.
    TK_DEVICE void signal_tail(uint32_t tail) {
        if constexpr (kIsCombine) {
            TK_SIGNAL(context_.recorder, TwoHopEvent::signal_return_tail, rank_, channel_, 0, tail);
            auto* flag = context_.comm.template at<uint64_t>(rank_, args_.return_tail_flag(channel_, args_.peer(), 0));
            signal_peer<TwoHopChannel::return_tail>(context_, rank_, flag, tail);
        } else {
            TK_SIGNAL(context_.recorder, TwoHopEvent::signal_peer_tail, rank_, channel_, tail);
            auto* flag = context_.comm.template at<uint64_t>(rank_, args_.peer_tail_flag(channel_, args_.peer()));
            signal_peer<TwoHopChannel::peer_tail>(context_, rank_, flag, tail);
        }
    }

    // ---- combine ----

    TK_DEVICE void send_row(uint32_t row, uint32_t position) {
        char* to = context_.comm.template at<char>(rank_, args_.return_row(channel_, args_.peer(), 0, position));
        copy_result(context_, to, row, rank_, 0, position % args_.rings.nvl_slots);
    }

    // ---- dispatch ----

    // Of 32 tokens from `first` on, a lane a token: the peers that want it, a bit each.
    TK_DEVICE PerLane<uint32_t> peers_of(uint32_t first, uint32_t end) const {
        return warp_.lanes([&](int lane) {
            uint32_t wanted = 0;
            const uint32_t token = first + static_cast<uint32_t>(lane), peers = args_.nodes.peers;
            if (lane >= 32 || token >= end) return wanted;
            for (uint32_t peer = 0; peer < peers; ++peer) {
                wanted |= uint32_t{args_.call.is_token_in_rank[uint64_t{token} * peers + peer] != 0} << peer;
            }
            return wanted;
        });
    }

    TK_DEVICE bool send_tokens() {
        const TaskRange range = own_tokens(context_);
        uint32_t position = 0;
        TK_NO_UNROLL
        for (uint32_t first = range.begin; first < range.end; first += 32) {
            const auto peers = peers_of(first, range.end);
            uint32_t wanted = warp_.ballot([&](int lane) { return peers[lane] >> peer_ & 1; });
            TK_NO_UNROLL
            for (; wanted; wanted &= wanted - 1, ++position) {
                if (position % turns_.num_workers() != turns_.index()) continue;
                const uint32_t i = first_bit(wanted);
                if (!wait_room(position)) return false;
                send_token(first + i, warp_.shuffle(peers, static_cast<int>(i)), position);
                turns_.done(position);
            }
        }
        return true;
    }

    TK_DEVICE void send_token(uint32_t token, uint32_t peers, uint32_t position) {
        const RowLayout& layout = args_.row;
        TK_RANGE(context_.recorder, TwoHopEvent::forward_token, args_.node(), rank_, position % args_.rings.nvl_slots);
        char* to = context_.comm.template at<char>(rank_, args_.nvl_row(channel_, args_.peer(), position));
        copy_row(warp_, to, args_.call.x + uint64_t{token} * layout.hidden_bytes, layout.hidden_bytes);
        write_words(context_, layout.words(to), rank_, [&](uint32_t i) {
            return i == 1 ? peers : word_of_token(context_, token, i);
        });
    }

    // nvl_channel_prefix_start and nvl_channel_prefix_end. Each flag is its own payload: relaxed.
    TK_DEVICE void pass_prefix(uint32_t start, uint32_t end) {
        TK_SIGNAL(context_.recorder, TwoHopEvent::signal_prefix, rank_, channel_);
        auto* flags = context_.comm.template at<uint64_t>(rank_, args_.prefix_flags(channel_, args_.peer()));
        signal_all_relaxed(warp_, flags, 2, context_.epoch, [&](uint32_t i) { return i == 0 ? start : end; });
    }

    // This peer's column of send_nvl_head, a row for each token that some peer wants; those rows as send_rdma_head.
    TK_DEVICE void note_places() {
        const TwoHopCall& call = args_.call;
        const TaskRange range = own_tokens(context_);
        const int32_t* sums = call.rdma_channel_prefix_matrix;
        const uint32_t before = channel_ == 0 ? 0 : static_cast<uint32_t>(sums[channel_ - 1]);
        uint32_t num_forwarded = 0, num_sent = 0;
        for (uint32_t first = range.begin; first < range.end; first += 32) {
            const auto peers = peers_of(first, range.end);
            const uint32_t forwarded = warp_.ballot([&](int lane) { return peers[lane] != 0; });
            const uint32_t sent = warp_.ballot([&](int lane) { return peers[lane] >> peer_ & 1; });
            warp_.each_lane([&](int lane) {
                const uint32_t token = first + static_cast<uint32_t>(lane);
                if (lane >= 32 || token >= range.end) return;
                const auto place = [&](uint32_t bits, uint32_t so_far) {
                    const uint32_t earlier = count_bits(bits & ((1u << lane) - 1));
                    return bits >> lane & 1 ? static_cast<int32_t>(so_far + earlier) : -1;
                };
                const int32_t in_node = place(forwarded, num_forwarded);
                const uint64_t row = uint64_t{before} + static_cast<uint32_t>(in_node);
                if (in_node >= 0 && row < call.forward_capacity) {
                    call.send_nvl_head[row * args_.nodes.peers + peer_] = place(sent, num_sent);
                }
                if (peer_ == args_.peer()) call.send_rdma_head[token] = in_node;
            });
            num_forwarded += count_bits(forwarded);
            num_sent += count_bits(sent);
        }
        if (peer_ != args_.peer()) return;
        warp_.leader([&] { call.recv_rdma_channel_prefix_matrix[channel_] = sums[channel_]; });
    }

    Context& context_;
    Warp& warp_;
    const TwoHopArgs<Comm>& args_;
    const uint32_t channel_, peer_, rank_;
    const bool is_coordinator_;
    uint32_t known_head_ = 0;
    Turns<Context, TwoHopChannel::sent, TwoHopEvent::signal_sent, TwoHopEvent::wait_sent> turns_;
};

}  // namespace tracekern
