// The one thread of an engine that calls back, and that ends what users gave it: no transfer waits for either.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <semaphore>
#include <utility>

#include "fabric/queue.hpp"
#include "fabric/rule.hpp"
#include "fabric/user_thread.hpp"

namespace tracekern {

class CallbackThread : public std::enable_shared_from_this<CallbackThread> {
public:
    // Takes what callbacks need, the interpreter; the end of what it returns gives that back.
    using Enter = std::function<std::shared_ptr<void>()>;

    static std::shared_ptr<CallbackThread> start(Enter enter) {
        const std::shared_ptr<CallbackThread> made(new CallbackThread(std::move(enter)));
        made->thread_.start([made] { made->run(); });
        return made;
    }

    // Shares what a user gave with the engine. Whoever drops the last share leaves its end to this thread.
    template <class Users>
    std::shared_ptr<Users> keep(Users users) {
        return {new Users(std::move(users)),
                [thread = shared_from_this()](Users* last) { thread->put([last] { delete last; }); }};
    }

    // Any thread. Callbacks are called in the order of one caller; once this has ended, here and now.
    void put(std::function<void()> callback) {
        if (queue_.put(std::move(callback))) return pending_.release();
        rule::before_users();
        const auto inside = enter_ ? enter_() : nullptr;
        std::exchange(callback, {})();
    }

    // Calls and ends all that was put before. False: a callback has not returned within the limit; it all goes on, as
    // it does where a callback calls this. One thread at a time.
    bool end(std::chrono::nanoseconds limit) {
        is_ending_.store(true, std::memory_order_release);
        pending_.release();
        return thread_.join(limit);
    }
    bool is_here() const { return thread_.is_here(); }

private:
    explicit CallbackThread(Enter enter) : enter_(std::move(enter)) {}

    void run() {
        bool is_ending = false;
        while (!is_ending || !queue_.try_close()) {
            pending_.acquire();
            is_ending = is_ending_.load(std::memory_order_acquire);
            auto callback = queue_.take();
            if (!callback) continue;
            const auto inside = enter_ ? enter_() : nullptr;  // once for all that is there
            for (; callback; callback = queue_.take()) {
                rule::before_users();
                (*callback)();
            }
        }
    }

    const Enter enter_;
    Queue<std::function<void()>> queue_;
    std::counting_semaphore<> pending_{0};
    std::atomic<bool> is_ending_ = false;
    UserThread thread_;
};

}  // namespace tracekern
