// What a forked child of a process with engines has, and has not: threads, connections and locks are its parent's.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace tracekern {

// How many forks lie between this process and the one that loaded the first library. Written where a child has one
// thread; relaxed: nothing else is read by it.
inline std::atomic<uint32_t> num_forks = 0;

// The process that this was made in.
class Process {
public:
    bool is_this() const { return num_forks.load(std::memory_order_relaxed) == made_after_; }
    // Throws std::invalid_argument in a child of it. what: "the engine".
    void require(const char* what) const {
        if (!is_this()) {
            throw std::invalid_argument(
                std::string(what) +
                " was made before this process was forked, and cannot be used here; make one after the fork");
        }
    }

private:
    const uint32_t made_after_ = num_forks.load(std::memory_order_relaxed);
};

// Files that a child closes when it begins. Without a lock: another thread may hold it when a process forks.
class ClosedInChildren {
public:
    // Of more than there is room for a child has copies.
    static void add(int file) { replace(kNone, file + 1); }
    static void remove(int file) { replace(file + 1, kNone); }
    static void close_all() {
        for (auto& file : files) {
            if (const int open = file.exchange(kNone, std::memory_order_relaxed)) close(open - 1);
        }
    }

private:
    static constexpr int kNone = 0;

    static void replace(int from, int to) {
        for (auto& file : files) {
            int expected = from;
            if (file.compare_exchange_strong(expected, to, std::memory_order_relaxed)) return;
        }
    }

    inline static std::array<std::atomic<int>, 256> files{};  // each more by 1
};

// Connections of engines, which libfabric's tcp opens so that programs inherit them: while one of these lives, a peer
// would not see its process end. Known by the addresses that engines listen at, here and at peers.
class Connections {
public:
    // A socket address, as a provider writes it. Of more than there is room for, connections are inherited.
    static void add(const std::string& address) {
        Place* const end = places.data() + places.size();
        for (Place* place = places.data(); place != end; ++place) {
            bool expected = false;
            if (!place->is_taken.compare_exchange_strong(expected, true, std::memory_order_relaxed)) continue;
            place->address = to_address(address);
            return place->is_set.store(true, std::memory_order_release);
        }
    }
    static void remove(const std::string& address) {
        const Address gone = to_address(address);
        for (Place& place : places) {
            if (!place.is_set.load(std::memory_order_acquire) || !(place.address == gone)) continue;
            place.is_set.store(false, std::memory_order_relaxed);
            return place.is_taken.store(false, std::memory_order_release);
        }
    }

    static void close_on_exec() {
        for_each([](int file) { fcntl(file, F_SETFD, FD_CLOEXEC); });
    }
    static void close_all() {
        for_each([](int file) { close(file); });
    }

private:
    struct Address {
        uint16_t family, port;
        char host[16];

        bool operator==(const Address&) const = default;
    };
    struct Place {
        std::atomic<bool> is_taken, is_set;
        Address address;
    };

    static Address to_address(const std::string& bytes) {
        sockaddr_in6 copy{};
        std::memcpy(&copy, bytes.data(), std::min(bytes.size(), sizeof(copy)));
        return to_address(copy);
    }
    static Address to_address(const sockaddr_in6& any) {
        Address address{any.sin6_family, any.sin6_port, {}};
        if (any.sin6_family == AF_INET6) std::memcpy(address.host, &any.sin6_addr, sizeof(in6_addr));
        if (any.sin6_family == AF_INET) {
            sockaddr_in v4;
            std::memcpy(&v4, &any, sizeof(v4));
            std::memcpy(address.host, &v4.sin_addr, sizeof(in_addr));
        }
        return address;
    }
    template <class Name>
    static bool is_known(int file, Name name) {
        sockaddr_in6 any{};
        socklen_t size = sizeof(any);
        if (name(file, reinterpret_cast<sockaddr*>(&any), &size) != 0) return false;
        const Address address = to_address(any);
        return std::any_of(places.begin(), places.end(), [&](const Place& place) {
            return place.is_set.load(std::memory_order_acquire) && place.address == address;
        });
    }
    // Allocates nothing: a child may have been forked while another thread did.
    template <class Use>
    static void for_each(Use use) {
        const int directory = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (directory < 0) return;
        struct Entry {
            uint64_t inode;
            int64_t offset;
            uint16_t size;
            uint8_t type;
            char name[1];
        };
        alignas(Entry) char entries[4096];
        for (long bytes; (bytes = syscall(SYS_getdents64, directory, entries, sizeof(entries))) > 0;) {
            for (long at = 0; at < bytes; at += reinterpret_cast<const Entry*>(entries + at)->size) {
                const char* name = reinterpret_cast<const Entry*>(entries + at)->name;
                const int file = *name == '.' ? -1 : std::atoi(name);
                if (file >= 0 && (is_known(file, getsockname) || is_known(file, getpeername))) use(file);
            }
        }
        close(directory);
    }

    inline static std::array<Place, 4096> places{};
};

inline void count_forks() {
    static const int is_counted = pthread_atfork(nullptr, nullptr, [] {
        ++num_forks;
        ClosedInChildren::close_all();
        Connections::close_all();
    });
    (void)is_counted;
}

}  // namespace tracekern
