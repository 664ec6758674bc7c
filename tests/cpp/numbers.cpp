// The 16-bit conversions of platform/number.h over a pipe: reads floats from stdin and writes, for each, its half and
// its bfloat16 bits; then the floats of all 65536 halves and of all 65536 bfloat16 patterns.
#include <cstdio>
#include <vector>

#include "platform/number.h"

using namespace tracekern;

namespace {

template <class T>
void write_all(const std::vector<T>& values) {
    std::fwrite(values.data(), sizeof(T), values.size(), stdout);
}

}  // namespace

int main() {
    std::vector<uint16_t> narrow;
    float x;
    while (std::fread(&x, sizeof(x), 1, stdin) == 1) {
        narrow.push_back(float_to_half(x).bits);
        narrow.push_back(float_to_bfloat16(x).bits);
    }
    write_all(narrow);
    std::vector<float> wide;
    for (uint32_t bits = 0; bits < 65536; ++bits) wide.push_back(half_to_float({static_cast<uint16_t>(bits)}));
    for (uint32_t bits = 0; bits < 65536; ++bits) wide.push_back(bfloat16_to_float({static_cast<uint16_t>(bits)}));
    write_all(wide);
    return 0;
}
