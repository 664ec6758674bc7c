// The conversions of platform/number.h over a pipe: reads floats from stdin and writes, for each, its half, bfloat16
// and fp8 bits, 16 each; then the floats of all 65536 halves, of all 65536 bfloat16 patterns and of all 256 of fp8.
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
        narrow.push_back(float_to_fp8(x).bits);
    }
    write_all(narrow);
    std::vector<float> wide;
    for (uint32_t bits = 0; bits < 65536; ++bits) wide.push_back(half_to_float({static_cast<uint16_t>(bits)}));
    for (uint32_t bits = 0; bits < 65536; ++bits) wide.push_back(bfloat16_to_float({static_cast<uint16_t>(bits)}));
    for (uint32_t bits = 0; bits < 256; ++bits) wide.push_back(fp8_to_float({static_cast<uint8_t>(bits)}));
    write_all(wide);
    return 0;
}
