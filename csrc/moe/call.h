// The tensors of one call, row-major and contiguous, in memory that kernels read. A family's arguments begin with them.
#pragma once

#include "moe/experts.h"

namespace tracekern {

struct MoeCall {
    const char* x;              // [token][hidden]
    const int32_t* topk_idx;    // [token][topk], -1: no expert
    const float* topk_weights;  // [token][topk]
    Experts experts;
    char* out;  // [token][hidden]
    uint32_t num_tokens;
};

}  // namespace tracekern
