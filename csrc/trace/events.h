// How a kernel names its events: one table next to the kernel, read by the recorder, Python, Perfetto, tests and
// reports.
//
//   // name, class, ends at, channel, fields known at begin, fields known at end
//   #define MY_EVENTS(EVENT)    (continued with a backslash on each line)
//       EVENT(copy_token, work, issue, "", "peer:10 slot:22", "")
//       EVENT(signal_token, signal, completion, "token data slot", "peer:10 slot:22", "value:23")
//       EVENT(wait_token, wait, completion, "token data slot", "peer:10 slot:22", "seen:23")
//   TK_DEFINE_EVENTS(MyEvent, MY_EVENTS)
//
// Fields are "name:bits", those known at begin and at end together at most 55 bits; an instant has fields at begin
// only. A wait, signal or sync is stored when it opens: at most 32 bits are left for its end. `peer` is always the
// other rank. A field of that name may stand at both sides, as what was expected and what came. A channel is "name kind
// key-fields": a wait is joined to the signal of the same channel, key, epoch and launch partner. Kinds: `data` (one
// signal), `count` and `credit` (a value of at least what was wanted), `barrier` (all signals of the key), `group` and
// `grid` (warps meet, without a signal), `immediate` (writes that are counted where they arrive: csrc/fabric/events.h).
// In front of the keys may stand initial=NUMBER, of count and credit: what is there before any signal; and
// tail=CHANNEL, of credit: the count of the same keys that says what its ring holds.
//
// A seventh value is the level of detail, 1 where it is missing: a body of the kernel whose recorder has a lower one is
// compiled without the event (trace/trace_choice.h).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "trace/record.h"

namespace tracekern {

enum class EventClass : uint8_t { work, wait, signal, sync };
enum class EndsAt : uint8_t { issue, completion };  // issue: stores may still be in flight when the span closes

struct EventInfo {
    const char* name;
    EventClass event_class;
    EndsAt ends_at;
    const char* channel;
    const char* begin_fields;
    const char* end_fields;
    uint32_t level = 1;
};
constexpr uint32_t kMaxLevel = 3;

// Number of fields in "peer:10 slot:22".
TK_HOST_DEVICE constexpr int count_fields(const char* fields) {
    int count = 0;
    for (; *fields; ++fields) count += *fields == ':';
    return count;
}

// Width in bits of field `index` of "peer:10 slot:22"; 0 when there is no such field.
TK_HOST_DEVICE constexpr uint32_t field_bits(const char* fields, int index) {
    for (; *fields; ++fields) {
        if (*fields != ':' || index-- != 0) continue;
        uint32_t bits = 0;
        for (++fields; *fields >= '0' && *fields <= '9'; ++fields)
            bits = bits * 10 + static_cast<uint32_t>(*fields - '0');
        return bits;
    }
    return 0;
}

TK_HOST_DEVICE constexpr uint32_t total_field_bits(const char* fields) {
    uint32_t bits = 0;
    for (int i = 0; i < count_fields(fields); ++i) bits += field_bits(fields, i);
    return bits;
}

template <int kCount>
struct FieldWidths {
    uint32_t bits[kCount];
};

template <int kCount>
TK_HOST_DEVICE constexpr FieldWidths<kCount> field_widths(const char* fields) {
    FieldWidths<kCount> widths{};
    for (int i = 0; i < kCount; ++i) widths.bits[i] = field_bits(fields, i);
    return widths;
}

// The next word of `text`, taken off it; "" at its end.
constexpr std::string_view take_word(std::string_view& text) {
    while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
    const std::string_view word = text.substr(0, text.find(' '));
    text.remove_prefix(word.size());
    return word;
}

// Whether `fields` are "name:bits" each, of 1 to 55 bits.
constexpr bool are_fields(std::string_view fields) {
    for (std::string_view field = take_word(fields); !field.empty(); field = take_word(fields)) {
        const size_t colon = field.find(':');
        if (colon == 0 || colon == std::string_view::npos) return false;
        uint32_t bits = 0;
        for (const char digit : field.substr(colon + 1)) {
            bits = bits * 10 + static_cast<uint32_t>(digit - '0');
            if (digit < '0' || digit > '9' || bits > kPayloadBits) return false;
        }
        if (bits == 0) return false;
    }
    return true;
}

constexpr bool has_field(std::string_view fields, std::string_view name) {
    for (std::string_view field = take_word(fields); !field.empty(); field = take_word(fields)) {
        if (field.substr(0, field.find(':')) == name) return true;
    }
    return false;
}

// Whether `word` is "initial=" and a number.
constexpr bool is_initial(std::string_view word) {
    constexpr std::string_view kName = "initial=";
    if (word.substr(0, kName.size()) != kName || word.size() == kName.size()) return false;
    return word.find_first_not_of("0123456789", kName.size()) == std::string_view::npos;
}

// Whether `word` is "tail=" and a name.
constexpr bool is_tail(std::string_view word) {
    constexpr std::string_view kName = "tail=";
    return word.substr(0, kName.size()) == kName && word.size() > kName.size();
}

// The kind in a channel "name kind key-fields"; "" where there is no channel.
constexpr std::string_view channel_kind(std::string_view channel) {
    take_word(channel);
    return take_word(channel);
}

// Whether `channel` is "", or "name kind key-fields" with a kind that there is and keys out of the fields.
constexpr bool is_channel(std::string_view channel, std::string_view begin_fields, std::string_view end_fields) {
    if (channel.empty()) return true;
    take_word(channel);
    const std::string_view kind = take_word(channel);
    const bool has_levels = kind == "credit" || kind == "count";
    if (!has_levels && kind != "data" && kind != "barrier" && kind != "group" && kind != "grid" && kind != "immediate")
        return false;
    std::string_view key = take_word(channel);
    if (has_levels && is_initial(key)) key = take_word(channel);
    if (kind == "credit" && is_tail(key)) key = take_word(channel);
    for (; !key.empty(); key = take_word(channel)) {
        if (!has_field(begin_fields, key) && !has_field(end_fields, key)) return false;
    }
    return true;
}

constexpr bool is_level(uint32_t level = 1) {
    return level >= 1 && level <= kMaxLevel;
}

// The table of an event enum; TK_DEFINE_EVENTS declares the function beside it, in whatever namespace that is.
template <class Event>
struct EventTable : decltype(tk_event_table(Event{})){};

// The row of an event.
template <auto kEvent>
inline constexpr EventInfo event_info = EventTable<decltype(kEvent)>::kEvents[static_cast<uint32_t>(kEvent)];

// Whether a span of this event ends with values.
template <auto kEvent>
inline constexpr bool has_end_fields = count_fields(event_info<kEvent>.end_fields) != 0;

// The table as JSON, for capture.launch(..., events=...). Strings in tables are plain identifiers: nothing to escape.
template <class Event>
std::string describe_events() {
    constexpr const char* kClassNames[] = {"work", "wait", "signal", "sync"};
    constexpr const char* kEndsAtNames[] = {"issue", "completion"};
    std::string json = "{\"name\":\"" + std::string(EventTable<Event>::kName) + "\",\"events\":[";
    for (const EventInfo& event : EventTable<Event>::kEvents) {
        if (json.back() == '}') json += ',';
        json += "{\"name\":\"" + std::string(event.name) + "\",\"class\":\"" +
                kClassNames[static_cast<int>(event.event_class)] + "\",\"ends_at\":\"" +
                kEndsAtNames[static_cast<int>(event.ends_at)] + "\",\"channel\":\"" + event.channel +
                "\",\"begin_fields\":\"" + event.begin_fields + "\",\"end_fields\":\"" + event.end_fields +
                "\",\"level\":\"" + std::to_string(event.level) + "\"}";
    }
    return json + "]}";
}

}  // namespace tracekern

