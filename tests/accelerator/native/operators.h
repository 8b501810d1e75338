// Operators of the device: each becomes a task of the current stream.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <string>

#include "memory.h"

namespace sim {

// What any kernel of the device does apart from its arithmetic: begins where the stream is, costs what is set.
void launch(Queue& queue, const std::string& name, std::function<void()> body);

// Take an operator's arguments from the stack, enqueue its CPU kernel, leave its results there.
void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim
