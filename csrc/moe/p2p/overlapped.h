// Dispatch and combine of one partition while experts multiply another one.
//
// Beside experts few blocks have all of the rows. So every warp works to the end: first its part of what waits for
// nothing, sending rows or sending back, then its part of the other side; what that waits for comes, as all ranks do it
// in this order. Where no expert runs, in the dispatch of the first partition and the combine of the last, both sides
// work at the same time, half of the warps each, as in `reduce`.
#pragma once

#include "moe/p2p/dedup_combine.h"

namespace tracekern {

struct P2POverlappedDispatch : P2PKernelWithLists<P2PStage::dispatch> {
    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        if (args.partition == 0) return P2PDispatch::run<Rec>(warp, args, trace);
        P2PContext<Rec> context(warp, args, trace, kStage, P2PRole::send);
        const Share share = Share::of_all(warp);
        send_rows(context, share, args.partition);
        receive_rows(context, share);
    }
};

template <class T>
struct P2POverlappedCombine : P2PKernelWithLists<P2PStage::combine> {
    template <class Rec>
    TK_DEVICE static void run(Warp& warp, const P2PArgs& args, typename Rec::Args trace) {
        if (args.is_last_partition()) return P2PCombine<T, SumOfEachRank>::template run<Rec>(warp, args, trace);
        P2PContext<Rec> context(warp, args, trace, kStage, P2PRole::send);
        const Share share = Share::of_all(warp);
        send_back<T, SumOfEachRank>(context, share);
        reduce_tokens<T, SumOfEachRank>(context, share, args.partition);
    }
};

}  // namespace tracekern
