// Between the kernel, which knows no torch, and its binding, which knows no tracing.
#pragma once

#include <cstdint>
#include <string>

// What capture.launch(...) returned.
struct SquareLaunch {
    uint64_t descriptor;
    uint32_t grid;
    uint32_t warps;
    uint64_t stream;
};

void launch_square(float* matrix, uint32_t num_rows, uint32_t num_columns, const SquareLaunch& launch);
// Loads all bodies: left to the first launch, that may have to wait for a kernel that spins.
void load_square();
std::string square_events();
