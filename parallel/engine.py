"""One training step of a model on the ranks of a plan: what parallelize() builds and step() runs.

    step(batch)
      rows of this rank, weights of the losses                            batch.py
      for each microbatch, in the order of the schedule                   pipeline/
          forward of a stage: blocks with tensor parallel layers, attention over the whole sequence, gathered parameters
          backward: gradients of complete buckets are summed over the data ranks meanwhile        data/bucket.py
      tied weights on two stages: exchange of their sums
      one all_reduce of a few numbers over all ranks: gradient norm, loss, marks of the batch, which parameters were used
      optimizer on what this rank owns, scaled by the clip factor         zero/shards.py
      new values to where they are computed with

Every element of the model is counted by exactly one rank in the norm; every loss by one rank (of those that hold the same one).
"""

import contextlib
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pycomm.parallel import comm
from pycomm.parallel.batch import check_microbatches, count_targets, inputs_and_targets, mark_of, split_batch
from pycomm.parallel.pipeline import DeferWeights, WeightStash, make_schedule
from pycomm.parallel.pipeline.executor import run as run_schedule
from pycomm.parallel.tensor import cross_entropy
from pycomm.parallel.zero.shards import step_optimizer

__all__ = ["Engine", "Tie"]


class Tie(NamedTuple):
    """A parameter that two pipeline stages hold. first: bucket is the earlier stage's. The other is at rank `peer` of pp, or `here`."""

    bucket: Any
    first: bool
    peer: int | None
    here: Any | None


