// tracekern_host.h: writes a segment as tracekern/segment/writer.py does, of kernels that keep their first records.
#include "tracekern_host.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "comm/fault.h"
#include "comm/mutation.h"
#include "platform/simulated_clock.h"
#include "trace/record.h"
#include "trace/segment.h"

using namespace tracekern;  // NOLINT: the functions have C names

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kMaxSamples = 1 << 15;
constexpr int kBrackets = 50;
constexpr uint32_t kShift = 5;  // as on CPU and CUDA
static_assert(SimulatedClock::kResolutionTicks == 1 << kShift);

uint64_t align_up(uint64_t value, uint64_t alignment = kSegmentAlignment) {
    return (value + alignment - 1) / alignment * alignment;
}

std::string text_of(const char* text) {
    return text ? text : "";
}

bool is_utf8(std::string_view text) {
    for (size_t at = 0; at < text.size();) {
        const auto lead = static_cast<unsigned char>(text[at]);
        const size_t length = lead < 0x80 ? 1 : lead >> 5 == 6 ? 2 : lead >> 4 == 14 ? 3 : lead >> 3 == 30 ? 4 : 0;
        if (length == 0 || at + length > text.size()) return false;
        for (size_t next = 1; next < length; ++next) {
            if ((static_cast<unsigned char>(text[at + next]) & 0xc0) != 0x80) return false;
        }
        at += length;
    }
    return true;
}

// A JSON string. Bytes that are not UTF-8 would make the whole segment unreadable.
std::string quote(std::string_view text) {
    std::string quoted = "\"";
    const bool is_text = is_utf8(text);
    for (const char letter : text) {
        const auto byte = static_cast<unsigned char>(letter);
        if (letter == '"' || letter == '\\') quoted += '\\';
        quoted += byte < 0x20 ? ' ' : byte >= 0x80 && !is_text ? '?' : letter;
    }
    return quoted + '"';
}

// A JSON list of the words in `names`.
std::string list(std::string_view names) {
    std::string json;
    while (!names.empty()) {
        const std::string_view word = names.substr(0, names.find(' '));
        if (!word.empty()) json += (json.empty() ? "" : ",") + quote(word);
        names.remove_prefix(std::min(word.size() + 1, names.size()));
    }
    return "[" + json + "]";
}

std::string read_file(const char* path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
}

// As machine_id() of tracekern/host_clock.py.
std::string machine_id() {
    std::string machine = read_file("/proc/sys/kernel/random/boot_id");
    return machine.substr(0, machine.find('\n'));
}

// As host_clock_id() of tracekern/host_clock.py: equal for processes that read one CLOCK_MONOTONIC.
std::string host_clock_id() {
    struct stat found = {};
    stat("/proc/self/ns/time", &found);
    return machine_id().empty() ? "" : "host " + machine_id() + " " + std::to_string(found.st_ino);
}

std::string list_ranks(const tk_host_group& group) {
    std::string ranks;
    for (uint32_t i = 0; i < group.num_ranks; ++i) ranks += (i ? "," : "") + std::to_string(group.ranks[i]);
    return "[" + ranks + "]";
}

// What an event table has of a group as `communicator` (tracekern/dump/event_table.py).
struct Group {
    std::string about;  // name and ranks; "": all of the run
    uint32_t generation = 0;

    static Group of(const tk_host_group* group) {
        if (group == nullptr) return {};
        return {"\"name\":" + quote(text_of(group->name)) + ",\"ranks\":" + list_ranks(*group), group->generation};
    }
    std::string add_to(std::string table) const {
        const std::string end = ",\"communicator\":{" + about + ",\"generation\":" + std::to_string(generation) + "}}";
        return about.empty() ? table : table.replace(table.size() - 1, 1, end);
    }
};

std::string describe_clock(const tk_host_options& options) {
    const bool is_gpu = options.device != nullptr;
    const uint32_t step = is_gpu && options.clock_step ? options.clock_step : 1 << kShift;
    const std::string id = is_gpu ? "GPU " + text_of(options.clock_id) : host_clock_id();
    return "{\"name\":" + quote(is_gpu ? "clock of the GPU" : "CLOCK_MONOTONIC") + ",\"id\":" + quote(id) +
           ",\"ticks_per_second\":1000000000,\"resolution_ticks\":" + std::to_string(step) +
           ",\"shift\":" + std::to_string(kShift) + "}";
}

