// Parts of the int4 experts' kernels over a pipe, on the CPU backend.
//
//   int4_parts 0 | 1        Warp::multiply_sparse with that selector. Reads, again and again, rows [32 lanes][4 words],
//                           the dense matrix [32][8] bf16 and metadata [32 lanes]; writes the product [32 lanes][4].
//   int4_parts exponential  Reads floats, writes the exponential of each.
#include <cstdio>
#include <cstring>

#include "moe/gemm/silu.h"
#include "platform/cpu_executor.hpp"

using namespace tracekern;

namespace {

template <class T>
bool read_one(T& value) {
    return std::fread(&value, sizeof(value), 1, stdin) == 1;
}

struct Operands {
    PerLane<SparseRows> rows;
    BFloat16 dense[32][8];
    PerLane<uint32_t> metadata;
};

template <uint32_t kSelector>
void multiply_all() {
    Operands given;
    while (read_one(given)) {
        launch_cpu(CpuLaunch{}, [&](Warp& warp) {
            const auto column = warp.load_transposed(given.dense);
            const auto product = warp.multiply_sparse<kSelector>(given.rows, column, given.metadata);
            std::fwrite(&product, sizeof(product), 1, stdout);
        });
    }
}

}  // namespace

int main(int, char** argv) {
    if (std::strcmp(argv[1], "0") == 0) {
        multiply_all<0>();
    } else if (std::strcmp(argv[1], "1") == 0) {
        multiply_all<1>();
    } else {
        for (float x; read_one(x);) {
            const float result = exponential(x);
            std::fwrite(&result, sizeof(result), 1, stdout);
        }
    }
    return 0;
}
