// What a user's kernel includes: #include <tracekern.h>, with -I set to tracekern.include_path().
#pragma once

#if __cplusplus < 202002L
    #error "tracekern.h needs C++20: compile with -std=c++20"
#endif
// Warnings that a project turns on are about its own code. Nested spans, for one, have one name and shadow each other.
#pragma GCC system_header

#include "trace/trace_choice.h"
