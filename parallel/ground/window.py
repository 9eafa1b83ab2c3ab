"""Calls of step() whose gradients are added up before one update.

The mean runs over the targets of all these calls, as if their batches were one, but how many these are is
known at the last call only. So each call's loss is weighted relative to the first call, and the sum of the
gradients is divided at the end (T_k: targets of call k that count, L_k: mean loss over them):

    call          0              1                2, update
    backward of   L_0            T_1/T_0 L_1      T_2/T_0 L_2
    then          gradients * T_0 / (T_0 + T_1 + T_2)  =  sum of T_k g_k / sum of T_k

Weights near 1 keep gradients of 16 bits in their range, which sums over targets would leave. Load-balance
losses of experts are weighted with their call's loss.
"""

__all__ = ["Window"]


class Window:
    """The calls so far."""

    def __init__(self) -> None:
        self.discard()

    def discard(self) -> None:
        """The next call is a first one."""
        self.calls = 0
        self.reference = self.targets = 0.0  # T_0, or 1 for none; the sum of all T_k
        self.scale = 1.0  # of the losses

    @property
    def is_empty(self) -> bool:
        return self.calls == 0

    def weight(self, targets: float, update: bool, scale: float = 1.0) -> float:
        """The factor of the loss of a call with so many targets. update: it is the last one. scale: of a
        GradScaler; ValueError where it is not that of the calls before.
        """
        if self.is_empty:
            return 1.0 if update or targets else 0.0
        if scale != self.scale:
            raise ValueError(
                f"step: gradients of {self.calls} calls wait, which were scaled by {self.scale}, and this "
                f"call scales by {scale}: give all calls of one update the same scaler, and leave "
                "scaler.update() to step"
            )
        return targets / self.reference

    def add(self, targets: float, scale: float = 1.0) -> None:
        """A call that leaves its gradients."""
        self.scale = scale
        if self.is_empty:
            self.reference = targets or 1.0
        self.calls += 1
        self.targets += targets

    def factor(self, targets: float) -> float:
        """What the sum of all gradients is multiplied by, at the last call; 1.0 where it is the only one."""
        return 1.0 if self.is_empty else self.reference / (self.targets + targets or 1.0)