// What opening_metadata() of tracekern/record/setup.py returns.
std::string opening_metadata(const tk_host_options& options, const std::string& directory, int64_t anchor_ns) {
    char node[256] = {}, created[32] = {};
    gethostname(node, sizeof(node) - 1);
    const std::time_t now = std::time(nullptr);
    std::strftime(created, sizeof(created), "%Y-%m-%dT%H:%M:%S+00:00", std::gmtime(&now));
    std::string command = read_file("/proc/self/cmdline");
    std::replace(command.begin(), command.end(), '\0', ' ');
    const bool is_gpu = options.device != nullptr;
    std::string json = "{\"rank\":" + std::to_string(options.rank) +
                       ",\"num_ranks\":" + std::to_string(options.num_ranks) + ",\"pid\":" + std::to_string(getpid()) +
                       ",\"clock\":" + describe_clock(options) + ",\"settings\":{}";
    const auto add = [&](const char* key, std::string_view text) {
        json += ",\"" + std::string(key) + "\":" + quote(text);
    };
    add("run_id", options.run);
    add("node", node);
    add("machine", machine_id());
    add("created", created);
    add("tracekern", "tracekern_host.h");
    add("backend", is_gpu ? "cuda" : "cpu");
    add("device", is_gpu ? options.device : "CPU");
    add("note", is_gpu ? "" : "CPU backend: order and coverage, never GPU durations");
    add("keep", "first");
    add("directory", directory);
    add("command", command);
    json += ",\"host_time\":{\"id\":" + quote(host_clock_id()) + ",\"anchor_ns\":" + std::to_string(anchor_ns) + "}";
    const std::string of_group = options.group ? ",\"world_ranks\":" + list_ranks(*options.group) +
                                                     ",\"communicator\":" + quote(text_of(options.group->name))
                                               : "";
    std::string channels;
    for (const char* name : kCommChannelNames) channels += (channels.empty() ? "" : " ") + std::string(name);
    return json + ",\"fault_names\":{\"channels\":" + list(channels) +
           ",\"kernels\":[{\"first_stage\":0,\"stages\":" + list(text_of(options.stages)) +
           ",\"channels\":" + list(text_of(options.channels)) + "}]" + of_group + "}}";
}

// Why this is no group of the rank; "" where it is one, or none is given.
std::string wrong_group(const tk_host_group* group, const tk_host_options& options) {
    if (group == nullptr) return "";
    const std::set<uint32_t> known(group->ranks, group->ranks + group->num_ranks);
    const bool is_group = known.size() == group->num_ranks && known.count(options.rank) != 0 &&
                          *known.rbegin() < options.num_ranks && is_utf8(text_of(group->name));
    return is_group ? ""
                    : "group " + list_ranks(*group) + "; wanted ranks below " + std::to_string(options.num_ranks) +
                          ", each once, " + std::to_string(options.rank) + " among them";
}

// Throws what tk_host_error() then says.
void require(bool is_right, const std::string& line) {
    if (!is_right) throw std::runtime_error(line);
}

tk_host_options check(const tk_host_options* given) {
    require(given, "options are NULL");
    tk_host_options options = *given;
    if (options.num_ranks == 0) options.num_ranks = 1;
    if (options.max_bytes == 0) options.max_bytes = 64 << 20;
    if (options.records_per_track == 0) options.records_per_track = 1024;
    if (options.max_launches == 0) options.max_launches = 4096;
    const std::string run = text_of(options.run);
    const bool is_name = std::all_of(run.begin(), run.end(), [](unsigned char letter) {
        return std::isalnum(letter) || letter == '-' || letter == '_';
    });
    require(is_name && !run.empty() && run.size() <= 200,
            "run " + quote(run) + "; wanted at most 200 letters, digits, '-' and '_'");
    const std::string directory = text_of(options.directory);
    require(!directory.empty() && is_utf8(directory), "directory " + quote(directory) + "; wanted that of the capture");
    require(
        options.rank < options.num_ranks,
        "rank " + std::to_string(options.rank) + " of " + std::to_string(options.num_ranks) + "; wanted a rank below");
    const std::string wrong = wrong_group(options.group, options);
    require(wrong.empty(), wrong);
    require(options.max_bytes >> 40 == 0, "max_bytes " + std::to_string(options.max_bytes) + "; wanted less than 2^40");
    return options;
}

