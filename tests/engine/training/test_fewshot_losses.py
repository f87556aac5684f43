"""Few-shot losses by every exact way: gradients against autograd of the undivided episode, under dropout too."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.fewshot.backbones import make_backbone
from engine.fewshot.episode_loss import EpisodeLoss
from engine.fewshot.heads import make_head
from engine.fewshot.regulariser import VicWeights
from engine.training.batch_statistics import freeze_statistics
from engine.training.split_gradients import split_gradients

WAY, SHOT, QUERY = 3, 2, 3
IMAGES = WAY * (SHOT + QUERY)
SIZE = 16


class Dropped(nn.Module):
    """A backbone with dropout after its second block and at its end."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.backbone = make_backbone("Conv4", width=3, channels=1, pool="flatten")
        self.drop = nn.Dropout(dropout)

    def chain(self) -> tuple[nn.Module, ...]:
        blocks = self.backbone.chain()
        return (*blocks[:2], self.drop, *blocks[2:], self.drop)

    def forward(self, images: Tensor) -> Tensor:
        for block in self.chain():
            images = block(images)
        return images


def contrastive(features: Tensor) -> Tensor:
    """Of each image against all others, those of its class being its like."""
    labels = torch.arange(IMAGES) // (SHOT + QUERY)
    near = functional.normalize(features, dim=1) @ functional.normalize(features, dim=1).mT / 0.3
    near = near - torch.diag_embed(torch.full((IMAGES,), 1e3))
    like = (labels[:, None] == labels) & ~torch.eye(IMAGES, dtype=torch.bool)
    return -(near.log_softmax(1) * like).sum() / like.sum()


def episode(method: str, *, penalised: bool, on_attention: bool = False) -> tuple[nn.Module, EpisodeLoss]:
    head = make_head(method, k_shot=SHOT, feature_shape=(3,)).double()
    vic = (VicWeights(2.0, 9.0, 3.0), 1.0) if penalised else None
    loss = EpisodeLoss(
        head=head, n_way=WAY, k_shot=SHOT, n_query=QUERY, vic=vic, on_attention=on_attention, slices=2
    )  # fmt: skip
    return head, loss


Losses = Callable[[Tensor], Tensor | Iterable[Tensor]]
LOSSES: dict[str, Callable[[], tuple[nn.Module, Losses]]] = {
    "ProtoNet": lambda: episode("ProtoNet", penalised=False),
    "FSCT with its penalty": lambda: episode("ProFOCT_cosine", penalised=True),
    "penalty on attention": lambda: episode("ProFOCT_cosine", penalised=True, on_attention=True),
    "contrastive": lambda: (nn.Identity(), contrastive),
}
WAYS = [("frozen", IMAGES, False), ("frozen", 6, False), ("frozen", 1, False), ("frozen", 6, True),
        ("whole", None, False), ("whole", None, True)]  # fmt: skip


def total(loss: Tensor | Iterable[Tensor]) -> Tensor:
    if isinstance(loss, Tensor):
        return loss
    return torch.stack(list(loss)).sum()


@pytest.mark.part(of=24, by=("loss", "batch_norm", "checkpointing"))
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("batch_norm", "chunk", "checkpointing"), WAYS)
def test_gradients_are_those_of_the_undivided_episode(
    batch_norm: str, chunk: int | None, checkpointing: bool, loss: str, dropout: float
) -> None:
    torch.manual_seed(0)
    model, (head, of_features) = Dropped(dropout).double(), LOSSES[loss]()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(), module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    images = torch.rand(IMAGES, 1, SIZE, SIZE, dtype=torch.float64)
    parameters = [*model.parameters(), *head.parameters()]
    torch.manual_seed(7)
    with freeze_statistics(model, wanted=batch_norm == "frozen"):
        # the masks of a chunk are drawn with the chunk
        features = torch.cat([model(piece) for piece in torch.split(images, chunk or IMAGES)])
    truth = torch.autograd.grad(total(of_features(features)), parameters, materialize_grads=True)
    torch.manual_seed(7)
    split_gradients(model, of_features, images, chunk=chunk, batch_norm=batch_norm, checkpointing=checkpointing)  # type: ignore[arg-type]
    largest = max(float(each.abs().max()) for each in truth)
    for parameter, each in zip(parameters, truth, strict=True):
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert float((found - each).abs().max()) <= 1e-10 * largest


LIMITED = """
    import sys
    import torch
    from engine.fewshot.backbones import make_backbone
    from engine.memory.budget import MemoryBudget, map_large_blocks, resident_bytes
    from engine.memory.budget import hold_host
    from engine.training.split_gradients import split_gradients

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_backbone("Conv4", width=32, channels=1).double()
    images = torch.rand(60, 1, 64, 64, dtype=torch.float64)
    map_large_blocks()
    split_gradients(model, lambda z: z.square().mean(), images[:2], batch_norm="frozen")
    model.zero_grad()
    unlimited = MemoryBudget.unlimited()
    hold_host(MemoryBudget(device_bytes=unlimited.device_bytes, host_bytes=resident_bytes() + 160 * 2**20))
    chunk = int(sys.argv[1]) or None
    split_gradients(model, lambda z: z.square().mean(), images, chunk=chunk, batch_norm="frozen")
    print(sum(float(each.grad.square().sum()) for each in model.parameters()))
"""


def limited(chunk: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", textwrap.dedent(LIMITED), str(chunk)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.nightly(covered_by="tests/engine/training/test_training_peak.py::test_the_peak_is_that_of_a_real_step")
def test_under_a_limit_of_the_kernel_chunks_end_and_the_undivided_step_dies() -> None:
    died, ended = limited(0), limited(5)
    assert died.returncode != 0
    assert "can't allocate memory" in died.stderr
    assert ended.returncode == 0, ended.stderr
    torch.manual_seed(0)
    model = make_backbone("Conv4", width=32, channels=1).double()
    images = torch.rand(60, 1, 64, 64, dtype=torch.float64)
    split_gradients(model, lambda features: features.square().mean(), images, batch_norm="frozen")
    truth = sum(float(each.grad.square().sum()) for each in model.parameters() if each.grad is not None)
    assert float(ended.stdout) == pytest.approx(truth, rel=1e-10)
