// Notify: each rank learns what comes to it, and so that all that it may write to has been read.
//
// Block 0 exchanges counts along the way that tokens take: to the ranks of the same place in other nodes, then to the
// peers of the own node. From what came it lays out recv_x and tells the host. The others, one for each node, count
// what goes there in each channel.
//
// Counts of call e also say that call e - 1 is over: see moe/two_hop/call.h.
//
// What acknowledges counts: nothing in call e + 1, so there are two blocks of each, for odd and even epochs. Who writes
// those of e + 2 has had the counts of e + 1, from a rank that had then read those of e. Likewise the own block that a
// proxy may still be reading.
#pragma once

#include "moe/two_hop/call.h"
#include "moe/two_hop/turns.h"

namespace tracekern {

// Waits that gave up, of each hop in a word of its own: a warp may be at the second while another reads the first.
struct NotifyShared {
    uint32_t first_hop_failures, second_hop_failures;
};

template <class Comm>
struct TwoHopNotifyDispatch {
    using Args = TwoHopArgs<Comm>;
    static constexpr TwoHopStage kStage = TwoHopStage::notify_dispatch;
    static constexpr uint32_t kMaxThreads = 32 * kMaxTeamWarps;

    static uint64_t shared_bytes(const Args&, uint32_t) { return sizeof(NotifyShared); }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const Args& args, typename Rec::Args trace) {
        TwoHopContext<Rec, Comm> context(warp, args, trace, kStage, TwoHopRole::notify);
        if (warp.block == 0) {
            exchange_counts(context);
        } else {
            count_channels(context, warp.block - 1);
        }
    }
};

// All warps of block 0. One that gave up goes on to the barriers of its block.
template <class Rec, class Comm>
TK_DEVICE void exchange_counts(TwoHopContext<Rec, Comm>& context) {
    Warp& warp = context.warp;
    const TwoHopArgs<Comm>& args = context.args;
    const uint32_t num_nodes = args.nodes.num_nodes, peers = args.nodes.peers;
    auto& shared = warp.template shared<NotifyShared>();
    if (warp.warp == 0) warp.leader([&] { shared = {}; });
    warp.block_sync();
    const auto note = [&](bool ok, uint32_t& failures) {
        if (!ok) warp.leader([&] { add_relaxed_block(&failures, 1u); });
    };
    const bool is_over = wait_puts(context);
    note(is_over, shared.first_hop_failures);
    for_share_of_warp(warp, is_over ? num_nodes : 0, args.node(), [&](uint32_t node) { send_counts(context, node); });
    for_share_of_warp(warp, num_nodes, args.node(), [&](uint32_t node) {
        note(wait_counts(context, node), shared.first_hop_failures);
    });
    warp.block_sync();
    const bool ok = shared.first_hop_failures == 0;
    if (ok) {
        for_share_of_warp(warp, peers, args.peer(), [&](uint32_t peer) { send_peer_counts(context, peer); });
        for_share_of_warp(warp, peers, args.peer(), [&](uint32_t peer) {
            note(wait_peer_counts(context, peer), shared.second_hop_failures);
        });
    }
    warp.block_sync();
    if (warp.warp == 0 && ok && shared.second_hop_failures == 0) lay_out(context);
}

// ---- first hop ----

template <class Rec, class Comm>
TK_DEVICE void send_counts(TwoHopContext<Rec, Comm>& context, uint32_t node) {
    const TwoHopArgs<Comm>& args = context.args;
    const TwoHopCall& call = args.call;
    const uint32_t peers = args.nodes.peers, num_local = args.shape.num_local_experts();
    const uint32_t num_words = peers + 1 + peers * num_local, parity = parity_of(context);
    auto* block = args.template to_node<uint32_t>(node, args.counts_out_at(parity, node));
    context.warp.strided(num_words, [&](uint32_t i) {
        const int32_t count = i < peers    ? call.num_tokens_per_rank[node * peers + i]
                              : i == peers ? call.num_tokens_per_rdma_rank[node]
                                           : call.num_tokens_per_expert[node * peers * num_local + i - peers - 1];
        block[i] = static_cast<uint32_t>(count);
    });
    const uint32_t rank = args.rank_in(node);
    TK_SIGNAL(context.recorder, TwoHopEvent::signal_counts, rank);
    // Released with the block; and what this rank did in earlier calls comes before.
    put_to_node<TwoHopChannel::counts>(context,
                                       node,
                                       {.kind = PutKind::count},
                                       args.counts_flag(parity, args.node()),
                                       call.told,
                                       {.src = args.counts_out_at(parity, node),
                                        .dst = args.counts_at(parity, args.node()),
                                        .bytes = num_words * static_cast<uint32_t>(sizeof(uint32_t))});
}