// Dumps of another run are not replaced: they may tell of a fault. All ranks refuse, whosever they are.
std::string find_directory(const tk_host_options& options) {
    const auto directory = std::filesystem::weakly_canonical(std::filesystem::absolute(options.directory));
    std::error_code none;
    for (const auto& found : std::filesystem::directory_iterator(directory, none)) {
        require(found.path().extension() != ".tkdump",
                directory.string() + ": has a " + found.path().filename().string() +
                    " of another run; choose another directory, or remove this one");
    }
    return directory.string();
}

// The owner's lock (tracekern/segment/file_lock.py): until it is closed the rank records. -1: cannot be had.
int own(const std::string& path) {
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    const bool is_locked = fcntl(file, F_OFD_SETLK, &lock) == 0 || fcntl(file, F_SETLK, &lock) == 0;
    return is_locked ? file : -1;
}

// What host time is ahead of CLOCK_MONOTONIC, within +-doubt_ns, as Anchor of tracekern/host_clock.py.
struct Anchor {
    int64_t ns = 0, doubt_ns = INT64_MAX;

    // Reads both clocks, some times, of which the fastest counts.
    static Anchor read() {
        Anchor best;
        for (int i = 0; i < 20; ++i) {
            const int64_t before = monotonic_ns(), wall = host_clock_ns(CLOCK_REALTIME), after = monotonic_ns();
            const int64_t doubt = (after - before) / 2 + 1;
            if (doubt < best.doubt_ns) best = {wall - (before + after) / 2, doubt};
        }
        return best;
    }
};

thread_local std::string last_error;

}  // namespace

struct tk_host {
    explicit tk_host(const tk_host_options* given)
        : options_(check(given)), is_gpu_(options_.device != nullptr), group_(Group::of(options_.group)) {
        const std::string metadata = opening_metadata(options_, find_directory(options_), anchor_.ns);
        SegmentHeader header = {};
        header.pid = static_cast<uint32_t>(getpid());
        header.state = static_cast<uint32_t>(SegmentState::open);
        header.metadata_offset = sizeof(header);
        header.metadata_bytes = metadata.size();
        header.launches_offset = align_up(header.metadata_offset + metadata.size(), kPage);
        header.launches_capacity = options_.max_launches;
        header.samples_offset =
            align_up(header.launches_offset + header.launches_capacity * sizeof(LaunchEntry), kPage);
        header.samples_capacity = kMaxSamples;
        header.host_offset = align_up(header.samples_offset + kMaxSamples * sizeof(ClockSample), kPage);
        header.arena_offset = header.fault_offset = header.host_offset;  // no room for spans of the host
        header.arena_bytes = align_up(options_.max_bytes, kPage);
        header.arena_cursor = header.fault_bytes = sizeof(FaultRecord);
        header.total_bytes = header.arena_offset + header.arena_bytes;
        const std::string name = "tracekern-" + std::string(options_.run) + "-" + std::to_string(options_.rank);
        const std::string unfinished = "/dev/shm/." + name + "." + std::to_string(getpid());
        map(unfinished, header);
        std::memcpy(memory_ + header.metadata_offset, metadata.data(), metadata.size());
        place<FaultRecord>(header.fault_offset)->version = kFaultVersion;
        std::memcpy(memory_, &header, sizeof(header));
        std::memcpy(memory_, kSegmentMagic, sizeof(header.magic));
        publish(unfinished, "/dev/shm/" + name);
        sample_host_clock(0);
    }
    ~tk_host() {
        sample_host_clock(1);
        header().state = static_cast<uint32_t>(SegmentState::closed);
        munmap(memory_, header().total_bytes);
        ::close(lock_);
    }
    tk_host(const tk_host&) = delete;

