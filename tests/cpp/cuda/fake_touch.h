// fake_touch.h -- device memory as other libraries than ours use it, and the rules that they find broken.
#pragma once

#include <functional>
#include <string>

#include "fake_driver.h"

namespace pycomm::cuda {

// Runs `access` while nobody can give these bytes back; false, and not run: they are nobody's.
bool fake_touch(DevicePtr address, size_t nbytes, const std::function<void()>& access);
void fake_violation(const std::string& text);  // one more of fake_violations()

}  // namespace pycomm::cuda