template <class Rec, class Comm>
TK_DEVICE bool wait_counts(TwoHopContext<Rec, Comm>& context, uint32_t node) {
    const TwoHopArgs<Comm>& args = context.args;
    const uint32_t parity = parity_of(context), rank = args.rank_in(node);
    const auto wait_now = [&] {
        const auto* flag = args.template from_node<uint64_t>(node, args.counts_flag(parity, node));
        const WaitFor whom = wait_for(context, rank);
        const WaitResult came = wait<TwoHopChannel::counts>(context.warp, context.comm, flag, context.epoch, whom);
        const bool ok = makes_same_call(context, rank, came);
        const auto* block = args.template from_node<uint32_t>(node, args.counts_at(parity, node));
        return WaitResult{ok, ok ? block[args.nodes.peers] : 0};
    };
    return record_wait<TwoHopEvent::wait_counts>(context, wait_now, rank).ok;
}

// ---- second hop ----

// What came over the first hop for a peer of this node. Behind the counts of all nodes.
template <class Rec, class Comm>
TK_DEVICE void send_peer_counts(TwoHopContext<Rec, Comm>& context, uint32_t peer) {
    const TwoHopArgs<Comm>& args = context.args;
    const uint32_t num_nodes = args.nodes.num_nodes, peers = args.nodes.peers, parity = parity_of(context);
    const uint32_t num_local = args.shape.num_local_experts(), rank = args.neighbour(peer);
    auto* block = context.comm.template at<uint32_t>(rank, args.peer_counts_at(parity, args.peer()));
    const auto word_from = [&](uint32_t node, uint32_t i) {
        return args.template from_node<uint32_t>(node, args.counts_at(parity, node))[i];
    };
    context.warp.strided(num_nodes + num_local, [&](uint32_t i) {
        if (i < num_nodes) {
            block[i] = word_from(i, peer);
            return;
        }
        uint32_t choices = 0;
        for (uint32_t node = 0; node < num_nodes; ++node) {
            choices += word_from(node, peers + 1 + peer * num_local + i - num_nodes);
        }
        block[i] = choices;
    });
    TK_SIGNAL(context.recorder, TwoHopEvent::signal_peer_counts, rank);
    // Released with the block.
    auto* flag = context.comm.template at<uint64_t>(rank, args.peer_counts_flag(parity, args.peer()));
    signal_peer<TwoHopChannel::peer_counts>(context, rank, flag, args.call.told);
}

// ---- what comes ----