    uint64_t launch(const tk_host_kernel& kernel, uint32_t epoch) {
        const std::lock_guard<std::mutex> guard(mutex_);
        const std::string wrong = find_wrong(kernel);
        if (!wrong.empty()) {
            std::fprintf(stderr, "tk_host_launch: %s; it runs unrecorded\n", wrong.c_str());
            header().failed = 1;
            ++header().launches_refused;
            return 0;
        }
        const uint64_t num_tracks = uint64_t{kernel.blocks} * kernel.warps;
        const uint64_t headers_bytes = sizeof(LaunchDescriptor) + num_tracks * sizeof(TrackHeader);
        const uint64_t bytes = headers_bytes + align_up(num_tracks * options_.records_per_track * sizeof(WideRecord));
        const Group group = kernel.group ? Group::of(kernel.group) : group_;
        const Text events = store(group.add_to(text_of(kernel.events))), roles = store(list(text_of(kernel.roles)));
        const bool has_entry = header().num_launches < header().launches_capacity &&
                               launches_.reach(lock_, (header().num_launches + 1) * sizeof(LaunchEntry));
        const uint64_t at = has_entry && events.offset && roles.offset ? allocate_region(bytes) : 0;
        if (at == 0) {
            ++header().launches_refused;
            header().refused_bytes += bytes;
            return 0;
        }
        auto* descriptor = new (memory_ + at) LaunchDescriptor{};
        descriptor->region = {place<TrackHeader>(at + sizeof(LaunchDescriptor)), place<WideRecord>(at + headers_bytes)};
        auto* entry = place<LaunchEntry>(header().launches_offset) + header().num_launches;
        entry->headers_offset = at + sizeof(LaunchDescriptor);
        entry->records_offset = at + headers_bytes;
        entry->num_tracks = static_cast<uint32_t>(num_tracks);
        entry->events_offset = events.offset;
        entry->events_bytes = events.bytes;
        entry->roles_offset = roles.offset;
        entry->roles_bytes = roles.bytes;
        select_all(*descriptor, kernel);
        select_all(*entry, kernel);
        name(*entry, kernel, group, epoch);
        // Last: who reads the segment from outside finds no half-written entry.
        __atomic_store_n(&header().num_launches, header().num_launches + 1, __ATOMIC_RELEASE);
        return reinterpret_cast<uint64_t>(descriptor) | static_cast<uint64_t>(RecordFormat::span);
    }

    void add(SampleKind kind, uint32_t round, uint32_t initiator, uint32_t responder, const int64_t (&times)[4]) {
        const std::lock_guard<std::mutex> guard(mutex_);
        const bool has_room = header().num_samples < header().samples_capacity &&
                              samples_.reach(lock_, (header().num_samples + 1) * sizeof(ClockSample));
        if (!has_room) {
            ++header().samples_lost;
            return;
        }
        auto* sample = place<ClockSample>(header().samples_offset) + header().num_samples;
        const auto from = static_cast<int32_t>(initiator), to = static_cast<int32_t>(responder);
        *sample = {static_cast<uint32_t>(kind), round, from, to, times[0], times[1], times[2], times[3]};
        __atomic_store_n(&header().num_samples, header().num_samples + 1, __ATOMIC_RELEASE);
    }

    // All of the arena; nullptr where /dev/shm has no room for it.
    void* whole_arena() {
        const std::lock_guard<std::mutex> guard(mutex_);
        return arena_.reach(lock_, header().arena_bytes) ? place<char>(header().arena_offset) : nullptr;
    }
    // The device's clock, read between two readings of CLOCK_MONOTONIC. Ranks of one machine share host time, but for
    // the doubt of their anchors.
    void add_bracket(uint32_t round, uint32_t rank, int64_t before, int64_t ticks, int64_t after) {
        const int64_t least = before + anchor_.ns - anchor_.doubt_ns, most = after + anchor_.ns + anchor_.doubt_ns;
        add(SampleKind::host_bracket, round, rank, rank, {least, ticks, ticks, most});
    }
    SegmentHeader& header() { return *place<SegmentHeader>(0); }
    template <class T>
    T* place(uint64_t offset) {
        return reinterpret_cast<T*>(memory_ + offset);
    }

private:
    struct Text {
        uint64_t offset;  // 0: found no room
        uint32_t bytes;
    };

