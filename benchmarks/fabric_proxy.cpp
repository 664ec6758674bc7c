// benchmarks/nodes.py: the same writes as fabric_raw.cpp, asked for in a ring of commands and written by a proxy
// (csrc/fabric/proxy.hpp). One thread a process fills places of the ring and runs the proxy's turns.
#include <cstring>

#include "comm/command.h"
#include "fabric/proxy.hpp"
#include "fabric_roles.hpp"

namespace {

using namespace tracekern;

class ProxySide {
public:
    ProxySide(const roles::Settings& settings, roles::Channel& channel, char* memory)
        : settings_(settings),
          library_(settings.library),
          commands_(kNumCommands),
          comm_(args_of_rank(settings.is_source ? 0 : 1, 2)),
          proxy_(library_,
                 {settings.provider, settings.source, "", 0},
                 with_control(comm_),
                 ring_,
                 {memory, roles::kMemoryBytes},
                 static_cast<uint32_t>(settings.window)) {
        std::memset(memory, memory[sizeof(HeapControl)], sizeof(HeapControl));  // the proxy has set its own words there
        proxy_.reset([this](uint32_t, const Immediate&) {
            ++arrived_;
            return true;
        });
        const ProxyAddress own = proxy_.address();
        const roles::Place theirs = roles::swap_places(channel, {own.domain.bytes, own.key, own.base});
        proxy_.meet(1 - comm_.rank, {{theirs.address}, theirs.key, theirs.base, 0});
    }

    void write(uint64_t count) {
        const uint64_t until = num_completed_[kTag] + count;
        for (uint64_t i = 0; i < count; ++i) post(roles::offset_of(i, settings_.bytes));
        while (num_completed_[kTag] < until) proxy_.turn();
    }
    void receive(uint64_t count) {
        while (arrived_ < count) proxy_.turn();
    }
    std::vector<double> ping(uint64_t count) {
        std::vector<double> half;
        for (uint64_t i = 0; i < count; ++i) {
            const double began = roles::now();
            const uint64_t until = arrived_ + 1;
            post(0);
            while (arrived_ < until) proxy_.turn();
            half.push_back((roles::now() - began) / 2);
        }
        return half;
    }
    void pong(uint64_t count) {
        for (uint64_t i = 1; i <= count; ++i) {
            while (arrived_ < i) proxy_.turn();
            post(0);
        }
    }
    void wait_for(roles::Channel& channel) {
        while (!channel.has_something()) proxy_.turn();
        channel.get();
    }

private:
    static constexpr uint32_t kNumCommands = 1024;
    static constexpr uint8_t kTag = 1;

    const CommArgs& with_control(CommArgs& comm) {
        comm.heap[comm.rank] = reinterpret_cast<char*>(&control_);
        comm.fault = &fault_;
        return comm;
    }
    void post(uint64_t offset) {
        const uint64_t place = claim_place(ring_);
        while (!has_room(ring_, place)) proxy_.turn();
        Command command{};
        command.imm = pack_immediate({.kind = PutKind::message});
        command.bytes = static_cast<uint32_t>(settings_.bytes);
        command.peer = static_cast<uint16_t>(1 - comm_.rank);
        command.tag = kTag;
        command.src = command.dst = offset;
        fill_place(ring_, place, command);
    }

    const roles::Settings& settings_;
    const FabricLibrary library_;
    std::vector<Command> commands_;
    uint64_t num_claimed_ = 0, num_seen_ = 0, num_taken_ = 0, num_completed_[kNumTags] = {};
    CommandRing ring_{commands_.data(), kNumCommands, &num_claimed_, &num_seen_, &num_taken_, num_completed_};
    HeapControl control_{};
    FaultRecord fault_{};
    CommArgs comm_;
    Proxy proxy_;
    uint64_t arrived_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    return roles::run<ProxySide>(argc, argv);
}
