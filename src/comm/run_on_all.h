#pragma once

#include <functional>
#include <string_view>

#include "flashoverlap/communicator.h"

namespace flashoverlap::comm {

/// Runs `step` and waits for the other ranks to have run theirs. When it threw on any, every rank throws the
/// first such rank's error, with its kind: "<what>: rank <r> cannot take part: <its message>". So nobody
/// waits for a rank that cannot come.
void run_on_all(Communicator& control, std::string_view what, const std::function<void()>& step);

}  // namespace flashoverlap::comm
