"""Optimizers that take a number over all parameters, and some that do not, from the formulas of papers."""

import random
import threading

import torch


class _Optimizer(torch.optim.Optimizer):
    """decay: of the weights, beside the gradient."""

    def __init__(self, params, lr=1.0, **options):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, **options})

    def used(self):
        """(group, parameter, gradient, state) of all that have a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    yield group, param, param.grad, self.state[param]


class Prodigy(_Optimizer):
    """Mishchenko and Defazio 2023, algorithm 4: Adam whose step size is estimated from all parameters."""

    def __init__(self, params, lr=1.0, d0=1e-2):
        super().__init__(params, lr)
        self.d, self.beta, self.d0, self.numerator = d0, (0.9, 0.999), d0, 0.0

    @torch.no_grad()
    def step(self, closure=None):
        (b1, b2), d, total = self.beta, self.d, 0.0
        self.numerator *= b2**0.5
        for _, p, g, state in self.used():
            if not state:
                state.update(start=p.clone(), m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["s"] = torch.zeros_like(p)
            self.numerator += (1 - b2**0.5) * d * d * float((g * (state["start"] - p)).sum())
            state["m"].mul_(b1).add_(g, alpha=(1 - b1) * d)
            state["v"].mul_(b2).addcmul_(g, g, value=(1 - b2) * d * d)
            state["s"].mul_(b2**0.5).add_(g, alpha=(1 - b2**0.5) * d * d)
            total += float(state["s"].abs().sum())
        if total:
            self.d = max(self.d, self.numerator / total)
        for group, p, _, state in self.used():
            p.addcdiv_(state["m"], state["v"].sqrt() + d * 1e-8, value=-group["lr"] * d)


class DAdaptSGD(_Optimizer):
    """Defazio and Mishchenko 2023, algorithm 4."""

    def __init__(self, params, lr=1.0, d0=1e-2):
        super().__init__(params, lr)
        self.d, self.first, self.sum = d0, None, 0.0

    @torch.no_grad()
    def step(self, closure=None):
        used = list(self.used())
        if self.first is None:
            self.first = float(sum(g.square().sum() for _, _, g, _ in used)) ** 0.5
        rate = self.d * used[0][0]["lr"] / self.first if used else 0.0
        norm = 0.0
        for _, p, g, state in used:
            if not state:
                state.update(s=torch.zeros_like(p), z=p.clone())
            self.sum += rate * float((g * state["s"]).sum())
            state["s"].add_(g, alpha=rate)
            norm += float(state["s"].square().sum())
        if norm:
            self.d = max(self.d, 2 * self.sum / norm**0.5)
        for _, p, _, state in used:
            p.lerp_(state["z"].sub(state["s"]), 0.1)


class LAMB(_Optimizer):
    """You et al. 2020, with the gradient clipped by the norm of all parameters first, as apex has it."""

    def __init__(self, params, lr=1e-2, most=1.0):
        super().__init__(params, lr, most=most)

    @torch.no_grad()
    def step(self, closure=None):
        norm = float(sum(g.square().sum() for _, _, g, _ in self.used())) ** 0.5
        for group, p, g, state in self.used():
            g = g / max(1.0, norm / group["most"])
            if not state:
                state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
            state["m"].mul_(0.9).add_(g, alpha=0.1)
            state["v"].mul_(0.999).addcmul_(g, g, value=0.001)
            update = state["m"] / (state["v"].sqrt() + 1e-6) + group["weight_decay"] * p
            trust = float(p.norm() / update.norm()) if p.norm() > 0 < update.norm() else 1.0
            p.sub_(update, alpha=group["lr"] * trust)


class Clipped(torch.optim.SGD):
    """Clips by the norm of all gradients in its step."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.3)
        return super().step(closure)


class Listed(_Optimizer):
    """Steps over a list of its own."""

    def __init__(self, params, lr=0.1):
        self.params = list(params)
        super().__init__(self.params, lr)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.params:
            if p.grad is not None:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


class LARS(_Optimizer):
    """You et al. 2017: by layer, so that a part of the parameters is enough. No bias."""

    @torch.no_grad()
    def step(self, closure=None):
        for group, p, g, state in self.used():
            trust = 1e-2 * p.norm() / (g.norm() + 1e-9) if p.dim() > 1 else 1e-2
            state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + trust * g
            p.sub_(state["m"], alpha=group["lr"])


class ScheduleFree(_Optimizer):
    """Defazio et al. 2024, SGD; wants to be told that it trains."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.trains = False

    def train(self):
        self.trains = True

    @torch.no_grad()
    def step(self, closure=None):
        if not self.trains:
            raise RuntimeError("call train() first")
        for group, p, g, state in self.used():
            z, k = state.get("z", p.clone()), state.get("k", 0)
            z = z - group["lr"] * g
            x = (p - 0.1 * state.get("z", p)) / 0.9
            x = x + (z - x) / (k + 1)
            p.copy_(0.9 * x + 0.1 * z)
            state.update(z=z, k=k + 1)


class Drawing(_Optimizer):
    """Langevin dynamics."""

    @torch.no_grad()
    def step(self, closure=None):
        for group, p, g, _ in self.used():
            p.sub_(g, alpha=group["lr"] * 1e-2).add_(torch.randn_like(p), alpha=random.random() * 1e-4)


class Locked(Clipped):
    """Has something that cannot be copied."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.lock = threading.Lock()


class Asking(_Optimizer):
    """Evaluates the loss in its step."""

    def step(self, closure=None):
        return closure()
