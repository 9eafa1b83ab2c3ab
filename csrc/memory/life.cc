// life.cc -- see life.h.
#include "life.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

namespace pycomm {

namespace {

constexpr size_t life_page_bytes = 4096;

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
  std::map<int, std::byte*> pages;  // of those

  void map_page(int byte);
  void drop_page(int byte);
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

// By fallocate, which no other process can shrink the file with, and a page whose memory is there cannot
// fault.
void Life::File::map_page(int byte) {
  const off_t at = static_cast<off_t>(byte) * life_page_bytes;
  if (::fallocate(fds[0].get(), 0, at, life_page_bytes) != 0) return;
  void* page = ::mmap(nullptr, life_page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0].get(), at);
  if (page == MAP_FAILED) return;
  std::memset(page, 0, life_page_bytes);
  pages[byte] = static_cast<std::byte*>(page);
}

void Life::File::drop_page(int byte) {
  const auto found = pages.find(byte);
  if (found == pages.end()) return;
  std::memset(found->second, 0, life_page_bytes);
  ::munmap(found->second, life_page_bytes);
  pages.erase(found);
}

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
  file_->fds.push_back(std::move(fd));
  if (++file_->holds[byte] == 1) file_->map_page(byte);
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
  file_->drop_page(ref_.byte);
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

std::byte* Life::page() const {
  std::lock_guard guard(registry_.mutex);
  const auto found = file_->pages.find(ref_.byte);
  return found == file_->pages.end() ? nullptr : found->second;
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
