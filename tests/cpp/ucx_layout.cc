// ucx_layout.cc -- compiles where csrc/hosts/ucx_api.h says what UCX's own headers say: each size, place and
// value, and the type of each function. Nothing runs. tests/hosts/test_ucx.py compiles it.
#include <ucp/api/ucp.h>

#include "../../csrc/hosts/ucx_api.h"

namespace pycomm::ucx {

#define SAME(ours, theirs) static_assert(static_cast<uint64_t>(ours) == static_cast<uint64_t>(theirs))
#define PLACE(ours, field, theirs, their_field)               \
  SAME(offsetof(ours, field), offsetof(theirs, their_field)); \
  static_assert(sizeof(ours::field) == sizeof(theirs::their_field) && sizeof(ours) >= sizeof(theirs))

static_assert(sizeof(Status) == sizeof(ucs_status_t));
static_assert(ok == UCS_OK && busy == UCS_ERR_BUSY && lowest_status == UCS_ERR_LAST);
SAME(feature_tag, UCP_FEATURE_TAG);
SAME(feature_wakeup, UCP_FEATURE_WAKEUP);

SAME(ContextParams::has_features, UCP_PARAM_FIELD_FEATURES);
SAME(ContextParams::has_estimated_num_eps, UCP_PARAM_FIELD_ESTIMATED_NUM_EPS);
PLACE(ContextParams, field_mask, ucp_params_t, field_mask);
PLACE(ContextParams, features, ucp_params_t, features);
PLACE(ContextParams, estimated_num_eps, ucp_params_t, estimated_num_eps);

SAME(WorkerParams::has_thread_mode, UCP_WORKER_PARAM_FIELD_THREAD_MODE);
SAME(WorkerParams::serialized, UCS_THREAD_MODE_SERIALIZED);
PLACE(WorkerParams, field_mask, ucp_worker_params_t, field_mask);
PLACE(WorkerParams, thread_mode, ucp_worker_params_t, thread_mode);

SAME(EndpointParams::has_address, UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
SAME(EndpointParams::has_err_mode, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
SAME(EndpointParams::has_err_handler, UCP_EP_PARAM_FIELD_ERR_HANDLER);
SAME(EndpointParams::err_mode_peer, UCP_ERR_HANDLING_MODE_PEER);
PLACE(EndpointParams, field_mask, ucp_ep_params_t, field_mask);
PLACE(EndpointParams, address, ucp_ep_params_t, address);
PLACE(EndpointParams, err_mode, ucp_ep_params_t, err_mode);
PLACE(EndpointParams, err_handler, ucp_ep_params_t, err_handler.cb);
PLACE(EndpointParams, err_arg, ucp_ep_params_t, err_handler.arg);

static_assert(sizeof(TagInfo) == sizeof(ucp_tag_recv_info_t));
PLACE(TagInfo, length, ucp_tag_recv_info_t, length);

SAME(RequestParams::has_callback, UCP_OP_ATTR_FIELD_CALLBACK);
SAME(RequestParams::has_user_data, UCP_OP_ATTR_FIELD_USER_DATA);
SAME(RequestParams::has_flags, UCP_OP_ATTR_FIELD_FLAGS);
SAME(RequestParams::close_by_force, UCP_EP_CLOSE_FLAG_FORCE);
PLACE(RequestParams, op_attr_mask, ucp_request_param_t, op_attr_mask);
PLACE(RequestParams, flags, ucp_request_param_t, flags);
PLACE(RequestParams, callback, ucp_request_param_t, cb);
PLACE(RequestParams, user_data, ucp_request_param_t, user_data);

// Handles, enumerations and structs have other names there: alike are how many arguments, and what is passed
// in a register of which kind.
template <class Type>
constexpr char passed_as() {
  if constexpr (std::is_void_v<Type>) return 'v';
  else if constexpr (std::is_pointer_v<Type>) return 'p';
  else return static_cast<char>('0' + sizeof(Type));
}
template <class Ours, class Theirs>
struct Alike : std::false_type {};
template <class R, class... A, class S, class... B>
  requires(sizeof...(A) == sizeof...(B))
struct Alike<R (*)(A...), S (*)(B...)>
    : std::bool_constant<passed_as<R>() == passed_as<S>() && ((passed_as<A>() == passed_as<B>()) && ...)> {};

#define ALIKE(ours, theirs) static_assert(Alike<decltype(Library::ours), decltype(&theirs)>::value)
ALIKE(get_version, ucp_get_version);
ALIKE(config_read, ucp_config_read);
ALIKE(config_modify, ucp_config_modify);
ALIKE(config_release, ucp_config_release);
ALIKE(init_version, ucp_init_version);
ALIKE(cleanup, ucp_cleanup);
ALIKE(worker_create, ucp_worker_create);
ALIKE(worker_destroy, ucp_worker_destroy);
ALIKE(worker_get_address, ucp_worker_get_address);
ALIKE(worker_release_address, ucp_worker_release_address);
ALIKE(worker_get_efd, ucp_worker_get_efd);
ALIKE(worker_arm, ucp_worker_arm);
ALIKE(worker_progress, ucp_worker_progress);
ALIKE(worker_flush_nbx, ucp_worker_flush_nbx);
ALIKE(ep_create, ucp_ep_create);
ALIKE(ep_close_nbx, ucp_ep_close_nbx);
ALIKE(tag_send_nbx, ucp_tag_send_nbx);
ALIKE(tag_recv_nbx, ucp_tag_recv_nbx);
ALIKE(request_cancel, ucp_request_cancel);
ALIKE(request_free, ucp_request_free);
ALIKE(status_string, ucs_status_string);

}  // namespace pycomm::ucx
