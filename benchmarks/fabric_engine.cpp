// The engine's side of benchmarks/fabric.py, without Python: the same writes through csrc/fabric.
#include <semaphore>

#include "fabric/engine.hpp"
#include "fabric_roles.hpp"

namespace {

using namespace tracekern;

#ifdef TRACED
// What a capture reserves for an engine of one domain; room for all that a run records.
class Tracks {
public:
    Tracks() : headers_(kNumTracks), records_(kNumTracks * kRecords) {
        launch_.region = {headers_.data(), records_.data()};
        launch_.event_mask = ~uint64_t{0};
        launch_.records_per_track = kRecords;
        launch_.warps_per_block = kNumTracks;
        launch_.block_stop = launch_.block_step = launch_.num_blocks = 1;
        launch_.role_mask = ~0u;
    }
    TraceChoice descriptor() const { return {&launch_, RecordFormat::span}; }

private:
    static constexpr uint32_t kNumTracks = static_cast<uint32_t>(EngineTrack::first_domain) + 1;
    static constexpr uint32_t kRecords = 1 << 18;
    std::vector<TrackHeader> headers_;
    std::vector<WideRecord> records_;
    LaunchDescriptor launch_{};
};
#endif

class EngineSide {
public:
    EngineSide(const roles::Settings& settings, roles::Channel& channel, char* memory)
        : settings_(settings), engine_(std::make_shared<FabricLibrary>(settings.library), options(settings)) {
        region_ = engine_.register_memory(reinterpret_cast<uint64_t>(memory), roles::kMemoryBytes, nullptr);
        channel.put(pack(engine_.describe(region_)));
        peer_ = unpack_descriptor(channel.get());
        arrivals_ = engine_.imms().make_counter(kImm);
#ifdef TRACED
        engine_.start_trace(tracks_.descriptor());
#endif
    }

    void write(uint64_t count) { settings_.shape == "paged" ? write_pages(count) : write_singles(count); }
    void receive(uint64_t count) { wait_for_imms(count); }
    std::vector<double> ping(uint64_t count) {
        std::vector<double> half;
        for (uint64_t i = 0; i < count; ++i) {
            const double began = roles::now();
            submit(0, {});
            wait_for_imms(1);
            half.push_back((roles::now() - began) / 2);
        }
        return half;
    }
    void pong(uint64_t count) {
        for (uint64_t i = 0; i < count; ++i) {
            wait_for_imms(1);
            submit(0, {});
        }
    }
    void wait_for(roles::Channel& channel) { channel.get(); }

private:
    static constexpr uint32_t kImm = 1;

    static EngineOptions options(const roles::Settings& settings) {
        EngineOptions options;
        options.nets = {{settings.provider, settings.source, "", 0}};
        options.connect_limit = std::chrono::seconds(10);
        options.transfer_limit = std::chrono::seconds(60);
        return options;
    }
    static void require(const Result& result) {
        if (result.outcome != Outcome::done) throw std::runtime_error(result.why);
    }

    void submit(uint64_t offset, OnDone on_done) {
        engine_.submit_write(region_, offset, settings_.bytes, peer_, offset, kImm, {}, {}, std::move(on_done));
    }
    void write_singles(uint64_t count) {
        std::counting_semaphore<> room(static_cast<ptrdiff_t>(settings_.window));
        const OnDone::Callback on_done = [&](const Result& result) {
            require(result);
            room.release();
        };
        for (uint64_t i = 0; i < count; ++i) {
            room.acquire();
            submit(roles::offset_of(i, settings_.bytes), on_done);
        }
        for (uint64_t i = 0; i < settings_.window; ++i) room.acquire();
    }
    // In requests of all the memory, of which a second one is there before the first has ended.
    void write_pages(uint64_t count) {
        const uint64_t in_one = roles::kMemoryBytes / settings_.bytes;
        PageList pages{{}, settings_.bytes, 0};
        for (uint64_t i = 0; i < in_one; ++i) pages.indices.push_back(i);
        std::counting_semaphore<> room(2);
        const OnDone::Callback on_done = [&](const Result& result) {
            require(result);
            room.release();
        };
        for (uint64_t i = 0; i < count; i += in_one) {
            room.acquire();
            engine_.submit_paged_writes(region_, pages, peer_, pages, settings_.bytes, kImm, {}, {}, on_done);
        }
        for (int i = 0; i < 2; ++i) room.acquire();
    }
    void wait_for_imms(uint64_t count) {
        if (!arrivals_->wait(count, std::chrono::seconds(60))) throw std::runtime_error("immediates are missing");
    }

    const roles::Settings& settings_;
#ifdef TRACED
    Tracks tracks_;
#endif
    TransferEngine engine_;
    uint64_t region_ = 0;
    MemoryRegionDescriptor peer_{};
    std::shared_ptr<ImmCounter> arrivals_;
};

}  // namespace

int main(int argc, char** argv) {
    return roles::run<EngineSide>(argc, argv);
}