#define TK_EVENT_ENUMERATOR(name, event_class, ends_at, channel, begin_fields, end_fields, ...) name,
#define TK_EVENT_ENTRY(name, event_class, ends_at, channel, begin_fields, end_fields, ...) \
    ::tracekern::EventInfo{#name,                                                          \
                           ::tracekern::EventClass::event_class,                           \
                           ::tracekern::EndsAt::ends_at,                                   \
                           channel,                                                        \
                           begin_fields,                                                   \
                           end_fields __VA_OPT__(, ) __VA_ARGS__},
// A capture whose table cannot be read is lost: mistakes are found here.
#define TK_EVENT_CHECK(name, event_class, ends_at, channel, begin_fields, end_fields, ...)                          \
    static_assert(::tracekern::are_fields(begin_fields) && ::tracekern::are_fields(end_fields),                     \
                  "the fields of " #name ": wanted \"name:bits name:bits ...\", of 1 to 55 bits");                  \
    static_assert(                                                                                                  \
        ::tracekern::is_channel(channel, begin_fields, end_fields),                                                 \
        "the channel of " #name                                                                                     \
        ": wanted \"\" or \"name kind key-fields\"; kind: data, count, credit, barrier, group, "                    \
        "grid or immediate; keys: fields, of credit and count first initial=NUMBER where the count does not begin " \
        "at 0, of credit then tail=CHANNEL where that counts what its ring holds");                                 \
    static_assert(::tracekern::total_field_bits(begin_fields) + ::tracekern::total_field_bits(end_fields) <=        \
                      ::tracekern::kPayloadBits,                                                                    \
                  "the fields of " #name " need more than 55 bits together");                                       \
    static_assert(                                                                                                  \
        ::tracekern::EventClass::event_class == ::tracekern::EventClass::work ||                                    \
            ::tracekern::total_field_bits(end_fields) <= ::tracekern::kPayloadBits - ::tracekern::kPayloadLowBits,  \
        "the end fields of " #name ", which is stored when it opens: wanted at most 32 bits");                      \
    static_assert(::tracekern::is_level(__VA_ARGS__), "the level of " #name ": wanted 1, 2 or 3");

// Use at namespace scope. Each file has a table of its own: files of one program, and extensions of one process, may
// give theirs the same name, and a linker that took them for one would name the events of both by the first. nvcc warns
// of a constant without a name: an assertion does.
#define TK_DEFINE_EVENTS(Event, TABLE)                                                                      \
    namespace {                                                                                             \
    enum class Event : uint32_t { TABLE(TK_EVENT_ENUMERATOR) };                                             \
    TABLE(TK_EVENT_CHECK)                                                                                   \
    struct tk_table_of_##Event {                                                                            \
        static constexpr char kName[] = #Event;                                                             \
        static constexpr ::tracekern::EventInfo kEvents[] = {TABLE(TK_EVENT_ENTRY)};                        \
        static_assert(sizeof(kName) > 1 && sizeof(kEvents) / sizeof(kEvents[0]) <= ::tracekern::kMaxEvents, \
                      "at most 64 events");                                                                 \
    };                                                                                                      \
    [[maybe_unused]] constexpr tk_table_of_##Event tk_event_table(Event) {                                  \
        return {};                                                                                          \
    }                                                                                                       \
    }
