// cores.cc -- see cores.h.
#include "cores.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace pycomm {

namespace {

const std::string digits = "0123456789abcdef";

std::string to_hex(const cpu_set_t& set) {
  std::string hex;
  for (int digit = 0; digit < CPU_SETSIZE / 4; ++digit) {
    int value = 0;
    for (int bit = 0; bit < 4; ++bit) value |= CPU_ISSET(digit * 4 + bit, &set) ? 1 << bit : 0;
    hex += digits[value];
  }
  return hex.substr(0, hex.find_last_not_of('0') + 1);
}

void add_hex(cpu_set_t& set, const std::string& hex) {
  for (size_t digit = 0; digit < hex.size(); ++digit)
    for (int bit = 0; bit < 4; ++bit)
      if (digits.find(hex[digit]) >> bit & 1) CPU_SET(digit * 4 + bit, &set);
}

cpu_set_t union_of(const std::vector<std::string>& masks) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const std::string& mask : masks) add_hex(set, mask);
  return set;
}

// "0-7,64-71"
cpu_set_t parse_list(const std::string& list) {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::istringstream in(list);
  for (std::string range; std::getline(in, range, ',');) {
    int first = 0, last = 0;
    char dash = 0;
    std::istringstream numbers(range);
    if (!(numbers >> first)) continue;
    if (!(numbers >> dash >> last)) last = first;
    for (int core = first; core <= last && core < CPU_SETSIZE; ++core) CPU_SET(core, &set);
  }
  return set;
}

std::string first_line(const std::string& path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

}  // namespace

std::string allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) CPU_SET(0, &set);
  return to_hex(set);
}

std::string cores_of_one_cache(const std::string& cores) {
  const cpu_set_t set = union_of({cores});
  int core = 0;
  while (core < CPU_SETSIZE && !CPU_ISSET(core, &set)) ++core;
  const std::string caches = "/sys/devices/system/cpu/cpu" + std::to_string(core) + "/cache/index";
  std::string last, level_of_last;
  for (int index = 0;; ++index) {
    const std::string cache = caches + std::to_string(index) + "/", level = first_line(cache + "level");
    if (level.empty()) break;
    if (level < level_of_last) continue;
    level_of_last = level;
    last = first_line(cache + "shared_cpu_list");
  }
  return to_hex(parse_list(last));
}

int count_cores(const std::vector<std::string>& masks) {
  const cpu_set_t set = union_of(masks);
  return std::max(1, CPU_COUNT(&set));
}

bool all_within(const std::vector<std::string>& masks, const std::string& mask) {
  const cpu_set_t set = union_of({mask});
  std::vector<std::string> both = masks;
  both.push_back(mask);
  const cpu_set_t all = union_of(both);
  return CPU_EQUAL(&set, &all);
}

}  // namespace pycomm
