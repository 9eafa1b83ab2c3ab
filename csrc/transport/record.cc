// record.cc -- see record.h.
#include "record.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "cores.h"
#include "layout.h"
#include "process.h"

namespace pycomm {

namespace {

// Read once, and never guessed for want of a descriptor: ranks would take each other for another host's.
const std::string& boot_id() {
  static const std::string id = [] {
    char text[64] = {};
    const OwnedFd file(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
    if (!file && (errno == EMFILE || errno == ENFILE)) throw_errno("reading the boot id");
    const ssize_t length = file ? ::read(file.get(), text, sizeof(text) - 1) : 0;
    const std::string id(text, std::max<ssize_t>(0, length));
    return length > 0 ? id.substr(0, id.find('\n')) : "unknown";
  }();
  return id;
}

constexpr size_t longest_label = 40;

std::string label_of(const std::string& host_id) {
  char name[256] = {};
  if (host_id.empty()) ::gethostname(name, sizeof(name) - 1);
  const std::string label = host_id.empty() ? name : host_id;
  return label.substr(0, std::min(label.find('\n'), longest_label));
}

// One kernel, one network namespace (abstract sockets), one user.
std::string host_identity() {
  struct stat network{};
  ::stat("/proc/self/ns/net", &network);
  return boot_id() + "-" + std::to_string(network.st_ino) + "-" + std::to_string(::geteuid());
}

}  // namespace

// The host comes last, behind its own line: it may be any text (PYCOMM_HOST_ID).
std::string Record::pack() const {
  std::ostringstream out;
  out << layout_version << ' ' << token << ' ' << primary << ' ' << threads << " c" << cores << " c" << cache
      << ' ' << lives.size();
  for (const LifeRef& life : lives) out << ' ' << life.name << ' ' << life.byte;
  out << '\n' << label << '\n' << host;
  return out.str();
}

Record Record::unpack(const std::string& text) {
  Record record;
  uint64_t version = 0;
  size_t num_lives = 0;
  const size_t end = text.find('\n');
  std::istringstream in(text.substr(0, end));
  if (!(in >> version) || version != layout_version)
    throw std::runtime_error("pycomm: the ranks of this group run different versions of pycomm");
  in >> record.token >> record.primary >> record.threads >> record.cores >> record.cache >> num_lives;
  record.cores.erase(0, 1);
  record.cache.erase(0, 1);
  record.lives.resize(num_lives);
  for (LifeRef& life : record.lives) in >> life.name >> life.byte;
  const size_t second = text.find('\n', end + 1);
  record.label = text.substr(end + 1, second - end - 1);
  record.host = text.substr(second + 1);
  return record;
}

Record own_record(const std::string& host_id) {
  Record record;
  record.host = host_id.empty() ? host_identity() : host_id;
  record.label = label_of(host_id);
  record.token = process_token();
  record.cores = allowed_cores();
  record.cache = cores_of_one_cache(record.cores);
  return record;
}

}  // namespace pycomm
