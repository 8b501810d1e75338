// Random numbers, and what else torch asks a PrivateUse1 device for.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

#include "streams.h"

namespace sim {

const at::Generator& default_generator(c10::DeviceIndex device);

// A CPU generator for one random operator, seeded where it is enqueued: results must not depend on how threads run.
at::Generator take_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device);

void register_device();

}  // namespace sim
