// What a span costs at least, for recorder.cu: probes that do a part of a recorder's work in as few instructions as
// possible. What is the same for all spans of the loop is in registers, even the words that tell event and kind. They
// share no code with csrc/trace.
#pragma once

#include <cstdint>

#include "recorder_loop.cuh"

namespace {

struct TrackArgs {
    uint64_t* buffer;
    uint32_t bytes_per_track;
    uint32_t event_mask;  // bit 0: spans without fields, bit 1: with fields
};

// A time in one word: the clock counts up by 32 ns, so that nothing is lost. Wraps after 137 s.
constexpr uint32_t kTickBits = 5;
TK_DEVICE uint32_t read_ticks() {
    return static_cast<uint32_t>(read_clock() >> kTickBits);
}

// Fields begin at this bit of a record's last word; what finds no room in it is in the word before.
constexpr uint32_t kFieldsFrom = 9;

// The cursor of a warp's track. Only the low word of its address is counted up, and before the store: counted up behind
// it, the address is copied first.
class Cursor {
public:
    TK_DEVICE Cursor(const TrackArgs& args, const Warp& warp)
        : next_(reinterpret_cast<uint64_t>(args.buffer) +
                (warp.block * warp.num_warps + warp.warp) * uint64_t{args.bytes_per_track}),
          limit_(static_cast<uint32_t>(next_) + args.bytes_per_track),
          event_mask_(warp.is_leader() ? args.event_mask : 0),
          is_leader_(hold_leader(warp)) {
        hold(next_, limit_, event_mask_);
    }
    TK_DEVICE uint32_t is_leader() const { return is_leader_; }
    TK_DEVICE uint32_t event_mask() const { return event_mask_; }

    template <uint32_t kBytes>
    TK_DEVICE void advance() {
        asm volatile(
            "{\n\t.reg .b32 %%low, %%high;\n\t"
            "mov.b64 {%%low, %%high}, %0;\n\t"
            "add.u32 %%low, %%low, %1;\n\t"
            "mov.b64 %0, {%%low, %%high};\n\t}"
            : "+l"(next_)
            : "n"(kBytes));
    }
    // The same on the leader if event kEvent is recorded. Returns whether it is and there was room. The bit of the mask
    // times a constant is what the address is counted up by: one instruction, a choice between two numbers takes more.
    template <uint32_t kBytes, uint32_t kEvent>
    TK_DEVICE uint32_t advance_if() {
        uint32_t fits;
        asm volatile(
            "{\n\t.reg .pred %%wanted, %%fits;\n\t.reg .b32 %%low, %%high, %%bit;\n\t"
            "and.b32 %%bit, %2, %4;\n\t"
            "setp.ne.u32 %%wanted, %%bit, 0;\n\t"
            "mov.b64 {%%low, %%high}, %0;\n\t"
            "mad.lo.u32 %%low, %%bit, %5, %%low;\n\t"
            "setp.le.and.u32 %%fits, %%low, %3, %%wanted;\n\t"
            "selp.u32 %1, 1, 0, %%fits;\n\t"
            "mov.b64 %0, {%%low, %%high};\n\t}"
            : "+l"(next_), "=r"(fits)
            : "r"(event_mask_), "r"(limit_), "n"(1u << kEvent), "n"(kBytes >> kEvent));
        return fits;
    }
    // Where `enabled`, kBack bytes before the cursor.
    template <int kBack>
    TK_DEVICE void store(uint32_t enabled, uint32_t a, uint32_t b, uint32_t c, uint32_t d) const {
        asm volatile(
            "{\n\t.reg .pred %%enabled;\n\t"
            "setp.ne.u32 %%enabled, %1, 0;\n\t"
            "@%%enabled st.global.v4.b32 [%0 + %6], {%2, %3, %4, %5};\n\t}" ::"l"(next_),
            "r"(enabled),
            "r"(a),
            "r"(b),
            "r"(c),
            "r"(d),
            "n"(-kBack)
            : "memory");
    }
    template <int kBack>
    TK_DEVICE void store(uint32_t enabled, uint32_t a, uint32_t b) const {
        asm volatile(
            "{\n\t.reg .pred %%enabled;\n\t"
            "setp.ne.u32 %%enabled, %1, 0;\n\t"
            "@%%enabled st.global.v2.b32 [%0 + %4], {%2, %3};\n\t}" ::"l"(next_),
            "r"(enabled),
            "r"(a),
            "r"(b),
            "n"(-kBack)
            : "memory");
    }

private:
    uint64_t next_;
    uint32_t limit_, event_mask_, is_leader_;
};

// Two clock reads and no store. The last ones are stored at the end of the loop, else the compiler drops them all.
struct Reads {
    static constexpr uint32_t kSpanBytes = 0;
    using Args = TrackArgs;
    TK_DEVICE Reads(Args args, const Warp& warp) : cursor(args, warp) {}
    TK_DEVICE ~Reads() {
        cursor.store<0>(cursor.is_leader(),
                        static_cast<uint32_t>(begin),
                        static_cast<uint32_t>(begin >> 32),
                        static_cast<uint32_t>(end),
                        static_cast<uint32_t>(end >> 32));
    }
    template <class F>
    TK_DEVICE void span(const BenchArgs&, uint32_t, F body) {
        begin = read_clock();
        body();
        end = read_clock();
    }
    Cursor cursor;
    uint64_t begin = 0, end = 0;
};

// Two records of 16 bytes with whole times. Nothing is checked, and that nothing comes between the two is known.
struct TwoStores {
    static constexpr uint32_t kSpanBytes = 32;
    static constexpr uint32_t kWord = 1;
    using Args = TrackArgs;
    TK_DEVICE TwoStores(Args args, const Warp& warp) : cursor(args, warp) { hold(payload, word); }
    template <class F>
    TK_DEVICE void span(const BenchArgs&, uint32_t, F body) {
        cursor.advance<kSpanBytes>();
        put<32>();
        body();
        put<16>();
    }
    template <int kBack>
    TK_DEVICE void put() {
        const uint64_t ticks = read_clock();
        cursor.store<kBack>(
            cursor.is_leader(), static_cast<uint32_t>(ticks), static_cast<uint32_t>(ticks >> 32), payload, word);
    }
    Cursor cursor;
    uint32_t payload = 0, word = kWord;
};

// One record of 16 bytes, stored at the span's end. Nothing is checked.
struct OneStore {
    static constexpr uint32_t kSpanBytes = 16;
    static constexpr uint32_t kWord = 1;
    using Args = TrackArgs;
    TK_DEVICE OneStore(Args args, const Warp& warp) : cursor(args, warp) { hold(payload, word); }
    template <class F>
    TK_DEVICE void span(const BenchArgs&, uint32_t, F body) {
        const uint32_t begin = read_ticks();
        body();
        const uint32_t end = read_ticks();
        cursor.advance<kSpanBytes>();
        cursor.store<kSpanBytes>(cursor.is_leader(), begin, end, payload, word);
    }
    Cursor cursor;
    uint32_t payload = 0, word = kWord;
};

// The same where the mask has the event and there is room. Fields: 10, 22 and 16 bits, as those of BenchEvent::token.
template <bool kFields>
struct OneChecked {
    static constexpr uint32_t kSpanBytes = 16;
    static constexpr uint32_t kWord = kFields ? 9 : 1;  // kind 1, event 1 or 0 from bit 3
    using Args = TrackArgs;
    TK_DEVICE OneChecked(Args args, const Warp& warp) : cursor(args, warp) { hold(payload, word); }
    TK_HOST_DEVICE static uint64_t fields(uint32_t peer, uint32_t i) {
        return (peer & 1023) | uint64_t{i & 0x3fffff} << 10 | uint64_t{i & 0xffff} << 32;
    }
    template <class F>
    TK_DEVICE void span(const BenchArgs& args, uint32_t i, F body) {
        const uint32_t begin = read_ticks();
        body();
        const uint32_t end = read_ticks();
        const uint32_t fits = cursor.advance_if<kSpanBytes, kFields>();
        if constexpr (kFields) {
            payload = static_cast<uint32_t>(fields(args.peer, i) >> (32 - kFieldsFrom));
            word = static_cast<uint32_t>(fields(args.peer, i)) << kFieldsFrom | kWord;
        }
        cursor.store<kSpanBytes>(fits, begin, end, payload, word);
    }
    Cursor cursor;
    uint32_t payload = 0, word = kWord;
};

// Two records of 8 bytes, a word and the low half of the clock. Checked once, at the begin, for both.
struct Short {
    static constexpr uint32_t kSpanBytes = 16;
    static constexpr uint32_t kBeginWord = 1, kEndWord = 2;
    using Args = TrackArgs;
    TK_DEVICE Short(Args args, const Warp& warp) : cursor(args, warp) { hold(begin_word, end_word); }
    template <class F>
    TK_DEVICE void span(const BenchArgs&, uint32_t, F body) {
        const uint32_t open = cursor.advance_if<kSpanBytes, 0>();
        cursor.store<16>(open, begin_word, static_cast<uint32_t>(read_clock()));
        body();
        cursor.store<8>(open, end_word, static_cast<uint32_t>(read_clock()));
    }
    Cursor cursor;
    uint32_t begin_word = kBeginWord, end_word = kEndWord;
};

// One record of 16 bytes in shared memory, where the mask has the event: a ring for each warp, which nobody empties.
struct Shared {
    static constexpr uint32_t kSpanBytes = 0;           // of global memory
    static constexpr uint32_t kRingBytes = 8 * kLanes;  // where hold() put this warp's values before the loop
    using Args = TrackArgs;
    TK_DEVICE Shared(Args args, const Warp& warp) : event_mask(Cursor(args, warp).event_mask()) {
        extern __shared__ __align__(1024) char shared_bytes[];
        ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes)) + warp.warp * kRingBytes;
        next = ring;
        hold(ring, next, payload, word);
    }
    template <class F>
    TK_DEVICE void span(const BenchArgs&, uint32_t, F body) {
        const uint32_t begin = read_ticks();
        body();
        const uint32_t end = read_ticks();
        asm volatile(
            "{\n\t.reg .pred %%wanted;\n\t.reg .b32 %%bit;\n\t"
            "and.b32 %%bit, %1, 1;\n\t"
            "setp.ne.u32 %%wanted, %%bit, 0;\n\t"
            "mad.lo.u32 %0, %%bit, 16, %0;\n\t"
            "lop3.b32 %0, %0, %7, %2, 0xf8;\n\t"  // next & %7 | ring
            "@%%wanted st.shared.v4.b32 [%0], {%3, %4, %5, %6};\n\t}"
            : "+r"(next)
            : "r"(event_mask), "r"(ring), "r"(begin), "r"(end), "r"(payload), "r"(word), "n"(kRingBytes - 1)
            : "memory");
    }
    uint32_t event_mask, ring, next, payload = 0, word = 1;
};

}  // namespace
