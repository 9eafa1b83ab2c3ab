// collectives.cc -- the collectives of _C.Communicator.
#include "bindings.h"

namespace pycomm {

namespace {

void bind_reductions(CommClass& comm) {
  comm.def("all_reduce",
           [](const CommPtr& c, const at::Tensor& in, const at::Tensor& out, int op, double factor,
              bool async_op, int algorithm, double timeout) {
             return submit(
                 c, make_all_reduce(*c, in, out, reduction_of(op, factor), options_of(algorithm, timeout)),
                 async_op);
           })
      .def("reduce",
           [](const CommPtr& c, const at::Tensor& in, const at::Tensor& out, int root, int op, double factor,
              bool async_op, int algorithm, double timeout) {
             return submit(
                 c, make_reduce(*c, in, out, root, reduction_of(op, factor), options_of(algorithm, timeout)),
                 async_op);
           })
      .def("reduce_scatter",
           [](const CommPtr& c, const Tensors& in, const at::Tensor& out, int op, double factor,
              bool async_op, int algorithm, double timeout) {
             return submit(
                 c,
                 make_reduce_scatter(*c, in, out, reduction_of(op, factor), options_of(algorithm, timeout)),
                 async_op);
           })
      .def("reduce_scatter_flat", [](const CommPtr& c, const at::Tensor& in, const at::Tensor& out, int op,
                                     double factor, bool async_op, int algorithm, double timeout) {
        return submit(
            c,
            make_reduce_scatter_flat(*c, in, out, reduction_of(op, factor), options_of(algorithm, timeout)),
            async_op);
      });
}

void bind_lists(CommClass& comm) {
  comm.def("all_gather",
           [](const CommPtr& c, const at::Tensor& in, const Tensors& out, bool async_op, int algorithm,
              double timeout) {
             return submit(c, make_all_gather(*c, in, out, options_of(algorithm, timeout)), async_op);
           })
      .def("all_to_all",
           [](const CommPtr& c, const Tensors& in, const Tensors& out, bool async_op, int algorithm,
              double timeout) {
             return submit(c, make_all_to_all(*c, in, out, options_of(algorithm, timeout)), async_op);
           })
      .def("gather",
           [](const CommPtr& c, const at::Tensor& in, const Tensors& out, int root, bool async_op,
              int algorithm, double timeout) {
             return submit(c, make_gather(*c, in, out, root, options_of(algorithm, timeout)), async_op);
           })
      .def("scatter", [](const CommPtr& c, const Tensors& in, const at::Tensor& out, int root, bool async_op,
                         int algorithm, double timeout) {
        return submit(c, make_scatter(*c, in, out, root, options_of(algorithm, timeout)), async_op);
      });
}

void bind_movement(CommClass& comm) {
  comm.def("broadcast",
           [](const CommPtr& c, const at::Tensor& tensor, int root, bool async_op, int algorithm,
              double timeout) {
             return submit(c, make_broadcast(*c, tensor, root, options_of(algorithm, timeout)), async_op);
           })
      .def("all_gather_flat",
           [](const CommPtr& c, const at::Tensor& in, const at::Tensor& out, bool async_op, int algorithm,
              double timeout) {
             return submit(c, make_all_gather_flat(*c, in, out, options_of(algorithm, timeout)), async_op);
           })
      .def(
          "all_to_all_flat", [](const CommPtr& c, const at::Tensor& in, const at::Tensor& out,
                                const std::vector<int64_t>& in_splits, const std::vector<int64_t>& out_splits,
                                bool async_op, int algorithm, double timeout) {
            return submit(
                c, make_all_to_all_flat(*c, in, out, {in_splits, out_splits}, options_of(algorithm, timeout)),
                async_op);
          });
}

}  // namespace

void bind_collectives(CommClass& comm) {
  bind_reductions(comm);
  bind_movement(comm);
  bind_lists(comm);
}

}  // namespace pycomm
