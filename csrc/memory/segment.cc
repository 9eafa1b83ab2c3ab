// segment.cc -- see segment.h.
#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <system_error>
#include <vector>

namespace pycomm {

namespace {

[[noreturn]] void throw_errno(const char* what) { throw std::system_error(errno, std::generic_category(), std::string("pycomm: ") + what); }

struct flock record_lock(short type, int byte) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return lock;
}

}  // namespace

// All descriptors that this process has of one memfd. They are closed together, when its last rank has left, because
// closing one alone would drop the record locks of the others.
struct Segment::SharedFd {
  explicit SharedFd(int fd) : first(fd) {}
  const int first;          // the one that is used
  std::vector<int> others;  // received by further ranks of this process; under the registry's mutex

  ~SharedFd() {
    ::close(first);
    for (int fd : others) ::close(fd);
  }

  static std::shared_ptr<SharedFd> adopt(int fd) {
    static std::mutex mutex;
    static std::map<ino_t, std::weak_ptr<SharedFd>> registry;
    struct stat info{};
    if (::fstat(fd, &info) != 0) throw_errno("fstat of a shared segment");
    std::lock_guard guard(mutex);
    std::erase_if(registry, [](const auto& entry) { return entry.second.expired(); });
    if (auto shared = registry[info.st_ino].lock()) {
      shared->others.push_back(fd);
      return shared;
    }
    auto shared = std::make_shared<SharedFd>(fd);
    registry[info.st_ino] = shared;
    return shared;
  }
};

Segment::Segment(std::shared_ptr<SharedFd> fd, size_t nbytes) : fd_(std::move(fd)), nbytes_(nbytes) {
  void* mapping = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_->first, 0);
  if (mapping == MAP_FAILED) throw_errno("mmap of a shared segment");
  data_ = static_cast<std::byte*>(mapping);
#ifdef MADV_HUGEPAGE
  ::madvise(mapping, nbytes, MADV_HUGEPAGE);  // a hint; refused where shmem has no huge pages
#endif
}

Segment::~Segment() { ::munmap(data_, nbytes_); }

std::unique_ptr<Segment> Segment::create(size_t nbytes) {
  int fd = ::memfd_create("pycomm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw_errno("memfd_create");
  if (::ftruncate(fd, static_cast<off_t>(nbytes)) != 0) {
    int error = errno;
    ::close(fd);
    throw std::system_error(error, std::generic_category(), "pycomm: ftruncate of a shared segment");
  }
  ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);  // no peer can make our mapping fault
  return std::unique_ptr<Segment>(new Segment(SharedFd::adopt(fd), nbytes));
}

std::unique_ptr<Segment> Segment::open(int fd) {
  struct stat info{};
  if (::fstat(fd, &info) != 0) throw_errno("fstat of a received segment");
  return std::unique_ptr<Segment>(new Segment(SharedFd::adopt(fd), static_cast<size_t>(info.st_size)));
}

int Segment::fd() const { return fd_->first; }

// Where the kernel cannot, the memory goes with the last mapping.
void Segment::give_back(size_t offset, size_t nbytes) { ::madvise(data_ + offset, nbytes, MADV_REMOVE); }

void Segment::hold_lock(int byte) {
  struct flock lock = record_lock(F_WRLCK, byte);
  if (::fcntl(fd(), F_SETLK, &lock) != 0) throw_errno("record lock on a shared segment");
}

bool Segment::lock_held(int byte) const {
  struct flock lock = record_lock(F_WRLCK, byte);
  if (::fcntl(fd(), F_GETLK, &lock) != 0) return true;  // no answer is not a death certificate; the deadline still holds
  return lock.l_type != F_UNLCK;
}

}  // namespace pycomm
