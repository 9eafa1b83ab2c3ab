// chunk.h -- how a buffer is cut among ranks.
#pragma once

#include <algorithm>
#include <cstddef>

namespace pycomm {

// Elements [begin, end) of chunk `index` when `count` elements are cut into `chunks` chunks of whole cache
// lines where possible.
struct Range {
  size_t begin, end;
  size_t size() const { return end - begin; }
};
inline Range chunk_of(size_t count, int index, int chunks, size_t item) {
  constexpr size_t cache_line = 64;
  const size_t line = std::max<size_t>(1, cache_line / item);
  const size_t lines = (count + line - 1) / line;
  const size_t begin = lines * index / chunks * line, end = lines * (index + 1) / chunks * line;
  return {std::min(begin, count), std::min(end, count)};
}

}  // namespace pycomm
