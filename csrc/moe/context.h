// What a warp carries through a kernel of a family: the kernel's arguments beside what every waiting kernel has.
#pragma once

#include "comm/context.h"

namespace tracekern {

// Args has the communicator's as `comm` and the epoch of the call under way as `state->epoch`.
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
                           own_args.state->epoch),
          args(own_args) {}
};

}  // namespace tracekern