    // A part of the file that grows: a store to a page that a full /dev/shm cannot give would end the process.
    class Part {
    public:
        Part() = default;
        Part(uint64_t offset, uint64_t bytes) : offset_(offset), bytes_(bytes) {}

        // Whether the pages of its first `bytes` are there now. Some more are taken with them, where there is room.
        bool reach(int file, uint64_t bytes) {
            for (const uint64_t upto : {std::min(bytes + kAtOnce, bytes_), bytes}) {
                if (bytes <= reached_) return true;
                if (posix_fallocate(file, offset_ + reached_, upto - reached_) == 0) reached_ = upto;
            }
            return bytes <= reached_;
        }

    private:
        static constexpr uint64_t kAtOnce = 1 << 18;

        uint64_t offset_ = 0, bytes_ = 0, reached_ = 0;
    };

    // Makes the segment's file, as large as it may become.
    void map(const std::string& path, const SegmentHeader& header) {
        unlink(path.c_str());  // of a process that had this number, and died here
        const int file = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        require(file >= 0, path + ": " + std::strerror(errno));
        launches_ = {header.launches_offset, header.launches_capacity * sizeof(LaunchEntry)};
        samples_ = {header.samples_offset, header.samples_capacity * sizeof(ClockSample)};
        arena_ = {header.arena_offset, header.arena_bytes};
        const auto size = static_cast<off_t>(header.total_bytes);
        int problem = ftruncate(file, size) ? errno : posix_fallocate(file, 0, header.launches_offset);
        if (problem == 0 && !arena_.reach(file, header.arena_cursor)) problem = ENOSPC;
        void* memory = problem ? MAP_FAILED : mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        ::close(file);
        if (memory == MAP_FAILED) unlink(path.c_str());
        require(memory != MAP_FAILED,
                path + ": no room (" + std::strerror(problem ? problem : errno) + "); make /dev/shm larger");
        memory_ = static_cast<char*>(memory);
    }

    // Gives the segment its name. It has its owner by then: nobody takes it for one that a dead rank left.
    void publish(const std::string& unfinished, const std::string& path) {
        lock_ = own(unfinished);
        const bool is_published = lock_ >= 0 && link(unfinished.c_str(), path.c_str()) == 0;
        const std::string why = path + ": " + std::strerror(errno);
        unlink(unfinished.c_str());
        require(is_published, why + (lock_ < 0 ? "" : "; each run needs a name that none had before"));
    }

    std::string find_wrong(const tk_host_kernel& kernel) const {
        const std::string name = text_of(kernel.name), events = text_of(kernel.events);
        const std::string what = "launch " + quote(name) + ": ";
        if (name.empty() || name.size() >= sizeof(LaunchEntry::name) || !is_utf8(name)) {
            return what + "wanted a name of at most 95 bytes";
        }
        if (kernel.blocks == 0 || kernel.blocks >> 31 || kernel.warps == 0 || kernel.warps >> 16) {
            return what + std::to_string(kernel.blocks) + " blocks of " + std::to_string(kernel.warps) + " warps";
        }
        const bool is_table = events.rfind("{\"name\":", 0) == 0 && events.back() == '}' && is_utf8(events);
        if (!is_table) return what + "events are not what describe_events() returns";
        const std::string wrong = wrong_group(kernel.group, options_);
        return wrong.empty() ? "" : what + wrong;
    }

