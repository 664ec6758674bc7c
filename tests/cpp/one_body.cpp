// A library that lists one body of its kernel, and not in full, for test_from_outside.py.
#include "platform/cpu_executor.hpp"
#include "tracekern.h"

#define ONE_BODY_EVENTS(EVENT)               \
    EVENT(copy_row, work, issue, "", "", "") \
    EVENT(load_word, work, issue, "", "", "", 2)
TK_DEFINE_EVENTS(OneBodyEvent, ONE_BODY_EVENTS)

using namespace tracekern::api;

template <class Rec>
void copy(tracekern::Warp& warp, typename Rec::Args trace) {
    Rec recorder(trace, warp);
    TK_MARK(recorder, OneBodyEvent::copy_row);
    TK_MARK(recorder, OneBodyEvent::load_word);
}

// Whether a kernel ran.
extern "C" bool launch(uint64_t descriptor) {
    bool has_run = false;
    with_recorder<Recorder<true, RecordFormat::span, 1>>(descriptor, [&]<class Rec>(auto trace) {
        tracekern::launch_cpu({}, [&](tracekern::Warp& warp) { copy<Rec>(warp, trace); });
        has_run = true;
    });
    return has_run;
}

extern "C" const char* events() {
    static const std::string table = describe_events<OneBodyEvent>();
    return table.c_str();
}
