"""Models that keep something: buffers changed in forward, weights made from other weights, regions without gradient or in low precision, dropout."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.zoo import Case, case, token_loss
from tests.zoo.plain import Residual


class RunningMean(nn.Module):
    """Subtracts a running mean of the batch that it updates in place, counts its calls, and writes into its activations."""

    seen: Tensor
    mean: Tensor
    limit: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 12), nn.Linear(12, 5)
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("limit", torch.tensor(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.seen += 1
        h = h - self.mean
        h[:, :3] *= 0.5
        h[:, -1] = h[:, 0] + 1
        h.clamp_(max=self.limit).relu_()
        return self.second(h)


@case(mixes_batch=True)
def running_mean() -> Case:
    return {"model": RunningMean(), "args": (torch.randn(13, 10),), "targets": torch.randint(0, 5, (13,)), "loss_fn": F.cross_entropy}


class InPlace(nn.Module):
    """In-place ops and views of the activations alone; no row sees another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(10, 12), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x), inplace=True).add(1.0).mul_(0.5)
        h = self.second(h)
        h[:, :6] += h[:, 6:]
        h.view(-1, 6).masked_fill_(h.view(-1, 6) > 2.0, 0.1)
        h[:, ::2] = torch.sigmoid(h[:, ::2])
        return self.third(h)


@case()
def in_place() -> Case:
    return {"model": InPlace(), "args": (torch.randn(7, 10),), "targets": torch.randn(7, 5), "loss_fn": F.mse_loss}


class MovingTarget(nn.Module):
    """Self-distillation: a teacher that follows the student as an exponential average, run without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.predictor = nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 6)), nn.Linear(6, 6)
        self.teacher = nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 6)).requires_grad_(False)

    def forward(self, x: Tensor, view: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(view)
        guess = self.predictor(self.student(x))
        return F.mse_loss(guess, target) + 0.1 * (guess.detach() * self.student(view)).mean()


@case()
def stop_gradient() -> Case:
    return {"model": MovingTarget(), "args": (torch.randn(13, 10), torch.randn(13, 10))}


class MixedPrecision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(30, 12), nn.ModuleList(Residual(12) for _ in range(2)), nn.Linear(12, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks:
                h = block(h)
        return self.head(h.to(self.head.weight.dtype))


@case(fp32=2e-2)  # gradients of weights are summed over the batch in bfloat16, which carries three digits
def autocast_region() -> Case:
    return {"model": MixedPrecision(), "args": (torch.randint(0, 30, (12, 5)),), "targets": torch.randint(0, 30, (12, 5)), "loss_fn": token_loss}


@case()
def spectral_norm() -> Case:
    layers = (parametrizations.spectral_norm(nn.Linear(10, 12)), nn.ReLU(), parametrizations.spectral_norm(nn.Linear(12, 5)))
    return {"model": nn.Sequential(*layers), "args": (torch.randn(13, 10),), "targets": torch.randint(0, 5, (13,)), "loss_fn": F.cross_entropy}


@case()
def weight_norm() -> Case:
    layers = (parametrizations.weight_norm(nn.Linear(10, 12)), nn.Tanh(), parametrizations.weight_norm(nn.Linear(12, 5)))
    return {"model": nn.Sequential(*layers), "args": (torch.randn(13, 10),), "targets": torch.randint(0, 5, (13,)), "loss_fn": F.cross_entropy}


class Dropping(nn.Module):
    def __init__(self, rate: float = 0.2) -> None:
        super().__init__()
        self.embedding, self.drop, self.rate = nn.Embedding(30, 16), nn.Dropout(rate), rate
        self.qkv, self.out, self.block, self.head = nn.Linear(16, 48), nn.Linear(16, 16), Residual(16), nn.Linear(16, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.drop(self.embedding(tokens))
        rows, length, dim = h.shape
        q, k, v = (z.view(rows, length, 2, dim // 2).transpose(1, 2) for z in self.qkv(h).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.rate if self.training else 0.0)
        h = h + F.dropout(self.out(mixed.transpose(1, 2).reshape(rows, length, dim)), self.rate, self.training)
        return self.head(self.drop(self.block(h)))


@case(random=True)
def dropout() -> Case:
    return {"model": Dropping(), "args": (torch.randint(0, 30, (12, 5)),), "targets": torch.randint(0, 30, (12, 5)), "loss_fn": token_loss}
