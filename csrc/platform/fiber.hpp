// Fibers of one thread: own stacks, switched by hand. A switch takes a few ns on x86-64; elsewhere glibc's ucontext
// serves.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <vector>

namespace tracekern {

inline void fiber_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

#if defined(__x86_64__)
// Saves the callee-saved registers on the running stack, its pointer in *from, and goes on where `to` was saved.
// Floating-point control words are not switched: kernels leave them alone. Link-time optimisation puts what several
// files have of it into one: the first counts.
extern "C" void tracekern_switch_stack(void** from, void* to);
asm(R"(
.ifndef tracekern_switch_stack
.pushsection .text
.weak tracekern_switch_stack
.type tracekern_switch_stack,@function
tracekern_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size tracekern_switch_stack, .-tracekern_switch_stack
.popsection
.endif
)");
#endif

struct NoStack : std::bad_alloc {
    const char* what() const noexcept override {
        return "no memory for the stack of one more warp: each takes two mappings, and vm.max_map_count allows so "
               "many; launch fewer warps";
    }
};

// A stack with a guard below it, wide enough for a frame with a large array: an overflow is a crash at once, not a
// corruption of the stack below.
class FiberStack {
public:
    static constexpr size_t kBytes = 128 * 1024;
    FiberStack() {
        base_ = mmap(nullptr, kGuardBytes + kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base_ == MAP_FAILED) throw NoStack();
        if (mprotect(base(), kBytes, PROT_READ | PROT_WRITE) != 0) {
            munmap(base_, kGuardBytes + kBytes);
            throw NoStack();
        }
    }
    ~FiberStack() { munmap(base_, kGuardBytes + kBytes); }
    FiberStack(const FiberStack&) = delete;
    char* base() const { return static_cast<char*>(base_) + kGuardBytes; }

private:
    static constexpr size_t kGuardBytes = 1024 * 1024;
    void* base_;
};

class FiberScheduler {
public:
    void spawn(std::function<void()> body) {
        fibers_.push_back(std::make_unique<Fiber>());
        Fiber& fiber = *fibers_.back();
        fiber.body = std::move(body);
        fiber.scheduler = this;
        fiber.stack = take_stack();
        prepare(fiber);
    }

    // Runs all fibers to their end, in turns. relax(spins) is called after a round in which every fiber only waited.
    // Returns false when one of them called stop(): what stood on the fibers' stacks is gone without a destructor.
    template <class Relax>
    bool run(Relax relax) {
        size_t left = fibers_.size();
        uint32_t idle_rounds = 0;
        while (left) {
            const uint64_t progress = progress_;
            for (auto& fiber : fibers_) {
                if (fiber->done) continue;
                running_ = fiber.get();
                resume(*fiber);
                if (stopped_) return false;
                if (fiber->done) {
                    --left;
                    ++progress_;
                    give_stack(std::move(fiber->stack));
                }
            }
            if (progress == progress_) {
                relax(idle_rounds);
            } else {
                idle_rounds = 0;
            }
        }
        return true;
    }

    // Called inside a fiber: the others have their turn.
    void yield() { suspend(*running_); }
    void note_progress() { ++progress_; }
    // Called inside a fiber: none of them runs any more.
    void stop() {
        stopped_ = true;
        yield();
    }

private:
    struct Fiber {
        std::function<void()> body;
        FiberScheduler* scheduler = nullptr;
        std::unique_ptr<FiberStack> stack;
        bool done = false;
#if defined(__x86_64__)
        void* saved = nullptr;
#else
        ucontext_t context;
#endif
    };

    static constexpr size_t kMaxKept = 1024;  // 2 of a process's 65,530 mappings each

    // Stacks are kept from launch to launch: mapping one costs more than a short kernel.
    static std::vector<std::unique_ptr<FiberStack>>& pool() {
        static thread_local std::vector<std::unique_ptr<FiberStack>> stacks;
        return stacks;
    }
    static std::unique_ptr<FiberStack> take_stack() {
        if (pool().empty()) return std::make_unique<FiberStack>();
        auto stack = std::move(pool().back());
        pool().pop_back();
        return stack;
    }
    // Each extension has a pool of its own: all of them together must leave mappings for the warps of a launch.
    static void give_stack(std::unique_ptr<FiberStack> stack) {
        if (pool().size() < kMaxKept) pool().push_back(std::move(stack));
    }

#if defined(__x86_64__)
    static void enter() {
        Fiber& fiber = *entering_;
        fiber.body();
        fiber.done = true;
        tracekern_switch_stack(&fiber.saved, fiber.scheduler->main_);
        __builtin_unreachable();
    }
    static void prepare(Fiber& fiber) {
        // The stack as tracekern_switch_stack leaves it: six registers, then the address it returns to. The slot above
        // keeps the stack 16-byte aligned at the entry of enter(), as after a call.
        void** top = reinterpret_cast<void**>(fiber.stack->base() + FiberStack::kBytes);
        *--top = nullptr;
        *--top = reinterpret_cast<void*>(&FiberScheduler::enter);
        for (int i = 0; i < 6; ++i) *--top = nullptr;
        fiber.saved = top;
    }
    void resume(Fiber& fiber) {
        entering_ = &fiber;
        tracekern_switch_stack(&main_, fiber.saved);
    }
    void suspend(Fiber& fiber) { tracekern_switch_stack(&fiber.saved, main_); }
    inline static thread_local Fiber* entering_ = nullptr;
    void* main_ = nullptr;
#else
    static void enter(uint32_t low, uint32_t high) {
        Fiber& fiber = *reinterpret_cast<Fiber*>(static_cast<uintptr_t>(high) << 32 | low);
        fiber.body();
        fiber.done = true;
        swapcontext(&fiber.context, &fiber.scheduler->main_);
    }
    static void prepare(Fiber& fiber) {
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack->base();
        fiber.context.uc_stack.ss_size = FiberStack::kBytes;
        fiber.context.uc_link = nullptr;
        const auto address = reinterpret_cast<uintptr_t>(&fiber);
        makecontext(&fiber.context,
                    reinterpret_cast<void (*)()>(&FiberScheduler::enter),
                    2,
                    static_cast<uint32_t>(address),
                    static_cast<uint32_t>(address >> 32));
    }
    void resume(Fiber& fiber) { swapcontext(&main_, &fiber.context); }
    void suspend(Fiber& fiber) { swapcontext(&fiber.context, &main_); }
    ucontext_t main_;
#endif

    std::vector<std::unique_ptr<Fiber>> fibers_;
    Fiber* running_ = nullptr;
    uint64_t progress_ = 0;
    bool stopped_ = false;
};

}  // namespace tracekern
