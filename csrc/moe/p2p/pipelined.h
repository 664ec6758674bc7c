// The whole call as one kernel: one partition of the tokens goes out while the results of another one come back.
//
// In every block half of the warps are on the token's side: they send the rows of a partition, then add up the results
// of the partition before, so that two are always on their way. The other half are on the expert's side: they take
// rows as they come, partition by partition, and send the sums back. Experts work on a row where it arrived; there is
// no layout for a grouped GEMM. The results are those of `reduce`, bit by bit.
//
// No cycle of waits. Call a row's turn its partition. On every rank
//   - rows of turn p are sent once the results of turn p - 2 were added up, those of the first two at once;
//   - the expert's side finishes turn p before it takes a row of turn p + 1, and sends a row's result as soon as it has
//     taken the row;
//   - within a turn it takes rows as they come, and waits only for rows of that turn.
// Take the lowest turn p that is not finished on some rank. All rows of p - 2 and before were taken and their results
// sent, so every token's side gets through p - 2 and sends its rows of p; each of them comes, and every expert's side
// is at p: it takes them in whatever order. So turn p gets finished. A warp that went on to rows of p + 1 while some of
// p were missing would break that: one that does both sides might wait for a row that it has yet to send itself.
#pragma once

#include "moe/p2p/dedup_combine.h"

namespace tracekern {

// Takes this share of the rows of a partition and sends their sums back; false when it gave up.
template <class T, class Rec>
TK_DEVICE bool serve_rows(P2PContext<Rec>& context, Share share, uint32_t partition) {
    return for_rows_as_they_come(context, share, partition, [&](uint32_t src_rank, uint32_t slot) {
        SumOfEachRank::send<T, true>(context, src_rank, context.args.recv_row(context.comm.rank, src_rank, slot));
    });
}

// A block of one warp does both sides in turns.
template <class T, class Rec>
TK_DEVICE void exchange_partitions(P2PContext<Rec>& context, OwnPart own) {
    const bool on_token_side = own.in_first_half;
    const bool on_expert_side = own.in_second_half;
    const Share share = own.share;
    const uint32_t num_partitions = context.args.layout.num_partitions;
    bool ok = true;
    for (uint32_t partition = 0; ok && partition <= num_partitions; ++partition) {
        if (on_token_side && partition < num_partitions) send_rows(context, share, partition);
        if (on_expert_side && partition == 0) ok = wait_layout(context);
        if (!ok || partition == 0) continue;
        if (on_expert_side) ok = serve_rows<T>(context, share, partition - 1);
        if (ok && on_token_side) {
            ok = reduce_tokens<T, SumOfEachRank>(context, share, partition - 1);
        }
    }
}

template <class T>
struct P2PDispatchCombine : P2PKernelWithLists<P2PStage::dispatch_combine> {
    TK_DEVICE static P2PRole role_of(const Warp& warp, const OwnPart& own) {
        if (is_count_block(warp)) return P2PRole::count;
        return own.in_first_half ? P2PRole::token : P2PRole::expert;
    }

    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        const OwnPart own = P2PDispatch::part_of(warp);
        P2PContext<Rec> context(warp, args, trace, kStage, role_of(warp, own));
        if (is_count_block(warp)) exchange_counts(context);
        if (is_working_block(warp)) exchange_partitions<T>(context, own);
        finish_call(context);
    }
};

}  // namespace tracekern
