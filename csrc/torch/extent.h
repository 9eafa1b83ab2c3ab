// extent.h -- where in memory tensors lie, and whether they overlap.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pycomm {

// From the first to behind the last byte of a tensor's elements; what a strided tensor leaves out between
// them counts as its own. Empty for tensors without elements or without memory of their own.
struct Extent {
  uintptr_t begin = 0, end = 0;

  static Extent of(const at::Tensor& tensor) {
    if (tensor.layout() != at::kStrided || tensor.numel() == 0 || !tensor.has_storage()) return {};
    const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    size_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
    return {begin, begin + (last + 1) * tensor.element_size()};
  }
  bool overlaps(const Extent& other) const { return begin < other.end && other.begin < end; }
};

// Whether any two of them overlap.
inline bool any_overlap(std::vector<Extent> extents) {
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  uintptr_t end = 0;
  for (const Extent& extent : extents) {
    if (extent.begin == extent.end) continue;
    if (extent.begin < end) return true;
    end = extent.end;
  }
  return false;
}

}  // namespace pycomm
