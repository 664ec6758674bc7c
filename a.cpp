#include <tracekern.h>

#define MY_EVENTS(EVENT) EVENT(wait_row, wait, completion, "row data row", "peer:10 row:13", "seen:32")
TK_DEFINE_EVENTS(MyEvent, MY_EVENTS)
using namespace tracekern;
#line 1 "case_0"
void kernel_0(Recorder<true>& recorder, bool x) { TK_WAIT(recorder, MyEvent::wait_row, 1, 2); TK_END(); }
#line 1 "case_1"
void kernel_1(Recorder<true>& recorder, bool x) { TK_WAIT(recorder, MyEvent::wait_row, 1, 2); TK_END_IF(true); }
#line 1 "case_2"
void kernel_2(Recorder<true>& recorder, bool x) { TK_WAIT(recorder, MyEvent::wait_row, 1, 2); TK_END(1, 2); }
#line 1 "case_3"
void kernel_3(Recorder<true>& recorder, bool x) { TK_WAIT(recorder, MyEvent::wait_row, 1, 2); TK_END_AFTER(1); }
#line 1 "case_4"
void kernel_4(Recorder<true>& recorder, bool x) { TK_WAIT(recorder, MyEvent::wait_row); TK_END(1); }
#line 1 "case_5"
void kernel_5(Recorder<true>& recorder, bool x) { TK_WAIT_IF(recorder, x, MyEvent::wait_row, 1); TK_END(1); }
#line 1 "case_6"
void kernel_6(Recorder<true>& recorder, bool x) { TK_SEQUENCE(recorder); TK_NEXT(MyEvent::wait_row); }
#line 1 "case_7"
void kernel_7(Recorder<true>& recorder, bool x) { if (x) TK_WAIT(recorder, MyEvent::wait_row, 1, 2); }
#line 1 "case_8"
void kernel_8(Recorder<true>& recorder, bool x) { TK_WAIT(recorder, MyEvent::wait_row, 1, 2);
{ if (x) TK_WAIT_IF(recorder, x, MyEvent::wait_row, 1, 2); } }
#line 1 "case_9"
void kernel_9(Recorder<false>& recorder, bool x) { TK_WAIT(recorder, MyEvent::wait_row, 1, 2); TK_END(); }
#line 1 "case_10"
void kernel_10(Recorder<false>& recorder, bool x) { TK_WAIT(recorder, MyEvent::wait_row, 1, 2); TK_END_IF(true); }
#line 1 "case_11"
void kernel_11(Recorder<false>& recorder, bool x) { TK_WAIT(recorder, MyEvent::wait_row, 1, 2); TK_END(1, 2); }
#line 1 "case_12"
void kernel_12(Recorder<false>& recorder, bool x) { TK_WAIT(recorder, MyEvent::wait_row, 1, 2); TK_END_AFTER(1); }
#line 1 "case_13"
void kernel_13(Recorder<false>& recorder, bool x) { TK_WAIT(recorder, MyEvent::wait_row); TK_END(1); }
#line 1 "case_14"
void kernel_14(Recorder<false>& recorder, bool x) { TK_WAIT_IF(recorder, x, MyEvent::wait_row, 1); TK_END(1); }
#line 1 "case_15"
void kernel_15(Recorder<false>& recorder, bool x) { TK_SEQUENCE(recorder); TK_NEXT(MyEvent::wait_row); }
#line 1 "case_16"
void kernel_16(Recorder<false>& recorder, bool x) { if (x) TK_WAIT(recorder, MyEvent::wait_row, 1, 2); }
#line 1 "case_17"
void kernel_17(Recorder<false>& recorder, bool x) { TK_WAIT(recorder, MyEvent::wait_row, 1, 2);
{ if (x) TK_WAIT_IF(recorder, x, MyEvent::wait_row, 1, 2); } }
