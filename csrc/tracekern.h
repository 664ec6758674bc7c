// What a user's kernel includes: #include <tracekern.h>, with -I set to tracekern.include_path().
#pragma once

#include "trace/recorder.h"
