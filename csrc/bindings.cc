// bindings.cc -- the Python module pycomm._C: thin, no algorithm. Every call that may wait releases the GIL.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "reduce/reduce.h"
#include "torch/device.h"
#include "torch/registered_tensor.h"
#include "torch/tensors.h"
#include "torch/torch_store.h"

namespace py = pybind11;

namespace pycomm {

void bind_backend(py::module_& module);  // torch/backend_bindings.cc

namespace {

using CommPtr = std::shared_ptr<Communicator>;

// A work and the group it belongs to: the group must outlive its operations.
struct Handle {
  CommPtr comm;
  std::shared_ptr<Work> work;
  int source = -1;  // of a recv on a device, where it is known beforehand
};

PointToPoint& engine_of(Communicator& comm) { return static_cast<PointToPoint&>(*comm.background()); }

// Runs or issues a request. None when it has run, or is in the current stream.
std::optional<Handle> submit(const CommPtr& comm, Request request, bool async_op) {
  py::gil_scoped_release no_gil;
  if (request.device.is_cuda()) {
    auto work = issue_on_device(*comm, std::move(request), async_op);
    return async_op ? std::optional(Handle{comm, std::move(work)}) : std::nullopt;
  }
  auto task = std::make_shared<TensorTask>(*comm, std::move(request));
  if (!async_op) {
    comm->run(*task);
    return std::nullopt;
  }
  comm->issue(task);
  return Handle{comm, std::move(task)};
}

// pycomm.errors has the Python classes; looked up once, when the first error is raised.
void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const CommError& error) {
    const char* names[] = {"CommError", "MismatchError", "PeerError", "CommTimeoutError", "AbortedError"};
    py::object cls = py::module_::import("pycomm.errors").attr(names[static_cast<int>(error.kind)]);
    py::object peer = error.peer >= 0 ? py::object(py::int_(error.peer)) : py::none();
    py::object op = error.op.kind != OpKind::none ? py::object(py::str(to_string(error.op.kind))) : py::none();
    py::object sequence = error.op.sequence ? py::object(py::int_(error.op.sequence)) : py::none();
    py::object value = cls(py::str(error.what()), py::arg("rank") = error.rank, py::arg("world_size") = error.world_size,
                           py::arg("op") = op, py::arg("sequence") = sequence, py::arg("peer") = peer);
    PyErr_SetObject(cls.ptr(), value.ptr());
  }
}

Reduction reduction_of(int op, double factor) { return {static_cast<ReduceOp>(op), factor}; }
CallOptions options_of(int algorithm, double timeout) { return {timeout, static_cast<Algorithm>(algorithm)}; }

CommPtr connect(Store& store, int rank, int world_size, const TransportOptions& options) {
  py::gil_scoped_release no_gil;
  return make_communicator(store, rank, world_size, options);
}

TransportOptions transport_options(const std::string& name, double timeout, size_t staging_bytes, const std::string& host_id, bool use_cma,
                                   int threads, const std::string& cuda_protocol, int cuda_connections, size_t cuda_staging_bytes) {
  TransportOptions options;
  options.name = name;
  options.timeout = timeout;
  options.staging_bytes = staging_bytes;
  options.host_id = host_id;
  options.use_cma = use_cma;
  options.threads = threads;
  options.device = {cuda_staging_bytes, cuda_protocol, cuda_connections};
  return options;
}

// Names, so that PYCOMM_ALGORITHM passes through unchanged.
void set_algorithm(Communicator& comm, const std::string& op, const std::string& algorithm) {
  for (int kind = 0; kind <= static_cast<int>(OpKind::alloc); ++kind)
    for (int choice = 0; choice < num_algorithms; ++choice)
      if (op == to_string(static_cast<OpKind>(kind)) && algorithm == to_string(static_cast<Algorithm>(choice)) &&
          (has_algorithm(static_cast<OpKind>(kind), static_cast<Algorithm>(choice)) ||
           cuda::has_cuda_algorithm(static_cast<OpKind>(kind), static_cast<Algorithm>(choice))))
        return comm.set_default_algorithm(static_cast<OpKind>(kind), static_cast<uint8_t>(choice));
  throw std::invalid_argument("pycomm: PYCOMM_ALGORITHM: " + op + " has no algorithm " + algorithm);
}

py::dict describe(const CommPtr& comm) {
  Transport& t = comm->transport();
  const char* reaches[] = {"staging only", "process_vm_readv", "pointers (ranks are threads of one process)"};
  py::dict facts;
  facts["name"] = t.name();
  facts["rank"] = t.rank();
  facts["world_size"] = t.world_size();
  facts["reach"] = reaches[static_cast<int>(t.reach())];
  facts["cores"] = t.cores();
  facts["oversubscribed"] = t.oversubscribed();
  facts["threads"] = t.lanes();
  facts["staging_bytes"] = t.budget_bytes();
  facts["simd"] = simd_level();
  facts["broken"] = t.broken();
  facts["cuda"] = py::none();
  if (device_of(*comm)) {
    py::dict cuda;
    for (const auto& [name, value] : static_cast<cuda::CudaGroup*>(comm->device_engine())->describe()) cuda[py::str(name)] = value;
    facts["cuda"] = cuda;
  }
  return facts;
}

