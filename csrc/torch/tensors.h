// tensors.h -- from tensors to operations: the one place that turns at::Tensor arguments into an Op.
//
// Every make_* function checks device and dtype, makes non-contiguous tensors contiguous, and returns a
// request that keeps the tensors alive and says which results are to be copied back into non-contiguous
// outputs at its end. A request on the CPU becomes a task of the communicator, one on a device an operation
// in a stream (device.h). Errors are std::invalid_argument, before anything is sent. Used by the native API
// (bindings/) and by the c10d backend (backend.cc).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../collectives/collectives.h"
#include "../communicator/messages.h"

namespace pycomm {

DType dtype_of(
    const at::Tensor& tensor);  // throws std::invalid_argument for dtypes that pycomm does not move

struct Reduction {
  ReduceOp op = ReduceOp::sum;
  double factor = 1;
};

// What may be said about any call.
struct CallOptions {
  double timeout = 0;  // seconds, 0: the group's
  Algorithm algorithm = Algorithm::automatic;
};

struct MessageOptions {
  int peer = 0;  // a recv's may be any_source
  int tag = 0;
  double timeout = 0;  // seconds, 0: the group's
};

using Tensors = std::vector<at::Tensor>;
using CopyBack =
    std::vector<std::pair<at::Tensor, at::Tensor>>;  // (the caller's tensor, its contiguous stand-in)

// A checked call. All its tensors are on `device`; a barrier is on the CPU.
struct Request {
  Op op;
  c10::Device device = c10::kCPU;
  Tensors keep;
  CopyBack copy_back;
};

// What a thread of the group may be the last to hold, [Note: the end of the interpreter].
void let_go(Tensors& keep, CopyBack& copy_back);
struct Kept {
  explicit Kept(at::Tensor tensor) : tensor(std::move(tensor)) {}
  Kept(const Kept&) = default;
  Kept(Kept&&) = default;
  ~Kept();
  at::Tensor tensor;
};

class TensorTask : public CollectiveTask {
 public:
  TensorTask(Communicator& comm, Request request)
      : CollectiveTask(comm, std::move(request.op)),
        keep_(std::move(request.keep)),
        copy_back_(std::move(request.copy_back)) {
    comm.raise_deferred_error();
  }
  ~TensorTask() override;

 protected:
  void finish(bool patient) override;
  void release() override;  // a tensor may own the handle of the very operation that keeps the tensor

 private:
  Tensors keep_;
  CopyBack copy_back_;
};

using TaskPtr = std::shared_ptr<TensorTask>;

// `in` and `out` may be the same tensor. Lists have world_size entries, all of one dtype.
Request make_all_reduce(Communicator& comm, const at::Tensor& in, const at::Tensor& out, Reduction reduction,
                        const CallOptions& options);
Request make_reduce(Communicator& comm, const at::Tensor& in, const at::Tensor& out, int root,
                    Reduction reduction, const CallOptions& options);
Request make_broadcast(Communicator& comm, const at::Tensor& tensor, int root, const CallOptions& options);
Request make_all_gather(Communicator& comm, const at::Tensor& in, const Tensors& out,
                        const CallOptions& options);  // uneven if the sizes differ
Request make_all_gather_flat(Communicator& comm, const at::Tensor& in, const at::Tensor& out,
                             const CallOptions& options);  // out: world_size * in
Request make_reduce_scatter(Communicator& comm, const Tensors& in, const at::Tensor& out, Reduction reduction,
                            const CallOptions& options);
Request make_reduce_scatter_flat(Communicator& comm, const at::Tensor& in, const at::Tensor& out,
                                 Reduction reduction, const CallOptions& options);
Request make_all_to_all(Communicator& comm, const Tensors& in, const Tensors& out,
                        const CallOptions& options);  // always pairwise sizes
// Rows (entries of the first dimension) for each rank and from each rank; both empty: even.
struct Splits {
  const std::vector<int64_t>& in;
  const std::vector<int64_t>& out;
};
Request make_all_to_all_flat(Communicator& comm, const at::Tensor& in, const at::Tensor& out,
                             const Splits& splits, const CallOptions& options);
Request make_gather(Communicator& comm, const at::Tensor& in, const Tensors& out, int root,
                    const CallOptions& options);  // out: at the root only
Request make_scatter(Communicator& comm, const Tensors& in, const at::Tensor& out, int root,
                     const CallOptions& options);  // in: at the root only
Request make_barrier(Communicator& comm, const CallOptions& options);

// Throws std::invalid_argument for a tensor that cannot be sent or received; its contiguous form.
at::Tensor checked_message(const Transport& transport, OpKind kind, const at::Tensor& tensor,
                           c10::DeviceType device);

// Point to point, on the CPU. Keeps the tensor alive; a non-contiguous recv is copied back when the message
// completes.
MessageWorkPtr send_tensor(Communicator& comm, const at::Tensor& tensor, const MessageOptions& options);
MessageWorkPtr recv_tensor(Communicator& comm, const at::Tensor& tensor, const MessageOptions& options);

}  // namespace pycomm
