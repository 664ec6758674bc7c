// Dispatch and combine on one node, where rows go straight into the rings of peers. Two blocks have a channel, one that
// sends and one that receives. Every wait ends: receivers and reducers wait for rows alone, so those that they were
// told of are read, and a sender gets room.
#pragma once

#include "moe/two_hop/combine.h"

namespace tracekern {

template <class Rec, class Comm>
class PeerSender;

template <class Comm>
struct TwoHopOneNodeDispatch {
    using Args = TwoHopArgs<Comm>;
    static constexpr TwoHopStage kStage = TwoHopStage::dispatch;
    static constexpr uint32_t kMaxThreads = 32 * kMaxTeamWarps;

    static uint64_t shared_bytes(const Args&, uint32_t) {
        static_assert(sizeof(NodeTurnFlags) >= sizeof(TurnFlags));
        return sizeof(NodeTurnFlags);
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const Args& args, typename Rec::Args trace) {
        const Teams teams = Teams::of(warp, args.nodes.peers);
        TwoHopContext<Rec, Comm> context(warp, args, trace, kStage, role_of(warp, teams));
        const bool is_off = is_called_off(context);
        if (!is_off) tell_from_first_block(context);
        const bool is_sender = is_forwarder_block(warp);
        if (is_sender) {
            clear_turns(context, warp.template shared<TurnFlags>(), teams);
        } else {
            clear_turns(context, warp.template shared<NodeTurnFlags>(), teams);
        }
        warp.block_sync();
        const uint32_t peer = peer_of_team(warp, args, teams);
        if (is_off) {
        } else if (is_sender) {
            PeerSender<Rec, Comm>(context, teams, peer).run();
        } else {
            Receiver<Rec, Comm>(context, warp.template shared<NodeTurnFlags>(), teams, peer).run();
        }
        end_call(context);
    }

private:
    TK_DEVICE static TwoHopRole role_of(const Warp& warp, const Teams& teams) {
        if (is_forwarder_block(warp)) {
            return teams.place_of(warp.warp).is_coordinator() ? TwoHopRole::forwarder_coordinator
                                                              : TwoHopRole::forwarder;
        }
        return teams.place_of(warp.warp).is_coordinator() ? TwoHopRole::receiver_coordinator : TwoHopRole::nvl_receiver;
    }
};

template <class Comm>
struct TwoHopOneNodeCombine {
    using Args = TwoHopArgs<Comm>;
    static constexpr TwoHopStage kStage = TwoHopStage::combine;
    static constexpr uint32_t kMaxThreads = 32 * kMaxTeamWarps;

    static uint64_t shared_bytes(const Args&, uint32_t) {
        static_assert(sizeof(NodeReducerShared) >= sizeof(NodeTurnFlags));
        return sizeof(NodeReducerShared);
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const Args& args, typename Rec::Args trace) {
        const bool is_reducer = is_forwarder_block(warp);
        const Teams teams = Teams::of(warp, is_reducer ? 1 : args.nodes.peers);
        TwoHopContext<Rec, Comm> context(warp, args, trace, kStage, role_of(warp, teams));
        const bool is_off = is_called_off(context);
        if (!is_off) tell_from_first_block(context);
        auto& returned = warp.template shared<NodeTurnFlags>();
        if (is_reducer) {
            clear_turns(context, warp.template shared<NodeReducerShared>().summed, teams);
        } else {
            clear_turns(context, returned, teams);
        }
        warp.block_sync();
        const uint32_t peer = peer_of_team(warp, args, teams);
        if (is_off) {
        } else if (is_reducer) {
            NodeReducer<Rec, Comm, true>(context, teams).run();
        } else {
            ReturnSender<Rec, Comm>(context, returned, teams, peer).run();
        }
        end_call(context);
    }

private:
    TK_DEVICE static TwoHopRole role_of(const Warp& warp, const Teams& teams) {
        if (is_forwarder_block(warp)) return TwoHopRole::node_reducer;
        return teams.place_of(warp.warp).is_coordinator() ? TwoHopRole::sender_coordinator : TwoHopRole::nvl_sender;
    }
};

// Dispatch on one node, where there is no first hop: a team of warps for each peer sends it the tokens that it wants,
// straight from x.
//
// Warps take them in turns, and the coordinator tells the peer of whole chunks, behind the slowest of them. A row waits
// for room for itself alone: the rows before it were sent, and all of them but those of its own chunk told of, so that
// with as many slots as a chunk there will be room.
template <class Rec, class Comm>
class PeerSender {
    using Context = TwoHopContext<Rec, Comm>;

public:
    TK_DEVICE PeerSender(Context& context, const Teams& teams, uint32_t target_peer)
        : context_(context),
          warp_(context.warp),
          args_(context.args),
          channel_(context.channel()),
          peer_(target_peer),
          rank_(context.args.neighbour(target_peer)),
          turns_(context, warp_.template shared<TurnFlags>(), teams, target_peer, TwoHopRing::nvl) {}

    TK_DEVICE bool run() {
        if (!wait_peer_over(context_, peer_)) return false;
        // How many of the peer's tokens are in the channels before, and with this one.
        const int32_t* sums = args_.call.gbl_channel_prefix_matrix + uint64_t{rank_} * args_.num_channels;
        const auto start = static_cast<uint32_t>(channel_ == 0 ? 0 : sums[channel_ - 1]);
        const auto end = static_cast<uint32_t>(sums[channel_]);
        if (!turns_.place().is_coordinator()) return send_tokens();
        pass_prefix(context_, peer_, 0, start, end);
        note_places();
        const uint32_t count = end - start;
        uint32_t told = 0;
        return turns_.follow(count, [&](uint32_t, uint32_t sent) {
            if (sent - told < args_.rings.part_chunk && sent < count) return;
            signal_tail(sent);
            told = sent;
        });
    }

private:
    TK_DEVICE bool wait_room(uint32_t position) {
        if (position < known_head_ + args_.rings.part_slots) return true;
        const WaitResult came = wait_peer_ring(context_, peer_, 0, known_head_, position);
        known_head_ = came.value;
        return came.ok;
    }

    // Released: the rows, which this team's warps released to this one.
    TK_DEVICE void signal_tail(uint32_t tail) {
        TK_SIGNAL(context_.recorder, TwoHopEvent::signal_peer_tail, rank_, channel_, 0, tail);
        auto* flag = context_.comm.template at<uint64_t>(rank_, args_.peer_tail_flag(channel_, args_.peer(), 0));
        signal_peer<TwoHopChannel::peer_tail>(context_, rank_, flag, tail);
    }

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
                if (position % turns_.place().num_workers() != turns_.place().index) continue;
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
        TK_RANGE(context_.recorder, TwoHopEvent::send_token, rank_, token, position % args_.rings.part_slots);
        char* to = context_.comm.template at<char>(rank_, args_.nvl_row(channel_, args_.peer(), 0, position));
        copy_row(warp_, to, args_.call.x + uint64_t{token} * layout.hidden_bytes, layout.hidden_bytes);
        write_words(context_, layout.words(to), rank_, [&](uint32_t i) {
            return i == 1 ? peers : word_of_token(context_, token, i);
        });
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
    uint32_t known_head_ = 0;
    Turns<Context, TwoHopChannel::sent, TwoHopEvent::signal_sent, TwoHopEvent::wait_sent> turns_;
};

}  // namespace tracekern
