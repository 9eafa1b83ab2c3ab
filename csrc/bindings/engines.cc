// engines.cc -- see engines.h.
#include "engines.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <iterator>
#include <stdexcept>
#include <tuple>

#include "../hosts/ucx_wire.h"
#include "../memory/owned_fd.h"
#include "../torch/c10d_wire.h"
#include "../torch/interpreter.h"

namespace pycomm {

namespace {

// Freed with the interpreter's lock, from whatever thread.
template <class Object>
std::shared_ptr<Object> shared(Object object) {
  return {new Object(std::move(object)), [](Object* held) {
            const PythonStay stay;
            if (!stay) return;
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

// Of what engines() has made for one of the two.
std::shared_ptr<Wire> wire_of(const py::object& made) {
  if (made.is_none()) return nullptr;
  if (py::isinstance<UcxWire>(made)) return made.cast<std::shared_ptr<UcxWire>>();
  return std::make_shared<C10dWire>(made.cast<c10::intrusive_ptr<c10d::Backend>>());
}

// What is raised as one of pycomm.errors, or as a ValueError, is thrown as what they stand for.
void rethrow_known(const py::error_already_set& error) {
  const py::object value = error.value(), errors = py::module_::import("pycomm.errors");
  if (error.matches(PyExc_ValueError)) throw std::invalid_argument(py::str(value).cast<std::string>());
  const auto number = [&](const char* name) {
    const py::object found = value.attr(name);
    return found.is_none() ? -1 : found.cast<int>();
  };
  const char* names[] = {"", "MismatchError", "PeerError", "CommTimeoutError", "AbortedError"};
  for (uint32_t kind = 1; kind < std::size(names); ++kind)
    if (py::isinstance(value, errors.attr(names[kind])))
      throw CommError(static_cast<ErrorKind>(kind), py::str(value).cast<std::string>(), number("rank"),
                      number("world_size"), {}, number("peer"));
}

// Runs a call into Python, with the lock; what it raises becomes a std::exception.
template <class Call>
auto in_python(const Call& call) {
  const py::gil_scoped_acquire gil;
  try {
    return call();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) {  // Ctrl-C
      error.restore();
      if (!keep_raised()) PyErr_Clear();
      throw std::runtime_error("interrupted");
    }
    const auto text = py::str(error.value()).cast<std::string>();
    if (py::hasattr(error.value(), "lost_rank"))  // pycomm/hosts/meeting.py
      throw RankLost(error.value().attr("lost_rank").cast<int>(), text);
    throw std::runtime_error(text);
  }
}

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Function = std::shared_ptr<py::function>;

// () -> None, or (why the try has ended, the rank it is about or -1).
py::cpp_function look_of(const WireRequest& request) {
  return py::cpp_function([&request]() -> py::object {
    try {
      const WithoutGil no_gil;
      request.look();
    } catch (const CommError& error) {
      const std::string text = error.what(), what = "creating the group: ";
      const size_t start = text.find(what);
      return py::make_tuple(start == std::string::npos ? text : text.substr(start + what.size()),
                            error.kind == ErrorKind::peer ? error.peer : -1);
    }
    return py::none();
  });
}

class PointOfGroup final : public Continuation {
 public:
  explicit PointOfGroup(py::object point)
      : bell_(::fcntl(point.attr("bell").cast<int>(), F_DUPFD_CLOEXEC, 0)), point_(shared(std::move(point))) {
    if (!bell_) throw_errno("a descriptor for the end of a group");
  }
  ~PointOfGroup() override { ring(); }

  void leave() override {
    left_.store(true, std::memory_order_release);
    ring();
  }
  bool left() const { return left_.load(std::memory_order_acquire); }
  Shrunk shrink(const std::shared_ptr<Communicator>& comm, const std::vector<int>& exclude, bool exactly,
                double timeout) override {
    return in_python([&] {
      try {
        auto [made, ranks] = point_->attr("shrink")(comm, exclude, exactly, timeout)
                                 .cast<std::pair<CommPtr, std::vector<int>>>();
        return Shrunk{std::move(made), std::move(ranks)};
      } catch (const py::error_already_set& error) {
        rethrow_known(error);
        throw;
      }
    });
  }
  const py::object& point() const { return *point_; }

 private:
  void ring() const {
    const uint64_t once = 1;
    if (::write(bell_.get(), &once, sizeof once) < 0)
      return;  // who listens has ended, and the process with it
  }

  const OwnedFd bell_;
  const std::shared_ptr<py::object> point_;
  std::atomic<bool> left_{false};
};

// The point outlives the group: it answers ranks that come late.
std::shared_ptr<Continuation> continue_by(const py::object& point) {
  auto made = std::make_shared<PointOfGroup>(point);
  point.attr("is_left") = py::cpp_function([weak = std::weak_ptr<PointOfGroup>(made)] {
    const auto group = weak.lock();
    return !group || group->left();
  });
  return made;
}

Wires make_wires(const Function& engines, const StorePtr& store, const WireRequest& request) {
  const Placement& placement = request.placement;
  return in_python([&] {
    const auto [data, control, point] = (*engines)(store, request.rank, placement.host_of, placement.names,
                                                   request.attempt, request.timeout, look_of(request))
                                            .cast<std::tuple<py::object, py::object, py::object>>();
    return Wires{wire_of(data), wire_of(control), continue_by(point)};
  });
}

BackendPtr make_nccl(const Function& nccl, const StorePtr& store, const NcclRequest& request) {
  const Placement& placement = request.place.placement;
  return in_python([&] {
    const py::cpp_function look([&request] {
      const WithoutGil no_gil;
      request.look();
    });
    return (*nccl)(store, request.rank, placement.host_of, placement.names, request.place.attempt,
                   request.timeout, request.device, look)
        .cast<BackendPtr>();
  });
}

Checks checks_by(const Function& checks) {
  const auto word = in_python([&] { return (*checks)().cast<std::string>(); });
  return word == "before" ? Checks::before : word == "off" ? Checks::off : Checks::beside;
}

}  // namespace

MakersWithStore makers_by(const py::tuple& engines) {
  const Function wires = shared(engines[0].cast<py::function>()),
                 nccl = shared(engines[1].cast<py::function>());
  const Checks checks = checks_by(shared(engines[2].cast<py::function>()));
  return [=](const StorePtr& store) {
    return Makers{[=](const WireRequest& request) { return make_wires(wires, store, request); },
                  [=](const NcclRequest& request) { return make_nccl(nccl, store, request); }, checks};
  };
}

py::object point_of(Communicator& comm) {
  HostsSide* hosts = comm.hosts_side();
  const auto* point = hosts ? dynamic_cast<const PointOfGroup*>(hosts->after().get()) : nullptr;
  return point ? point->point() : py::none();
}

}  // namespace pycomm
