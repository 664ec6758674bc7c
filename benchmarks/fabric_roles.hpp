// What the two programs of benchmarks/fabric.py share: two processes, a core each, that do one exchange and say how
// long it took.
#pragma once

#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

namespace roles {

constexpr uint64_t kMemoryBytes = 64 << 20;  // cycled through, so that it stands in no cache
constexpr char kSent = 0x5a;

struct Settings {
    std::string library;           // libfabric's path, "": where the loader finds it
    std::string provider, source;  // of the network
    std::string shape;             // single, paged, small, ping
    uint64_t bytes;                // of a write
    uint64_t count;                // of the writes that are timed
    uint64_t window;               // writes under way at most
    bool is_source = false;
};

// Each side's end of a pipe to the other.
class Channel {
public:
    explicit Channel(int socket) : socket_(socket) {}

    void put(const std::string& bytes) {
        const uint64_t size = bytes.size();
        if (write(socket_, &size, sizeof(size)) != sizeof(size) || write(socket_, bytes.data(), size) != ssize_t(size))
            throw std::runtime_error("the other side has ended");
    }
    std::string get() {
        uint64_t size = 0;
        take(&size, sizeof(size));
        std::string bytes(size, '\0');
        take(bytes.data(), size);
        return bytes;
    }
    // The other side's put() may be waited for while work goes on.
    bool has_something() {
        char byte;
        return recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 1;
    }

private:
    void take(void* at, size_t size) {
        if (size && recv(socket_, at, size, MSG_WAITALL) != ssize_t(size))
            throw std::runtime_error("the other side has ended");
    }

    int socket_;
};

// Where a side's memory is, for the other side.
struct Place {
    std::string address;
    uint64_t key, base;
};
// Tells the other side this one's place; returns the other's.
inline Place swap_places(Channel& channel, const Place& own) {
    channel.put(own.address);
    const uint64_t numbers[2] = {own.key, own.base};
    channel.put({reinterpret_cast<const char*>(numbers), sizeof(numbers)});
    Place theirs{channel.get(), 0, 0};
    const std::string told = channel.get();
    std::memcpy(&theirs.key, told.data(), sizeof(theirs.key));
    std::memcpy(&theirs.base, told.data() + sizeof(theirs.key), sizeof(theirs.base));
    return theirs;
}

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline char* map_memory(char fill) {
    void* at = mmap(nullptr, kMemoryBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::runtime_error("no memory");
    return static_cast<char*>(std::memset(at, fill, kMemoryBytes));
}

inline void pin(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core % sysconf(_SC_NPROCESSORS_ONLN), &cores);
    sched_setaffinity(0, sizeof(cores), &cores);
}

inline uint64_t offset_of(uint64_t write, uint64_t bytes) {
    return write % (kMemoryBytes / bytes) * bytes;
}

// Writes that come before those that are timed: each connection made, and of all but small writes each page touched.
inline uint64_t count_warm_up(const Settings& settings) {
    return settings.shape == "ping" || settings.shape == "small" ? 2000 : kMemoryBytes / settings.bytes;
}

// Seconds of `count` copies inside this process.
inline double time_copies(const Settings& settings) {
    char *from = map_memory(kSent), *to = map_memory(0);
    const double began = now();
    for (uint64_t i = 0; i < settings.count; ++i) {
        const uint64_t at = offset_of(i, settings.bytes);
        std::memcpy(to + at, from + at, settings.bytes);
    }
    return now() - began;
}

// Side: write(count) until they are done; receive(count); ping(count), half round trips in seconds; pong(count);
// wait_for(channel), until the other side puts something.
template <class Side>
void run_source(const Settings& settings, Channel& channel) {
    Side side(settings, channel, map_memory(kSent));
    if (settings.shape == "ping") {
        side.ping(count_warm_up(settings));
        std::vector<double> half = side.ping(settings.count);
        std::sort(half.begin(), half.end());
        std::printf(
            "{\"p50_us\": %.4f, \"p99_us\": %.4f}\n", half[half.size() / 2] * 1e6, half[half.size() * 99 / 100] * 1e6);
    } else {
        side.write(count_warm_up(settings));
        const double began = now();
        side.write(settings.count);
        const double seconds = now() - began;
        std::printf("{\"gb_per_s\": %.7f}\n", double(settings.bytes * settings.count) / seconds / 1e9);
    }
    std::fflush(stdout);
    channel.put("done");
    side.wait_for(channel);
}

template <class Side>
void run_target(const Settings& settings, Channel& channel) {
    char* memory = map_memory(0);
    Side side(settings, channel, memory);
    const uint64_t count = count_warm_up(settings) + settings.count;
    if (settings.shape == "ping") {
        side.pong(count);
    } else {
        side.receive(count);
        if (settings.shape != "small" && std::count(memory, memory + kMemoryBytes, kSent) != kMemoryBytes)
            throw std::runtime_error("not every byte has arrived");
    }
    side.wait_for(channel);
    channel.put("done");
}

template <class Side>
int run(int argc, char** argv) {
    if (argc != 8) {
        std::fprintf(stderr, "usage: %s LIBRARY PROVIDER SOURCE SHAPE BYTES COUNT WINDOW\n", argv[0]);
        return 2;
    }
    Settings settings{
        argv[1], argv[2], argv[3], argv[4], std::stoull(argv[5]), std::stoull(argv[6]), std::stoull(argv[7])};
    if (settings.shape == "copy") {
        pin(0);
        std::printf("{\"gb_per_s\": %.7f}\n", double(settings.bytes * settings.count) / time_copies(settings) / 1e9);
        return 0;
    }
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) return 1;
    const pid_t child = fork();
    pin(child ? 0 : 1);
    settings.is_source = child != 0;
    Channel channel(ends[child ? 0 : 1]);
    close(ends[child ? 1 : 0]);
    int status = 0;
    try {
        child ? run_source<Side>(settings, channel) : run_target<Side>(settings, channel);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: %s\n", child ? "source" : "target", error.what());
        status = 1;
    }
    close(ends[child ? 0 : 1]);
    if (!child) _exit(status);
    int of_target = 0;
    waitpid(child, &of_target, 0);
    return status || of_target ? 1 : 0;
}

}  // namespace roles
