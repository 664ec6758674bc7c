// The rule of an engine:
//
//   Who holds one of its locks, and its worker in a turn, neither calls nor ends what is a user's. That may be
//   Python's, and need the interpreter, whose lock somebody holds who waits for that of the engine. What is a user's is
//   called by threads of their own (user_thread.hpp), and ended by the callback thread (callbacks.hpp). And the
//   interpreter's lock is let go before one of an engine is taken.
//
// A build with TRACEKERN_CHECKED asserts it, at each lock and at each call or end of what is a user's.
#pragma once

#include <condition_variable>
#include <mutex>

#ifdef TRACEKERN_CHECKED
    #include <cstdint>
    #include <cstdio>
    #include <cstdlib>
#endif

namespace tracekern::rule {

#ifdef TRACEKERN_CHECKED

// Whether this thread holds the interpreter's lock; set by who knows an interpreter.
inline bool (*holds_interpreter)() = nullptr;
inline thread_local uint32_t num_locks = 0;

[[noreturn]] inline void broken(const char* what) {
    std::fprintf(stderr, "the rule of an engine (fabric/rule.hpp) is broken: %s\n", what);
    std::abort();
}
// Before a lock, or a wait for a thread of an engine.
inline void before_waiting() {
    if (holds_interpreter && holds_interpreter()) broken("a thread that holds the interpreter waits for an engine");
}
// Before something of a user's is called or ended.
inline void before_users() {
    if (num_locks != 0) broken("something of a user's is called or ended under a lock, or in a turn of the worker");
}

class Mutex {
public:
    void lock() {
        before_waiting();
        mutex_.lock();
        ++num_locks;
    }
    bool try_lock() {
        before_waiting();
        const bool is_locked = mutex_.try_lock();
        num_locks += is_locked;
        return is_locked;
    }
    void unlock() {
        --num_locks;
        mutex_.unlock();
    }

private:
    std::mutex mutex_;
};
using Condition = std::condition_variable_any;

#else

inline void before_waiting() {}
inline void before_users() {}
using Mutex = std::mutex;
using Condition = std::condition_variable;

#endif

}  // namespace tracekern::rule
