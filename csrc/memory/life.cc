// life.cc -- see life.h.
#include "life.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>

namespace pycomm {

namespace {

struct flock record_lock(short type, int byte) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return lock;
}

}  // namespace

// A life file as this process has it.
struct Life::File {
  std::string name;
  std::vector<OwnedFd> fds;  // all that this process has of it; the first is used
  std::map<int, int> holds;  // byte -> holds of this process
};

struct Life::Registry {
  std::mutex mutex;
  std::vector<std::shared_ptr<File>> files;  // oldest first

  // The one of this process. A forked child gets a new one: the copy may be locked, and its locks are the
  // parent's.
  static Registry*& current() {
    static Registry* registry = [] {
      ::pthread_atfork(nullptr, nullptr, [] { current() = new Registry; });
      return new Registry;
    }();
    return registry;
  }
};

OwnedFd Life::create_file() {
  OwnedFd file(::memfd_create("pycomm-life", MFD_CLOEXEC));
  if (!file) throw_errno("memfd_create");
  return file;
}

Life::Life(const std::string& name, OwnedFd fd, int byte)
    : registry_(*Registry::current()), ref_{name, byte} {
  std::lock_guard guard(registry_.mutex);
  auto& files = registry_.files;
  const auto found = std::find_if(files.begin(), files.end(), [&](const auto& f) { return f->name == name; });
  file_ = found == files.end() ? std::make_shared<File>() : *found;
  if (file_->holds[byte] == 0) {
    struct flock lock = record_lock(F_WRLCK, byte);
    if (::fcntl(fd.get(), F_SETLK, &lock) != 0) {
      const int error = errno;
      if (found != files.end()) {  // to close it now would drop the locks of the others
        file_->holds.erase(byte);
        file_->fds.push_back(std::move(fd));
      }
      if (error == EAGAIN || error == EACCES)
        throw std::runtime_error("pycomm: another process has joined the group as rank " +
                                 std::to_string(byte));
      throw_errno("record lock of a group", error);
    }
  }
  ++file_->holds[byte];
  file_->fds.push_back(std::move(fd));
  if (found != files.end()) return;
  file_->name = name;
  files.push_back(file_);
}

// With the registry's mutex.
Life::Life(Registry& registry, std::shared_ptr<File> file, int byte)
    : registry_(registry), file_(std::move(file)), ref_{file_->name, byte} {
  ++file_->holds[byte];
}

Life::~Life() {
  if (&registry_ != Registry::current()) return;  // a forked child: the locks are the parent's
  std::lock_guard guard(registry_.mutex);
  if (--file_->holds[ref_.byte] > 0) return;
  file_->holds.erase(ref_.byte);
  struct flock lock = record_lock(F_UNLCK, ref_.byte);
  ::fcntl(file_->fds[0].get(), F_SETLK, &lock);
  if (!file_->holds.empty()) return;
  std::erase(registry_.files, file_);
  file_->fds.clear();  // [Note: closing drops locks]
}

std::vector<std::unique_ptr<Life>> Life::hold_again(size_t most) {
  Registry& registry = *Registry::current();
  std::lock_guard guard(registry.mutex);
  std::vector<std::unique_ptr<Life>> lives;
  for (const auto& file : registry.files)
    if (lives.size() < most) lives.emplace_back(new Life(registry, file, file->holds.begin()->first));
  return lives;
}

int Life::fd() const {
  std::lock_guard guard(registry_.mutex);
  return file_->fds[0].get();
}

bool Life::held(int byte) const {
  std::lock_guard guard(registry_.mutex);
  if (file_->holds.count(byte)) return true;
  struct flock lock = record_lock(F_WRLCK, byte);
  if (::fcntl(file_->fds[0].get(), F_GETLK, &lock) != 0)
    return true;  // no answer is not a death certificate; the deadline still holds
  return lock.l_type != F_UNLCK;
}

}  // namespace pycomm
