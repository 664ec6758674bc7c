// What a call hands to the kernels of a family, and what a warp carries through one of them.
#pragma once

#include "comm/context.h"
#include "moe/experts.h"

namespace tracekern {

// The tensors of one call, row-major and contiguous, in memory that kernels read. A family's arguments begin with them.
struct MoeCall {
    const char* x;              // [token][hidden]
    const int32_t* topk_idx;    // [token][topk], -1: no expert
    const float* topk_weights;  // [token][topk]
    Experts experts;
    char* out;  // [token][hidden]
    uint32_t num_tokens;
};

// Args has the communicator's as `comm`, and epoch() is that of the call under way.
template <class Args, class Rec>
struct Context : CommContext<Rec> {
    const Args& args;

    template <class Stage, class Role>
    TK_DEVICE Context(Warp& own_warp, const Args& own_args, typename Rec::Args trace, Stage own_stage, Role role)
        : CommContext<Rec>(own_warp,
                           own_args.comm,
                           trace,
                           static_cast<uint32_t>(own_stage),
                           static_cast<uint32_t>(role),
                           own_args.epoch()),
          args(own_args) {}
};

}  // namespace tracekern