    // Offset of so many bytes of the arena; 0: no room.
    uint64_t allocate(uint64_t bytes) {
        const uint64_t at = header().arena_cursor;
        if (align_up(bytes) > header().arena_bytes - at || !arena_.reach(lock_, at + align_up(bytes))) return 0;
        header().arena_cursor = at + align_up(bytes);
        return header().arena_offset + at;
    }
    // The same, clear of multiples of 4 GiB: kernels count up the low word of an address only.
    uint64_t allocate_region(uint64_t bytes) {
        const uint64_t next = reinterpret_cast<uint64_t>(memory_) + header().arena_offset + header().arena_cursor;
        const uint64_t left = kCarryBytes - next % kCarryBytes;
        const bool crosses = bytes + kSegmentAlignment > left && bytes + kSegmentAlignment <= kCarryBytes;
        return crosses && !allocate(left) ? 0 : allocate(bytes);
    }
    Text store(const std::string& text) {
        const auto found = texts_.find(text);
        if (found != texts_.end()) return found->second;
        const uint64_t at = allocate(text.size());
        if (at == 0) return {};
        std::memcpy(memory_ + at, text.data(), text.size());
        return texts_[text] = {at, static_cast<uint32_t>(text.size())};
    }

    // What descriptor and entry have in common: all blocks, roles and events.
    template <class T>
    void select_all(T& launch, const tk_host_kernel& kernel) const {
        launch.num_blocks = launch.block_stop = kernel.blocks;
        launch.block_step = 1;
        launch.warps_per_block = static_cast<uint16_t>(kernel.warps);
        launch.records_per_track = options_.records_per_track;
        launch.event_mask = ~uint64_t{0};
        launch.role_mask = ~uint32_t{0};
    }
    // Launches of a name are counted by group, whichever of its communicators they are of.
    void name(LaunchEntry& entry, const tk_host_kernel& kernel, const Group& group, uint32_t epoch) {
        const std::string key = text_of(kernel.key);
        std::strncpy(entry.name, kernel.name, sizeof(entry.name) - 1);
        std::strncpy(entry.key, is_utf8(key) ? key.c_str() : "", sizeof(entry.key) - 1);
        entry.stream = kernel.stream;
        entry.epoch = epoch;
        entry.sequence = num_launches_[{kernel.name, group.about}]++;
        entry.launch_idx = entry.order = static_cast<uint32_t>(header().num_launches);
        entry.host_ns = static_cast<uint64_t>(monotonic_ns() + anchor_.ns);
    }

    void sample_host_clock(uint32_t round) {
        const SimulatedClock clock;
        for (int i = 0; i < kBrackets && !is_gpu_; ++i) {
            const int64_t before = monotonic_ns(), ticks = static_cast<int64_t>(clock.read());
            add_bracket(round, options_.rank, before, ticks, monotonic_ns());
        }
    }

    const tk_host_options options_;  // what it points to is read while it opens only
    const bool is_gpu_;
    const Group group_;
    const Anchor anchor_ = Anchor::read();
    char* memory_ = nullptr;
    int lock_ = -1;  // the file, open as long as this is its owner
    Part launches_, samples_, arena_;
    std::mutex mutex_;
    std::map<std::string, Text> texts_;
    std::map<std::pair<std::string, std::string>, uint32_t> num_launches_;
};

extern "C" {

tk_host* tk_host_open(const tk_host_options* options) {
    try {
        return new tk_host(options);
    } catch (const std::exception& error) {
        last_error = std::string("tk_host_open: ") + error.what();
        return nullptr;
    }
}

uint64_t tk_host_launch(tk_host* host, const tk_host_kernel* kernel, uint32_t epoch) {
    return host ? host->launch(*kernel, epoch) : 0;
}

void* tk_host_memory(tk_host* host, uint64_t* num_bytes) {
    void* memory = host ? host->whole_arena() : nullptr;
    *num_bytes = memory ? host->header().arena_bytes : 0;
    return memory;
}

void* tk_host_fault(tk_host* host) {
    return host ? host->place<char>(host->header().fault_offset) : nullptr;
}

void tk_host_clock_sample(tk_host* host,
                          uint32_t round,
                          uint32_t initiator,
                          uint32_t responder,
                          int64_t t0,
                          int64_t t1,
                          int64_t t2,
                          int64_t t3) {
    if (host && initiator == responder) {
        host->add_bracket(round, initiator, t0, t1, t3);
    } else if (host) {
        host->add(SampleKind::ping_pong, round, initiator, responder, {t0, t1, t2, t3});
    }
}

void tk_host_close(tk_host* host) {
    delete host;
}

const char* tk_host_error(void) {
    return last_error.c_str();
}
}