std::tuple<std::string, size_t, std::string> choose(int kind, size_t nbytes, int world_size, int cores, bool mapped, bool kernel_reads,
                                                    int algorithm) {
  auto op = static_cast<OpKind>(kind);
  if (algorithm == 0 && fits_payload(op, nbytes, world_size))
    return {"payload", 0, "the data travel with the operation's header: one exchange"};
  Choice choice = select(op, nbytes, {world_size, cores, mapped, kernel_reads}, static_cast<Algorithm>(algorithm));
  return {to_string(choice.algorithm), choice.block, choice.reason};
}

// The same for f32 sums on CUDA tensors.
std::tuple<std::string, std::string> choose_on_device(int kind, size_t nbytes, int world_size, bool one_device, bool registered,
                                                      int algorithm) {
  cuda::Shape shape;
  shape.group.world_size = world_size;
  shape.group.words_bytes = cuda::arena_shape(world_size, 0).words_bytes;
  shape.pointers = one_device;
  const auto choice = cuda::choose(static_cast<OpKind>(kind), nbytes, shape, {cuda::Kernel::two_shot, DType::f32, ReduceOp::sum},
                                   registered, static_cast<Algorithm>(algorithm));
  return {to_string(choice.algorithm), choice.reason};
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  py::register_exception_translator(&translate);

  py::class_<LocalStore, std::shared_ptr<LocalStore>>(module, "LocalStore").def(py::init<>());

  py::class_<Handle>(module, "Work")
      .def(
          "wait",
          [](Handle& self, double timeout) {
            py::gil_scoped_release no_gil;
            self.work->wait(timeout);
          },
          py::arg("timeout") = 0.0)
      .def("done",
           [](Handle& self) {
             py::gil_scoped_release no_gil;
             return self.work->poll();
           })
      .def("source", [](Handle& self) {
        auto* message = dynamic_cast<Message*>(self.work.get());
        return message ? message->source() : self.source;
      });

  py::class_<Communicator, CommPtr>(module, "Communicator")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("world_size", &Communicator::world_size)
      .def_property_readonly("timeout", [](Communicator& c) { return c.transport().timeout(); })
      .def("all_reduce",
           [](const CommPtr& c, const at::Tensor& in, const at::Tensor& out, int op, double factor, bool async_op, int algorithm,
              double timeout) {
             return submit(c, make_all_reduce(*c, in, out, reduction_of(op, factor), options_of(algorithm, timeout)), async_op);
           })
      .def("reduce",
           [](const CommPtr& c, const at::Tensor& in, const at::Tensor& out, int root, int op, double factor, bool async_op, int algorithm,
              double timeout) {
             return submit(c, make_reduce(*c, in, out, root, reduction_of(op, factor), options_of(algorithm, timeout)), async_op);
           })
      .def("broadcast",
           [](const CommPtr& c, const at::Tensor& tensor, int root, bool async_op, int algorithm, double timeout) {
             return submit(c, make_broadcast(*c, tensor, root, options_of(algorithm, timeout)), async_op);
           })
      .def("all_gather", [](const CommPtr& c, const at::Tensor& in, const Tensors& out, bool async_op, int algorithm,
                            double timeout) { return submit(c, make_all_gather(*c, in, out, options_of(algorithm, timeout)), async_op); })
      .def("all_gather_flat",
           [](const CommPtr& c, const at::Tensor& in, const at::Tensor& out, bool async_op, int algorithm, double timeout) {
             return submit(c, make_all_gather_flat(*c, in, out, options_of(algorithm, timeout)), async_op);
           })
      .def("reduce_scatter",
           [](const CommPtr& c, const Tensors& in, const at::Tensor& out, int op, double factor, bool async_op, int algorithm,
              double timeout) {
             return submit(c, make_reduce_scatter(*c, in, out, reduction_of(op, factor), options_of(algorithm, timeout)), async_op);
           })
      .def("reduce_scatter_flat",
           [](const CommPtr& c, const at::Tensor& in, const at::Tensor& out, int op, double factor, bool async_op, int algorithm,
              double timeout) {
             return submit(c, make_reduce_scatter_flat(*c, in, out, reduction_of(op, factor), options_of(algorithm, timeout)), async_op);
           })
      .def("all_to_all", [](const CommPtr& c, const Tensors& in, const Tensors& out, bool async_op, int algorithm,
                            double timeout) { return submit(c, make_all_to_all(*c, in, out, options_of(algorithm, timeout)), async_op); })
      .def("all_to_all_flat",
           [](const CommPtr& c, const at::Tensor& in, const at::Tensor& out, const std::vector<int64_t>& in_splits,
              const std::vector<int64_t>& out_splits, bool async_op, int algorithm, double timeout) {
             return submit(c, make_all_to_all_flat(*c, in, out, in_splits, out_splits, options_of(algorithm, timeout)), async_op);
           })
      .def("gather", [](const CommPtr& c, const at::Tensor& in, const Tensors& out, int root, bool async_op, int algorithm,
                        double timeout) { return submit(c, make_gather(*c, in, out, root, options_of(algorithm, timeout)), async_op); })
      .def("scatter", [](const CommPtr& c, const Tensors& in, const at::Tensor& out, int root, bool async_op, int algorithm,
                         double timeout) { return submit(c, make_scatter(*c, in, out, root, options_of(algorithm, timeout)), async_op); })
      .def("barrier",
           [](const CommPtr& c, bool async_op, double timeout) -> std::optional<Handle> {
             const auto device = device_of(*c);
             if (!device || async_op) return submit(c, make_barrier(*c, options_of(0, timeout)), async_op);
             py::gil_scoped_release no_gil;
             barrier_on_device(*c, *device, timeout);
             return std::nullopt;
           })
      .def("send",
           [](const CommPtr& c, const at::Tensor& tensor, int dst, int tag, bool async_op, double timeout) -> std::optional<Handle> {
             py::gil_scoped_release no_gil;
             if (tensor.is_cuda()) {
               auto work = send_on_device(*c, tensor, dst, tag, timeout, async_op);
               return async_op ? std::optional(Handle{c, std::move(work)}) : std::nullopt;
             }
             MessagePtr message = send_tensor(engine_of(*c), tensor, dst, tag, timeout);
             if (async_op) {
               message->help();
               return Handle{c, message};
             }
             message->wait();
             return std::nullopt;
           })
      .def("recv",
           [](const CommPtr& c, const at::Tensor& tensor, int src, int tag, bool async_op, double timeout) -> std::optional<Handle> {
             py::gil_scoped_release no_gil;
             if (tensor.is_cuda()) return Handle{c, recv_on_device(*c, tensor, src, tag, timeout, async_op), src};
             MessagePtr message = recv_tensor(engine_of(*c), tensor, src, tag, timeout);
             if (async_op) message->help();
             else message->wait();
             return Handle{c, message};
           })
      .def("empty",
           [](const CommPtr& c, const std::vector<int64_t>& shape, const py::object& dtype, const c10::Device& device) {
             const at::ScalarType type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
             py::gil_scoped_release no_gil;
             return empty_registered(c, shape, type, device);
           })
      .def("peer_addresses",
           [](Communicator& c, const at::Tensor& tensor) {
             py::gil_scoped_release no_gil;
             return peer_addresses(c, tensor);
           })
      .def("set_algorithm", &set_algorithm)
      .def("describe", &describe)
      .def("abort",
           [](Communicator& c, const std::string& reason) {
             py::gil_scoped_release no_gil;
             c.abort(reason);
           })
      .def("close", [](Communicator& c) {
        py::gil_scoped_release no_gil;
        c.close();
      });

  module.def("transport_options", &transport_options);
  py::class_<TransportOptions>(module, "TransportOptions");
  module.def("connect",
             [](LocalStore& store, int rank, int n, const TransportOptions& options) { return connect(store, rank, n, options); });
  module.def("connect", [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int n, const TransportOptions& options) {
    TorchStore adapter(store);
    return connect(adapter, rank, n, options);
  });
  module.def("choose", &choose);
  module.def("choose_on_device", &choose_on_device);
  module.def("simd_level", &simd_level);
  module.def("set_simd_limit", [](std::optional<std::string> limit) { set_simd_limit(limit ? limit->c_str() : nullptr); });

  module.def("built_with_cuda", &cuda::built_with_cuda);
  module.def("cuda_problem", &cuda::driver_problem);

  py::list dtypes, reduce_ops, kinds, algorithms;
  for (int i = 0; i < num_dtypes; ++i) dtypes.append(to_string(static_cast<DType>(i)));
  for (int i = 0; i < num_reduce_ops; ++i) reduce_ops.append(to_string(static_cast<ReduceOp>(i)));
  for (int i = 0; i <= static_cast<int>(OpKind::alloc); ++i) kinds.append(to_string(static_cast<OpKind>(i)));
  for (int i = 0; i < num_algorithms; ++i) algorithms.append(to_string(static_cast<Algorithm>(i)));
  module.attr("dtypes") = dtypes;
  module.attr("reduce_ops") = reduce_ops;
  module.attr("kinds") = kinds;
  module.attr("algorithms") = algorithms;
  module.attr("slot_payload_bytes") = slot_payload_bytes;
  bind_backend(module);
}

}  // namespace pycomm
