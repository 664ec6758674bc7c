// The bytes that engines tell each other, damaged, and read under the sanitizers.
//
//   fabric_fuzz COUNT SEED
//
// What is read is as it was when it is written again; all else is refused with std::invalid_argument, in one line.
// Exit: 0 so it was; 1 not; 2 usage.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "fabric/messages.hpp"

using namespace tracekern;

namespace {

constexpr uint64_t kBounds[] = {0, 1, 255, 256, 257, 8000, 8001, ~uint32_t{0}, uint64_t{1} << 63, ~uint64_t{0}};

[[noreturn]] void fail(const std::string& what) {
    fprintf(stderr, "fabric_fuzz: %s\n", what.c_str());
    exit(1);
}

class Damage {
public:
    explicit Damage(uint32_t seed) : random_(seed) {}

    size_t below(size_t end) { return random_() % end; }
    // One of them, most often in several places: changed, cut out, doubled, or replaced by a number at a bound.
    std::string one_of(const std::vector<std::string>& whole) {
        std::string made = whole[below(whole.size())];
        for (size_t times = below(4); times > 0; --times) {
            const size_t at = below(made.size() + 1), size = below(24);
            const std::string part = made.substr(at, size);
            const uint64_t bound = kBounds[below(std::size(kBounds))];
            switch (below(6)) {
                case 0:
                    made.erase(at, size);
                    break;
                case 1:
                    made.insert(at, part);
                    break;
                case 2:
                    made.resize(at);
                    break;
                case 3:
                    made.insert(at, whole[below(whole.size())], 0, 1 + below(200));
                    break;
                case 4:
                    made.replace(at, std::min(made.size() - at, sizeof(bound)), Packer().number(bound).take());
                    break;
                default:
                    if (at < made.size()) made[at] = static_cast<char>(made[at] ^ 1 << below(8));
            }
        }
        return made;
    }

private:
    std::mt19937 random_;
};

// Whether it was taken. In memory of its own size: a byte read beyond it is noticed.
template <class Unpack>
bool is_taken(const std::string& bytes, Unpack unpack) {
    const std::unique_ptr<char[]> exact(new char[bytes.size()]);
    std::copy(bytes.begin(), bytes.end(), exact.get());
    try {
        if (pack(unpack(std::string_view(exact.get(), bytes.size()))) != bytes) fail("what was read has changed");
        return true;
    } catch (const std::invalid_argument& error) {
        const std::string_view said = error.what();
        if (said.empty() || said.find('\n') != said.npos) fail("not one line: " + std::string(said));
        return false;
    }
}

std::vector<std::string> whole_descriptors() {
    std::vector<std::string> packed;
    for (uint32_t domains = 1; domains <= kMaxDomains; ++domains) {
        MemoryRegionDescriptor descriptor{7 + domains, 11, 3, 1 << 20, {}};
        for (uint32_t i = 0; i < domains; ++i) descriptor.ways.push_back({{std::string(16 * i + 1, 'a')}, i, ~i});
        packed.push_back(pack(descriptor));
    }
    return packed;
}
std::vector<std::string> whole_messages() {
    std::vector<std::string> packed;
    for (uint32_t kind = 1; kind <= static_cast<uint32_t>(MessageKind::tell_time); ++kind) {
        Message message{static_cast<MessageKind>(kind), 7, 8, 9, 10, 11, 12, 13};
        message.text = whole_descriptors()[kind % kMaxDomains];
        for (uint32_t i = 0; i < kind % (kMaxDomains + 1); ++i) message.addresses.push_back({std::string(i + 1, 'b')});
        if (message.kind == MessageKind::payload) message.payload = message.text;
        packed.push_back(pack(message));
    }
    return packed;
}

template <class Unpack>
void fuzz(const std::vector<std::string>& whole, uint32_t count, Damage& damage, Unpack unpack) {
    uint32_t num_taken = 0;
    for (const std::string& one : whole) {
        if (!is_taken(one, unpack)) fail("one that is whole was refused");
    }
    for (uint32_t i = 0; i < count; ++i) num_taken += is_taken(damage.one_of(whole), unpack);
    if (num_taken < count / 10 || num_taken > count - count / 10) fail(std::to_string(num_taken) + " were taken");
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        fprintf(stderr, "fabric_fuzz COUNT SEED\n");
        return 2;
    }
    const uint32_t count = std::stoul(argv[1]);
    Damage damage(std::stoul(argv[2]));
    fuzz(whole_descriptors(), count, damage, unpack_descriptor);
    fuzz(whole_messages(), count, damage, unpack_message);
    printf("ok\n");
    return 0;
}
