// Functions.h -- in place of torch's ATen/Functions.h, for tests/fake_cuda.py: of torch's thousands of
// functions those that the fake device, and the headers of torch that it includes, call. A fifth of its
// compilation. Headers of torch include others of these by themselves under AT_PER_OPERATOR_HEADERS.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
