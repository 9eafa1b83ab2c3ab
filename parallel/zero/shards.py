"""Values of a bucket's parameters between steps: the buffer that the model computes with, and the part that this rank's optimizer updates.

    n = 3 ranks, P parameters, mixed precision (2-byte values, fp32 master copies, Adam), bytes per rank

    zero   values                         master + 2 moments         gradients         sum
    0      P in the parameters            P                          P                 16 P
    1      one flat buffer of P           P/n  (own chunk)           P                 4 P + 12 P/n
    2      one flat buffer of P           P/n                        P/n               2 P + 14 P/n
    3      P/n, whole only while used     P/n                        P/n               16 P/n            (Rajbhandari et al. 2020, figure 1)

The optimizer is the user's own object: its parameter groups get, in place of the model's parameters, the pieces that this rank owns (a
parameter that lies in two chunks gives one piece to each rank), so that schedulers and hooks made for it keep working. Without mixed
precision a piece is a view of the values themselves, and zero=0 leaves the model's parameters in place.

A piece of a parameter is enough for optimizers that treat each element by itself. Others (Muon, Adafactor, anything unknown) get whole
parameters: the bucket is then cut at parameter boundaries (FlatSpec, whole).
"""

import torch

from pycomm.parallel import comm

__all__ = ["ELEMENTWISE", "Shards", "check_fresh", "step_optimizer"]

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop")


def is_elementwise(opt):
    """Whether the update of an element depends on nothing but that element's gradients."""
    return any(type(opt) is getattr(torch.optim, name) for name in ELEMENTWISE)


class Shards:
    """Values and master copies of one bucket.

    originals: parameter -> its values before they were cast to the compute dtype (the parameter itself without mixed precision).
    precise: dtype of the master copies, None: the values are the master copies. host: keep the master copies in host memory.
    """

    def __init__(self, bucket, originals, *, precise=None, host=False, host_values=False):
        self.bucket = bucket
        self.work = self.values = self.local = self.master = None
        zero, spec, device = bucket.options.zero, bucket.spec, bucket.device
        master_device = torch.device("cpu") if host else device
        separate = precise is not None or master_device != device
        if zero == 0:
            self.own = (
                self._fill(torch.zeros(spec.numel, dtype=precise or bucket.dtype, device=master_device), originals) if separate else None
            )
        elif zero < 3:
            self.values = self._fill(comm.empty(spec.numel, bucket.dtype, bucket.group, device), originals)
            self.own = bucket.mine(self.values)
            for info, view in zip(bucket.infos, spec.views(self.values), strict=True):
                info.param.data = view
        else:
            full = self._fill(torch.zeros(spec.numel, dtype=bucket.dtype, device=device), originals)
            self.own = self.local = bucket.mine(full).to("cpu" if host_values else device, copy=True)
            self.values, self.views = torch.empty(0, dtype=bucket.dtype, device=device), None
        self.master = self.own
        if zero and separate:
            full = torch.zeros(spec.numel, dtype=precise or bucket.dtype, device=master_device)
            self.master = bucket.mine(self._fill(full, originals)).clone()
        self.parts = self._parts()
        if zero == 3:
            self._prepare_freeing()

    def _fill(self, flat, originals):
        for info, view in zip(self.bucket.infos, self.bucket.spec.views(flat), strict=True):
            view.copy_(originals[info.param])
        return flat

    def _parts(self):
        """(piece, what the optimizer updates for it); the second is the model's parameter itself where nothing is cut or copied."""
        parts, zero = [], self.bucket.options.zero
        base = self.bucket.group.rank * self.bucket.spec.chunk if zero else 0
        for piece in self.bucket.owned:
            info = self.bucket.infos[piece.index]
            if self.master is None:
                parts.append((piece, info.param))
                continue
            values = self.master[piece.offset - base : piece.offset - base + piece.stop - piece.start]
            if piece.stop - piece.start == info.numel:
                values = values.view(info.shape)
            parts.append((piece, torch.nn.Parameter(values, requires_grad=info.param.requires_grad)))
        return parts

    def attach_gradients(self, scale=None, unused=()):
        """Sets .grad of the parts from the bucket's summed gradient, times `scale` (0-dim); None for parameters named in `unused`."""
        if self.master is None and self.bucket.loose:
            grads = [info.param.grad for info in self.bucket.infos if info.param.grad is not None]
            if scale is not None and grads:
                torch._foreach_mul_(grads, scale.to(grads[0].device, grads[0].dtype))
            return
        flat = self.bucket.gradient()
        base = self.bucket.group.rank * self.bucket.spec.chunk if self.bucket.options.zero else 0
        if self.master is not None and self.master.dtype != flat.dtype or self.master is not None and self.master.device != flat.device:
            flat = flat.to(self.master.device, self.master.dtype)
        if scale is not None:
            flat.mul_(scale.to(flat.device, flat.dtype))
        if self.master is None:  # gradients are views of the bucket already
            for info in self.bucket.infos:
                if info.name in unused:
                    info.param.grad = None
            return
        for piece, part in self.parts:
            if self.bucket.infos[piece.index].name not in unused:
                part.grad = flat[piece.offset - base : piece.offset - base + piece.stop - piece.start].view(part.shape)

    def detach_gradients(self):
        if self.master is not None:
            for _, part in self.parts:
                part.grad = None

    def publish(self):
        """After the optimizer: starts to bring the new values to where the model computes with them. wait() ends it."""
        zero = self.bucket.options.zero
        if self.master is None:
            return
        if zero == 0:
            for info, view in zip(self.bucket.infos, self.bucket.spec.views(self.master), strict=True):
                info.param.data.copy_(view)
            return
        if self.master is not self.own:
            self.own.copy_(self.master)
        if zero < 3:
            self.work = comm.all_gather(self.values, self.own, self.bucket.group, async_op=True)

    def wait(self):
        if self.work is not None:
            self.work.wait()
            self.work = None

    # zero 3: the whole values exist while a unit is in use. Views that autograd has saved share the storage, which is emptied and filled
    # again in place; parameters are given an empty tensor meanwhile, so that a use at the wrong time is an error of shapes and not of
    # memory.

    def _prepare_freeing(self):
        self.values = torch.zeros(self.bucket.spec.numel, dtype=self.bucket.dtype, device=self.bucket.device)
        self.views = self.bucket.spec.views(self.values)
        self.nothing = torch.empty(0, dtype=self.bucket.dtype, device=self.bucket.device)
        self.nbytes = self.values.untyped_storage().nbytes()
        self.free()

    def start_gather(self):
        self.values.untyped_storage().resize_(self.nbytes)
        local = self.local.to(self.values.device, non_blocking=True)
        self.work = comm.all_gather(self.values, local, self.bucket.group, async_op=True)
        self.source = local  # lives until wait()

    def finish_gather(self):
        self.wait()
        self.source = None
        for info, view in zip(self.bucket.infos, self.views, strict=True):
            info.param.data = view

    def free(self):
        for info in self.bucket.infos:
            info.param.data = self.nothing
        self.values.untyped_storage().resize_(0)