// Lays out recv_x, source rank by source rank, and tells the host how long it is. One warp, behind all counts.
template <class Rec, class Comm>
TK_DEVICE void lay_out(TwoHopContext<Rec, Comm>& context) {
    Warp& warp = context.warp;
    const TwoHopArgs<Comm>& args = context.args;
    const TwoHopCall& call = args.call;
    const uint32_t num_nodes = args.nodes.num_nodes, peers = args.nodes.peers, parity = parity_of(context);
    TK_RANGE(context.recorder, TwoHopEvent::notify);
    const auto from_peer = [&](uint32_t peer, uint32_t i) {
        return args.template own<uint32_t>(args.peer_counts_at(parity, peer))[i];
    };
    const auto rows_up_to = [&](uint32_t rank) {
        uint32_t rows = 0;
        for (uint32_t i = 0; i <= rank; ++i) rows += from_peer(args.nodes.peer_of(i), args.nodes.node_of(i));
        return rows;
    };
    const auto forwarded_up_to = [&](uint32_t node) {
        uint32_t tokens = 0;
        for (uint32_t i = 0; i <= node; ++i) {
            tokens += args.template from_node<uint32_t>(i, args.counts_at(parity, i))[peers];
        }
        return tokens;
    };
    warp.strided(args.nodes.num_ranks(),
                 [&](uint32_t rank) { call.recv_gbl_rank_prefix_sum[rank] = static_cast<int32_t>(rows_up_to(rank)); });
    warp.strided(num_nodes, [&](uint32_t node) {
        call.recv_rdma_rank_prefix_sum[node] = static_cast<int32_t>(forwarded_up_to(node));
    });
    // The host waits for all of them.
    const auto tell = [&](uint64_t& word, uint32_t value) { tell_host(&word, call.ticket, value); };
    HostCounts& told = *args.host_counts;
    warp.strided(args.shape.num_local_experts(), [&](uint32_t expert) {
        uint32_t choices = 0;
        for (uint32_t peer = 0; peer < peers; ++peer) choices += from_peer(peer, num_nodes + expert);
        const uint32_t aligned = (choices + call.expert_alignment - 1) / call.expert_alignment * call.expert_alignment;
        tell(told.moe_recv_expert_counter[expert], aligned);
    });
    warp.leader([&] {
        const uint32_t num_forwarded = forwarded_up_to(num_nodes - 1);
        const uint32_t num_rows = rows_up_to(args.nodes.num_ranks() - 1);
        const bool is_reserved = call.recv_capacity != 0;
        if (is_reserved && (num_rows > call.recv_capacity || num_forwarded > call.forward_capacity)) {
            tell(told.overflow, num_rows > num_forwarded ? num_rows : num_forwarded);
        }
        tell(told.moe_recv_rdma_counter, num_forwarded);
        tell(told.moe_recv_counter, num_rows);
    });
    TK_END(rows_up_to(args.nodes.num_ranks() - 1));
}

// ---- what goes out ----

// One node's rows of the two channel prefix matrices. All warps of a block.
template <class Rec, class Comm>
TK_DEVICE void count_channels(TwoHopContext<Rec, Comm>& context, uint32_t node) {
    Warp& warp = context.warp;
    const TwoHopArgs<Comm>& args = context.args;
    const TwoHopCall& call = args.call;
    const uint32_t peers = args.nodes.peers, num_channels = args.num_channels;
    TK_RANGE(context.recorder, TwoHopEvent::count_channels, node);
    const auto goes_to = [&](uint32_t token, uint32_t peer) {
        const uint64_t first = uint64_t{token} * args.nodes.num_ranks() + node * peers;
        return uint32_t{call.is_token_in_rank[first + peer] != 0};
    };
    int32_t* of_ranks = call.gbl_channel_prefix_matrix + uint64_t{node} * peers * num_channels;
    int32_t* of_node = call.rdma_channel_prefix_matrix + uint64_t{node} * num_channels;
    for (uint32_t channel = warp.warp; channel < num_channels; channel += warp.num_warps) {
        const TaskRange range = TaskRange::of(call.num_tokens, num_channels, channel);
        const auto count = [&](auto is_counted) {
            return static_cast<int32_t>(
                warp.sum_over(range.end - range.begin, [&](uint32_t i) { return is_counted(range.begin + i); }));
        };
        for (uint32_t peer = 0; peer < peers; ++peer) {
            const int32_t tokens = count([&](uint32_t token) { return goes_to(token, peer); });
            warp.leader([&] { of_ranks[peer * num_channels + channel] = tokens; });
        }
        const int32_t tokens = count([&](uint32_t token) {
            uint32_t any = 0;
            for (uint32_t peer = 0; peer < peers; ++peer) any |= goes_to(token, peer);
            return any;
        });
        warp.leader([&] { of_node[channel] = tokens; });
    }
    warp.block_sync();
    if (warp.warp != 0) return;
    warp.strided(peers + 1, [&](uint32_t i) {
        int32_t* row = i < peers ? of_ranks + i * num_channels : of_node;
        for (uint32_t channel = 1; channel < num_channels; ++channel) row[channel] += row[channel - 1];
    });
}

}  // namespace tracekern