class Engine:
    """All state of a parallelized model on this rank; build.py fills it."""

    def __init__(self, plan, mesh, model, opt):
        self.plan, self.mesh, self.model, self.opt = plan, mesh, model, opt
        self.stages = None  # StageModel where the model is cut
        self.mine = [0]  # virtual stages of this rank
        self.split = None  # SequenceSplit
        self.tensor = None  # TensorParallel
        self.moes = []
        self.infos = []  # ParamInfo of every parameter of this rank
        self.names = []  # names of all parameters of the original model, in order
        self.shapes = {}  # name -> shape in the original model
        self.reducers = {}  # virtual stage -> Reducer
        self.shards = []
        self.units = None  # ZeRO-3
        self.ties = []
        self.store = None  # WeightStore where backward is split
        self.device = None
        self.compute_dtype = None
        self.norm = None  # of the last step that clipped
        self.streams = None  # RandomStreams

    # -- one pass --------------------------------------------------------------------------------------------------------------------------

    def call(self, stage, microbatch, received=None):
        if self.stages is None:
            return microbatch.call(self.model)
        attention = self.split.attention if self.split is not None else None
        before = attention.calls if attention else 0
        out = self.stages.run(stage, lambda: microbatch.call(self.model), received)
        if attention and attention.calls == before:
            raise ValueError(
                f"[rank {self.mesh.world.rank}] sequence parallelism: the blocks of {self.stages.trunk.name!r} did not call "
                "F.scaled_dot_product_attention, so their attention saw this rank's positions only; write attention "
                "with it, or do without ring and ulysses"
            )
        return out

    @contextlib.contextmanager
    def in_pass(self, phase, stage):
        if self.units is None:
            yield
            return
        self.units.begin(phase, stage)
        try:
            yield
        finally:
            self.units.end()

    def clean_up(self):
        """After a step that raised: forgets what the passes left for later ones. Gradients are cleared at the next step."""
        if self.units is not None:
            self.units.orders.clear()  # those of an interrupted pass are incomplete
        if self.store is not None:
            self.store.pending.clear()

    def modes(self, key):
        stack = contextlib.ExitStack()
        for mode in self.split.modes() if self.split is not None else ():
            stack.enter_context(mode)
        if self.store is not None and torch.is_grad_enabled():
            stack.enter_context(DeferWeights(self.store, key))
        return stack

    def loss(self, output, microbatch, loss_fn):
        """The microbatch's part of the global mean, a 0-dim tensor that requires grad."""
        targets = self.split.cut_targets(microbatch.targets) if self.split is not None else microbatch.targets
        count = int(microbatch.count_of(targets))
        if count == 0:
            leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
            first = next(leaves, None)
            if first is None:
                raise ValueError(f"the model must return a floating tensor, or a tuple, list or dict with one; got {_describe(output)}")
            return first.masked_fill(torch.ones_like(first, dtype=torch.bool), 0.0).sum()  # a zero with a graph, whatever is in it
        if self.compute_dtype is not None:
            output = tree_map(self._precise, output)
        if loss_fn is cross_entropy:
            output = output if isinstance(output, torch.Tensor) else output.logits
            value = loss_fn(output, targets, head=self.tensor.head)
        else:
            value = loss_fn(output, targets)
        if not isinstance(value, torch.Tensor) or value.dim() > 0:
            raise ValueError(f"loss_fn must return a mean, a tensor without dimensions; got {_describe(value)}")
        return value * (count / microbatch.total)

    def _precise(self, leaf):
        if not isinstance(leaf, torch.Tensor) or leaf.dtype != self.compute_dtype:
            return leaf
        precise = leaf.float()
        if hasattr(leaf, "vocab_shard"):
            precise.vocab_shard = leaf.vocab_shard
        return precise

    def checkpoint_contexts(self):
        """For torch.utils.checkpoint: nothing more around the forward, the same modes around the recomputation."""
        contexts = [self.streams.recomputation()]
        if self.split is not None and self.split.attention is not None:
            contexts.append(self.split.attention.context_fn()[1])
        if self.store is not None:
            contexts.append(self.store.checkpoint_contexts()[1])
        return contextlib.nullcontext(), _All(contexts)

    @contextlib.contextmanager
    def random(self):
        """Around a forward: the model's random numbers, see streams.py. A single process draws from the user's stream, as it always did."""
        if self.mesh.world.size == 1 or not self.model.training:
            yield
            return
        with self.streams.active():
            yield

    # -- a step ----------------------------------------------------------------------------------------------------------------------------

    def prepare(self, batch, microbatches, count, sharded, separate=False):
        """The Microbatches of this rank. separate: each is a batch of its own (PipeDream), whose loss is a mean over its own targets."""
        check_microbatches(microbatches)
        counter = count or count_targets
        if sharded:
            pieces, totals = self._prepare_sharded(batch, microbatches, counter)
        else:
            batch = self._place(batch)
            pieces = split_batch(batch, microbatches, *self.mesh.rows)
            totals = [int(counter(piece.targets)) for piece in split_batch(batch, microbatches, 1, 0)]
        if not separate:
            totals = [sum(totals)] * microbatches
        for piece, total in zip(pieces, totals, strict=True):
            piece.total, piece.count_of = max(total, 1), counter
        return pieces

    def _prepare_sharded(self, batch, microbatches, counter):
        """Ranks have different batches here, so that one may fail alone: the failure travels with the sum of the counts."""
        pieces, counts, problem = [], [0] * microbatches, None
        try:
            pieces = split_batch(self._place(batch), microbatches, 1, 0)
            counts = [int(counter(piece.targets)) for piece in pieces]
        except ValueError as error:
            problem = error
        totals = torch.tensor([*counts, problem is not None], dtype=torch.int64, device=self.device)
        comm.all_reduce(totals, self.mesh.data)
        *totals, problems = totals.tolist()
        if problem is not None:
            raise problem
        if problems:
            raise ValueError(f"[rank {self.mesh.world.rank}] {problems} other ranks could not cut their batches; see the error there")
        return pieces, [total // (self.plan.ring * self.plan.ulysses) for total in totals]

    def _place(self, batch):
        """(inputs, targets) on the device; inputs in the dtype in which is computed."""
        inputs, targets = inputs_and_targets(batch)

        def move(leaf, dtype=None):
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return leaf.to(self.device, dtype if leaf.is_floating_point() else None, non_blocking=True)

        return tree_map(lambda leaf: move(leaf, self.compute_dtype), inputs), tree_map(move, targets)

    @contextlib.contextmanager
    def loss_from(self, loss_fn):
        """A head that is cut leaves its logits so for our cross_entropy, here only."""
        head = self.tensor.head if self.tensor is not None else None
        if head is not None:
            head.sharded_output = loss_fn is cross_entropy
        try:
            yield
        finally:
            if head is not None:
                head.sharded_output = False

    def step(self, batch, loss_fn, microbatches, clip, count, sharded):
        self._check_clip(clip)
        pieces = self.prepare(batch, microbatches, count, sharded, separate=self.plan.schedule == "pipedream")
        for moe in self.moes:
            moe.aux_scale = 1.0 / microbatches
        for reducer in self.reducers.values():
            reducer.zero_grad()
        mark = None if sharded else mark_of(batch)
        alone = clip is None and (self.mesh.data.size == 1 or self.plan.schedule == "pipedream")
        try:
            marks = self._start_marks(mark) if alone else None
            if self.plan.schedule == "pipedream":
                self._check_marks(mark, *marks)  # before the first update
            with self.loss_from(loss_fn):
                run = self._run_passes(pieces, loss_fn)
            if self.plan.schedule == "pipedream":
                return self.reduce_loss(run.losses) / microbatches
            return self.finish_alone(run.losses, mark, *marks) if alone else self.finish(run.losses, clip, mark)
        except BaseException:
            self.clean_up()
            raise

    def _check_clip(self, clip):
        if clip is None:
            return
        if not clip >= 0:
            raise ValueError(f"step(clip={clip!r}): the largest norm, 0 or more; None for no clipping")
        if self.plan.schedule == "pipedream":
            raise ValueError(
                f'step(clip={clip!r}): with schedule "pipedream" the stages step one by one, so there is no norm of the whole gradient. '
                "Use clip=None, or another schedule"
            )

    def _run_passes(self, pieces, loss_fn):
        run, microbatches = StepRun(self, pieces, loss_fn), len(pieces)
        if self.plan.pp > 1:
            schedule = make_schedule(self.plan.schedule, self.plan.pp, microbatches, self.plan.chunks_per_rank)
            run_schedule(schedule, self.mesh.coordinate("pp"), self.mesh.group("pp"), run)
        else:
            for number in range(microbatches):
                run.forward(0, number, None)
                run.backward(0, number, None)
                run.weight(0, number)
                if self.plan.schedule == "pipedream":
                    run.update(0, number)
        return run

    def finish(self, losses, clip, mark):
        """mark: of the batch, see batch.mark_of, or None.

        One all_reduce brings the norm, the loss, the marks and how many ranks used each parameter: like a single process, the optimizer
        passes over those that got no gradient at all.
        """
        self.finish_gradients(self.reducers)
        marks = self._marks(mark)
        squares = torch.zeros_like(marks[0]) if clip is None else self.norm_squared(self.reducers)
        numbers = torch.cat([torch.stack([squares, self.own_loss(losses)]), marks, self._used()])
        comm.all_reduce(numbers, self.mesh.world)
        self._check_marks(mark, numbers[2:4])
        self.norm = None if clip is None else numbers[0].sqrt()
        if self.opt is not None:
            unused = {name for name, users in zip(self.names, numbers[4:].tolist(), strict=True) if not users}
            step_optimizer(self.opt, self.shards, self.clip_factor(clip), unused)
        return numbers[1].clone()

    def finish_alone(self, losses, mark, marks, work):
        """finish() where no other rank has gradients of this rank's parameters and there is no norm.

        The optimizer waits for nobody, so that a pipeline's ranks take their steps while others still work.
        """
        self.finish_gradients(self.reducers)
        self._check_marks(mark, marks, work)
        self.norm = None
        if self.opt is not None:
            kept = {info.name for info in self.infos if info.tied}  # the other stage may have used it
            unused = {name for name, used in zip(self.names, self._used().tolist(), strict=True) if not used} - kept
            step_optimizer(self.opt, self.shards, None, unused)
        return self.reduce_loss(losses)

    def _marks(self, mark):
        return torch.tensor([mark or 0.0, float(mark or 0) ** 2], dtype=torch.float64, device=self.device)

    def _start_marks(self, mark):
        marks = self._marks(mark)
        return marks, comm.all_reduce(marks, self.mesh.world, async_op=True)

    def _check_marks(self, mark, marks, work=None):
        """marks: sums over the ranks of mark and of its square; marks are equal where n * sum(mark^2) = sum(mark)^2."""
        if work is not None:
            work.wait()
        if mark is not None and self.mesh.world.size * float(marks[1]) != float(marks[0]) ** 2:
            raise ValueError(
                f"[rank {self.mesh.world.rank}] step: the ranks were given different batches. Give every rank the whole batch, "
                "or say sharded=True when each data rank has its own; no parameter was changed"
            )

    def _used(self):
        """1 for each parameter of the model that got a gradient on this rank, in the order of `names`."""
        used = {param for reducer in self.reducers.values() for param in reducer.used}
        names = {info.name for info in self.infos if info.param in used}
        return torch.tensor([name in names for name in self.names], dtype=torch.float64, device=self.device)

    def finish_gradients(self, reducers):
        for stage in sorted(reducers):
            reducers[stage].wait()
        self._exchange_ties()

    def norm_squared(self, reducers):
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for reducer in reducers.values():
            for bucket in reducer.buckets:
                total += bucket.norm_squared()
        return total

    def clip_factor(self, clip):
        if clip is None:
            return None
        factor = (clip / (self.norm + 1e-6)).clamp(max=1.0)
        if factor.device.type == "cpu" and factor.item() == 1.0:
            return None  # saves a pass over all gradients; where it would cost waiting for the device, they are multiplied by 1
        return factor

    def own_loss(self, losses):
        """Sum of this rank's losses, zero where another rank has the same."""
        if not losses or self.mesh.coordinate("tp"):
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack([loss.detach().double() for loss in losses]).sum()

    def reduce_loss(self, losses):
        loss = self.own_loss(losses)
        comm.all_reduce(loss, self.mesh.world)
        return loss

    def _exchange_ties(self):
        """Gradients of a weight that two stages hold: each gets the sum of both, first stage + last stage."""
        group = self.mesh.group("pp")
        works = []
        for tag, tie in enumerate(self.ties):
            if tie.here is None:
                own = tie.bucket.gradient().contiguous()
                other = torch.empty_like(own)
                works.append((tie, own, other, comm.irecv(other, tie.peer, group, tag), comm.isend(own, tie.peer, group, tag)))
        for tie, own, other, received, sent in works:
            received.wait()
            sent.wait()
            total = own + other if tie.first else other + own
            tie.bucket.gradient().copy_(total)
        for tie in self.ties:
            if tie.here is not None and tie.first:
                total = tie.bucket.gradient() + tie.here.gradient()
                tie.bucket.gradient().copy_(total)
                tie.here.gradient().copy_(total)

    # -- without gradients -----------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch, loss_fn, microbatches, count, sharded):
        pieces = self.prepare(batch, microbatches, count, sharded)
        with self.loss_from(loss_fn):
            return self.reduce_loss(self._evaluate(pieces, loss_fn))

    def _evaluate(self, pieces, loss_fn):
        losses, group = [], self.mesh.group("pp")
        rank_of = self.rank_of_stage
        for number, piece in enumerate(pieces):
            hidden = None
            for stage in range(self.plan.virtual_stages):
                if stage in self.mine:
                    if stage and hidden is None:
                        shape, dtype = self.shape_of_input(stage, piece)
                        hidden = torch.empty(shape, dtype=dtype, device=self.device)
                        comm.irecv(hidden, rank_of(stage - 1), group, number).wait()
                    with self.in_pass("evaluate", stage), self.modes((stage, number)), self.random():
                        hidden = self.call(stage, piece, hidden)
                        if stage == self.plan.virtual_stages - 1:
                            losses.append(self.loss(hidden, piece, loss_fn))
                    if stage + 1 < self.plan.virtual_stages and stage + 1 not in self.mine:
                        comm.isend(hidden.contiguous(), rank_of(stage + 1), group, number).wait()
                        hidden = None
        return losses

    def rank_of_stage(self, stage):
        return make_schedule(self.plan.schedule, self.plan.pp, 1, self.plan.chunks_per_rank).placement[stage]

    def shape_of_input(self, stage, piece):
        """(shape, dtype) of the hidden state that `stage` receives. No communication, no memory, and no random number is used up."""
        with self.streams.kept(), self.units.stand_ins() if self.units is not None else contextlib.nullcontext():
            return self.stages.shape_of_input(stage, lambda: piece.call(self.model))


class StepRun:
    """The passes of one step, as pipeline.executor asks for them."""

    def __init__(self, engine, pieces, loss_fn):
        self.engine, self.pieces, self.loss_fn = engine, pieces, loss_fn
        self.saved = {}  # (stage, microbatch) -> (x, y or loss)
        self.losses = []
        self.shapes = {}
        self.stash = None
        if engine.plan.schedule == "pipedream":
            self.stash = {stage: WeightStash(list(reducer.place)) for stage, reducer in engine.reducers.items()}

    def forward(self, stage, microbatch, x):
        engine, piece = self.engine, self.pieces[microbatch]
        if x is not None:
            x.requires_grad_(x.is_floating_point())
        version = self.stash[stage].saving(microbatch) if self.stash is not None else contextlib.nullcontext()
        with version, engine.in_pass("forward", stage), engine.modes((stage, microbatch)), engine.random():
            y = engine.call(stage, piece, x)
            if stage == engine.plan.virtual_stages - 1:
                y = engine.loss(y, piece, self.loss_fn)
                self.losses.append(y.detach())
        self.saved[stage, microbatch] = x, y
        return None if stage == engine.plan.virtual_stages - 1 else y.detach()

    def backward(self, stage, microbatch, dy):
        engine = self.engine
        x, y = self.saved.pop((stage, microbatch))
        if engine.reducers[stage].eager:
            engine.reducers[stage].begin_microbatch(self.is_last(microbatch))
        if y.requires_grad:  # not where all up to here is frozen
            with self._version(stage, microbatch), engine.in_pass("backward", stage):
                torch.autograd.backward(y, dy)
        elif stage == engine.plan.virtual_stages - 1:
            raise ValueError(f"[rank {engine.mesh.world.rank}] step: the loss depends on no parameter that is trained")
        if x is None:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    def weight(self, stage, microbatch):
        engine = self.engine
        if engine.store is not None:
            engine.store.flush((stage, microbatch))
        engine.reducers[stage].finish_microbatch(self.is_last(microbatch))

    def is_last(self, microbatch):
        """Whether gradients are summed over the ranks after it."""
        return microbatch == len(self.pieces) - 1 or self.stash is not None

    def update(self, stage, microbatch):
        """PipeDream: this stage's optimizer takes a step with this microbatch's gradient."""
        engine = self.engine
        engine.finish_gradients({stage: engine.reducers[stage]})
        self.stash[stage].drop(microbatch)
        self.stash[stage].detach_from_stash()
        step_optimizer(engine.opt, [shard for shard in engine.shards if shard.stage == stage], None)
        engine.reducers[stage].zero_grad()

    def _version(self, stage, microbatch):
        return self.stash[stage].using(microbatch) if self.stash is not None else contextlib.nullcontext()

    def input_like(self, stage, microbatch):
        piece = self.pieces[microbatch]
        key = stage, piece.shapes()
        if key not in self.shapes:
            self.shapes[key] = self.engine.shape_of_input(stage, piece)
        return *self.shapes[key], self.engine.device


class _All:
    """Several contexts as one."""

    def __init__(self, contexts):
        self.contexts, self.stack = contexts, contextlib.ExitStack()

    def __enter__(self):
        for context in self.contexts:
            self.stack.enter_context(context)

    def __exit__(self, *details):
        return self.stack.__exit__(*details)


def _describe(value):
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