def replace_parameters(opt, shards):
    """Puts the parts in the place of the model's parameters in opt.param_groups; parameters that are in no bucket (frozen) leave."""
    start = next(iter(opt.state.values()), None)
    opt.state.clear()
    parts = {}
    for shard in shards:
        for piece, part in shard.parts:
            info = shard.bucket.infos[piece.index]
            parts.setdefault(info.option, []).append(part)
    for number, group in enumerate(opt.param_groups):
        group["params"] = parts.get(number, [])
        if start is not None:
            for part in group["params"]:
                total = torch.full_like(part, group["initial_accumulator_value"], requires_grad=False)
                opt.state[part] = {"step": torch.zeros_like(start["step"]), "sum": total}


def check_fresh(opt):
    """Raises ValueError when the optimizer has state of steps: its tensors have the shapes of whole parameters.

    Adagrad makes its state when it is made.
    """
    if opt.state and not (type(opt) is torch.optim.Adagrad and not any(state["step"] for state in opt.state.values())):
        raise ValueError("the optimizer has taken steps already: parallelize before the first one; parallel.load brings older state in")


def step_optimizer(opt, shards, scale=None, unused=()):
    """One step of the user's optimizer over all parts, gradients times `scale`; it does not see parameters named in `unused`.

    With master copies in fp32 the gradients are cast bucket by bucket, and the optimizer steps over one bucket at a time, so that fp32
    gradients exist for one bucket only.
    """
    shards = [shard for shard in shards if shard.bucket.infos[0].option is not None and shard.bucket.infos[0].param.requires_grad]
    if not any(shard.master is not None and shard.master.dtype != shard.bucket.dtype for shard in shards):
        for shard in shards:
            shard.attach_gradients(scale, unused)
        opt.step()
        for shard in shards:
            shard.detach_gradients()
            shard.publish()
    else:
        everything = [group["params"] for group in opt.param_groups]
        try:
            for shard in shards:
                shard.attach_gradients(scale, unused)
                for group in opt.param_groups:
                    group["params"] = []
                opt.param_groups[shard.bucket.infos[0].option]["params"] = [part for _, part in shard.parts]
                opt.step()
                shard.detach_gradients()
                shard.publish()
        finally:
            for group, params in zip(opt.param_groups, everything, strict=True):
                group["params"] = params
    for shard in shards:
        shard.wait()
