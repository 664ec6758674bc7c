// The entry point of every kernel of every family on a GPU: a body and a recorder.
#pragma once

#include "platform/device.h"

namespace tracekern {

// The trace comes first: behind 800 bytes of arguments, in a line of constants that nothing else needs, it made tracing
// cost a sixth more of a small call (H200, 2026-11-22).
template <class Body, class Rec>
TK_ENTRY(Body::kMaxThreads)
entry(typename Rec::Args trace, const typename Body::Args args, const LaunchSize size) {
    Warp warp(size);
    Body::template run<Rec>(warp, args, trace);
}

}  // namespace tracekern
