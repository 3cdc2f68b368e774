"""Every way that a loss may depend on the batch: weighted means, sums, penalties, a loss of the model's own, rows compared with each other."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import Case, case, token_loss
from tests.zoo.plain import Residual, TiedLanguageModel, perceptron

LENGTHS = torch.tensor([6, 1, 0, 0, 0, 0, 3, 6, 5, 2, 6, 1, 4])  # valid tokens of each row: whole shards of the batch have none


def tokens() -> Case:
    return {"model": TiedLanguageModel(), "args": (torch.randint(0, 67, (13, 6)),), "targets": torch.randint(0, 67, (13, 6))}


@case()
def ignored_tokens() -> Case:
    made = tokens()
    made["targets"] = made["targets"].masked_fill(torch.arange(6) >= LENGTHS[:, None], -100)
    return {**made, "loss_fn": token_loss}


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


@case()
def label_smoothing() -> Case:
    return {**tokens(), "loss_fn": smoothed}


def weighted_by_class(logits: Tensor, targets: Tensor) -> Tensor:
    weight = torch.linspace(0.2, 3.0, logits.shape[-1], dtype=logits.dtype, device=logits.device)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=weight)


@case()
def class_weights() -> Case:
    return {**tokens(), "loss_fn": weighted_by_class}


def masked_mean(logits: Tensor, targets: dict[str, Tensor]) -> Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), targets["labels"].flatten(), reduction="none").view_as(targets["mask"])
    return (each * targets["mask"]).sum() / targets["mask"].sum().clamp(min=1)


@case()
def mean_over_a_mask() -> Case:
    made = tokens()
    made["targets"] = {"labels": made["targets"], "mask": (torch.arange(6) < LENGTHS[:, None]).float()}
    return {**made, "loss_fn": masked_mean}


def two_tasks(output: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    kinds, value = targets
    return 0.1 * F.cross_entropy(output[:, :4], kinds, reduction="sum") + F.huber_loss(output[:, 4], value)


@case()
def sum_and_mean() -> Case:
    targets = (torch.randint(0, 4, (14,)), torch.randn(14))
    return {"model": perceptron(), "args": (torch.randn(14, 10),), "targets": targets, "loss_fn": two_tasks}


def distilled(output: Tensor, targets: Tensor) -> Tensor:
    return F.kl_div(output.log_softmax(-1), targets.softmax(-1), reduction="batchmean") + F.binary_cross_entropy_with_logits(
        output, targets.sigmoid()
    )


@case()
def distillation() -> Case:
    return {"model": perceptron(), "args": (torch.randn(12, 10),), "targets": torch.randn(12, 5), "loss_fn": distilled}


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(40, 12), Residual(12), nn.Linear(12, 40)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.block(self.embedding(tokens)))
        return logits if labels is None else token_loss(logits[:, :-1], labels[:, 1:])


@case()
def returns_its_loss() -> Case:
    ids = torch.randint(0, 40, (13, 7))
    return {"model": OwnLoss(), "args": (), "kwargs": {"tokens": ids, "labels": ids.clone()}}


class Regularised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        penalty = sum(weight.pow(2).sum() for weight in self.net.parameters())
        return F.cross_entropy(self.net(x), labels) + 1e-3 * penalty


@case()
def parameter_penalty() -> Case:
    return {"model": Regularised(), "args": (torch.randn(12, 10), torch.randint(0, 5, (12,)))}


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = perceptron(10, 8), perceptron(6, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return self.scale.exp() * a @ b.T


def contrast(logits: Tensor) -> Tensor:
    pairs = torch.arange(logits.shape[0], device=logits.device)
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def contrast_loss(logits: Tensor, targets: None) -> Tensor:
    return contrast(logits)


@case(mixes_batch=True)
def contrastive() -> Case:
    return {"model": TwoTowers(), "args": (torch.randn(13, 10), torch.randn(13, 6)), "loss_fn": contrast_loss}
