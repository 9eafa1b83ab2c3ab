// brief.h -- what an engine of torch's says of an error, in short.
#pragma once

#include <algorithm>
#include <exception>
#include <string>

namespace pycomm {

// The first sentence: engines add where in their sources it was raised, advice, and a trace.
inline std::string brief(const std::exception& error) {
  std::string text = error.what();
  text = text.substr(0, std::min(text.find('\n'), text.find(". ")));
  if (const size_t place = text.find("] "); text.starts_with("[") && place != std::string::npos)
    text.erase(0, place + 2);
  return text.substr(0, 160);
}

}  // namespace pycomm
