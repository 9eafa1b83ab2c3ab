// registered_tensor.cc -- see registered_tensor.h.
#include "registered_tensor.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <stdexcept>

#include "../communicator/registered.h"
#include "device.h"
#include "tensors.h"

namespace pycomm {

at::Tensor empty_registered(const std::shared_ptr<Communicator>& comm, const std::vector<int64_t>& shape,
                            at::ScalarType dtype, c10::Device device) {
  for (int64_t size : shape)
    if (size < 0)
      throw std::invalid_argument(comm->transport().where({OpKind::alloc, 0}) + "size " +
                                  std::to_string(size) + " is negative");
  comm->raise_deferred_error();
  const auto options = at::TensorOptions().dtype(dtype);
  dtype_of(at::empty({0}, options));
  if (device.is_cuda()) {
    if (!device.has_index()) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
    return empty_on_device(comm, shape, dtype, device);
  }
  if (!device.is_cpu())
    throw std::invalid_argument(comm->transport().where({OpKind::alloc, 0}) + "device " + device.str() +
                                "; expected cpu or cuda");
  const RegisteredBuffer buffer = allocate_registered(
      *comm, static_cast<size_t>(c10::multiply_integers(shape)) * options.dtype().itemsize());
  auto release = [memory = buffer.memory, weak = std::weak_ptr(comm), region = buffer.region](void*) {
    if (const auto alive = weak.lock()) alive->transport().drop_region(region);
  };
  return at::from_blob(buffer.data, shape, std::move(release), options);
}

std::vector<uint64_t> peer_addresses(Communicator& comm, const at::Tensor& tensor) {
  std::vector<uint64_t> addresses;
  auto* group = tensor.is_cuda() ? cuda::group_of(comm) : nullptr;
  const uint32_t region =
      tensor.is_cpu() ? comm.transport().find_region(tensor.data_ptr(), tensor.nbytes()) : 0;
  for (int peer = 0; peer < comm.world_size(); ++peer) {
    const int here = comm.hosts_side() ? comm.hosts_side()->local(peer) : peer;
    if (here < 0)
      throw std::invalid_argument(
          comm.transport().where({OpKind::alloc, 0}) + "rank " + std::to_string(peer) +
          " is on another host, so its memory has no address here; use a group within "
          "one host");
    const std::byte* address = group    ? group->at_peer(tensor.data_ptr(), tensor.nbytes(), peer)
                               : region ? comm.transport().at_peer(region, here, tensor.data_ptr())
                                        : nullptr;
    if (!address)
      throw std::invalid_argument(
          comm.transport().where({OpKind::alloc, 0}) +
          "the tensor is not in registered memory of this group; make it with Communicator.empty");
    addresses.push_back(reinterpret_cast<uint64_t>(address));
  }
  return addresses;
}

}  // namespace pycomm
