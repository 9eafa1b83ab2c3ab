// c10d_wire.cc -- see c10d_wire.h.
#include "c10d_wire.h"

#include <ATen/ops/from_blob.h>

#include "brief.h"

namespace pycomm {

namespace {

class C10dTicket final : public Ticket {
 public:
  explicit C10dTicket(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}

  bool wait() override {
    try {
      return work_->wait(kNoTimeout);
    } catch (const std::exception& error) {
      throw WireError(brief(error));
    }
  }
  void nudge() override { work_->abort(); }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
};

template <class Post>
TicketPtr post(std::byte* data, size_t nbytes, const Post& post) {
  std::vector<at::Tensor> tensors{at::from_blob(data, {static_cast<int64_t>(nbytes)}, at::kByte)};
  try {
    return std::make_unique<C10dTicket>(post(tensors));
  } catch (const std::exception& error) {
    throw WireError(brief(error));
  }
}

}  // namespace

TicketPtr C10dWire::send(int dst, uint32_t tag, const std::byte* data, size_t nbytes) {
  return post(const_cast<std::byte*>(data), nbytes, [&](std::vector<at::Tensor>& tensors) {
    return backend_->send(tensors, dst, static_cast<int>(tag));
  });
}

TicketPtr C10dWire::recv(int src, uint32_t tag, std::byte* data, size_t nbytes) {
  return post(data, nbytes, [&](std::vector<at::Tensor>& tensors) {
    return backend_->recv(tensors, src, static_cast<int>(tag));
  });
}

}  // namespace pycomm
