"""`fewshot_training`: few-shot models trained and tested within a memory budget, by the gradient of whole episodes."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from catalog.analyses.analysis import Analysis, AnalysisStage, Column, Figure
from catalog.brief import Brief
from catalog.record import FieldError, option, record
from catalog.requests.collection import MAX_SEED
from catalog.requests.inputs import readable, require_path

Method = Literal[
    "ProtoNet", "CTX_softmax", "CTX_cosine", "FSCT_softmax", "FSCT_cosine", "ProFOCT_softmax", "ProFOCT_cosine"
]
Backbone = Literal["Conv4", "Conv6", "ResNet18", "ResNet34"]
Optimiser = Literal["AdamW", "Adam", "SGD"]

_MOMENTUM = 0.9
_WIDTH = 64
_MOST = {"width": 2**16, "n_episode": 10**9, "num_epoch": 10**9, "test_iter": 10**9, "seed": MAX_SEED}
_MOST |= dict.fromkeys(("n_way", "k_shot", "n_query", "gradient_accumulation_steps"), 10**9)
_MOST |= {"weight_decay": 10**6, "momentum": 1}
"""Bounds far beyond any training, within which bytes and episodes can be counted, and weights are finite."""
_MOST_EPISODES = 2**32
"""Those of all epochs: each training episode then has a seed of its own for what it draws."""
_MOST_PENALTY = 10**6


@record
class Vic:
    """Weights of the penalty of `ProFOCT` on variance and covariance of the support's features."""

    alpha: float = 0.5
    """Weight of the variance term."""
    beta: float = 9.0
    """Weight of the invariance term, which is the constant 0: there is no second view of an image, so β has no effect
    on the gradient."""
    gamma: float = 0.5
    """Weight of the covariance term."""
    dynamic: bool = True
    """Whether the weights follow the shares of the loss's parts after each episode."""
    threshold: float = 1.0
    """τ: standard deviation of a feature from which the variance term is 0; 1 as in VICReg."""

    def __post_init__(self) -> None:
        """Refuse negative weights, and those by which float32 overflows."""
        for name in ("alpha", "beta", "gamma", "threshold"):
            number = getattr(self, name)
            if not 0 <= number <= _MOST_PENALTY:
                raise FieldError(name, f"is {number}; take 0 to {_MOST_PENALTY:,}")


@record
class FewshotTrainingParams:
    """Options of the few-shot training."""

    method: Method = "FSCT_cosine"
    """The head, and the similarity of its attention: prototypes by means (`ProtoNet`), CrossTransformers (`CTX`), the
    few-shot transformer (`FSCT`), or that with a penalty on variance and covariance (`ProFOCT`). The attention of
    `FSCT_softmax` and `ProFOCT_softmax` goes over a single key, so that it is the constant 1."""
    backbone: Backbone = "Conv4"
    """The network that makes features of images."""
    width: int = _WIDTH
    """Channels of a block of `Conv4` and `Conv6`."""
    FETI: bool = False
    """Whether a ResNet begins with a 5×5 convolution without pooling, in place of ImageNet's 7×7."""
    pool: Literal["gap", "flatten"] = "gap"
    """Features of an image: the mean of each channel of the last map, or all its numbers. `CTX` takes the map."""
    ctx: Literal["spatial", "shots"] = "spatial"
    """Attention of `CTX`: over all positions of a class's support images, as published, or over its images alone."""
    weights: str | None = None
    """A safetensors file of backbone and head, or of the backbone alone, that training begins with. Names of a
    ResNet are those of torchvision. With `num_epoch: 0` it is tested as it is."""
    n_way: int = 5
    """Classes of an episode."""
    k_shot: int = 5
    """Support images of each class."""
    n_query: int = 16
    """Query images of each class."""
    n_episode: int = 200
    """Training episodes of an epoch."""
    num_epoch: int = 50
    """Epochs; after each the model is tested on validation classes, and the best one is kept. 0 trains nothing."""
    test_iter: int = 600
    """Episodes of each test: on validation classes, and at the end on test classes."""
    gradient_accumulation_steps: int = 2
    """Slices of one episode, at least so many, each of which goes through the network alone; the gradient stays that
    of the undivided episode. Under `batch_norm: whole` of a network with BatchNorm, queries are sliced in the head
    alone, and with `use_vic_on_attention` nothing is."""
    batch_norm: Literal["whole", "frozen", "per_chunk"] = "whole"
    """`whole`: statistics of all images of the episode, which then pass together, with blocks computed again in the
    backward pass where memory asks for it; `frozen`: running statistics, so that slices are exact. `per_chunk` is
    refused: statistics of each slice give another gradient."""
    use_amp: bool = True
    """Whether the network computes in 16 bits where the device does: bfloat16, else float16 with a loss scale. A device
    that does neither computes in float32, and the summary says so."""
    amp_dtype: Literal["auto", "bf16", "fp16"] = "auto"
    """The 16 bits of `use_amp`."""
    use_vic_on_attention: bool = False
    """Whether the penalty of `ProFOCT` takes the output of the attention too, at half its weight."""
    vic: Vic = option(Vic)
    """Weights of that penalty."""
    optimiser: Optimiser = option("AdamW", known_as="optimization")
    """Rule of the steps, one after each episode."""
    learning_rate: float = 1e-3
    """Its learning rate."""
    weight_decay: float = 1e-5
    """Its weight decay."""
    momentum: float = _MOMENTUM
    """Momentum of `SGD`."""
    seed: int = 4040
    """Seed of weights, episodes and dropout: episode i is the same, whatever came before it."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of weights and steps; `float64` computes without `use_amp`."""
    decomposition: ClassVar[Literal["none"]] = "none"
    """Parts of the eigendecompositions that are asked for: none, since nothing is collected."""

    def __post_init__(self) -> None:
        """Refuse numbers outside their meaning, and options without use beside the others."""
        self._require_bounds()
        if self.batch_norm == "per_chunk":
            raise FieldError(
                "batch_norm",
                "is `per_chunk`: statistics of each slice give the gradient of another function, not of the episode; "
                "take `whole`, or `frozen` for slices that are exact",
            )
        if self.FETI and not self.backbone.startswith("ResNet"):
            raise FieldError("FETI", f"is a form of the ResNets, and `backbone` is `{self.backbone}`; leave it out")
        if self.num_epoch == 0 and self.weights is None:
            raise FieldError("num_epoch", "is 0, which tests `weights` alone; give a file of weights, or 1 or more")
        if (episodes := self.num_epoch * (self.n_episode + self.test_iter)) > _MOST_EPISODES:
            more = f"makes {episodes:,} episodes of training and validation; take at most {_MOST_EPISODES:,}"
            raise FieldError("num_epoch", f"is {self.num_epoch:,}, which {more}")
        self._require_used()
        self._require_vic()

    def _require_bounds(self) -> None:
        for name in ("width", "n_way", "k_shot", "n_query", "n_episode", "test_iter", "gradient_accumulation_steps"):
            # one episode has no interval
            least = 2 if name in ("n_way", "test_iter") else 1
            if getattr(self, name) < least:
                raise FieldError(name, f"is {readable(getattr(self, name))}; take {least} or more")
        if not 0 < self.learning_rate < math.inf:
            raise FieldError("learning_rate", f"is {readable(self.learning_rate)}; take a finite number above 0")
        for name in ("num_epoch", "seed", "weight_decay", "momentum"):
            number = getattr(self, name)
            # whole numbers that no float holds are bounded below
            if not 0 <= number < math.inf:
                raise FieldError(name, f"is {readable(number)}; take a finite number of 0 or more")
        if self.width != _WIDTH and not self.backbone.startswith("Conv"):
            raise FieldError("width", f"is that of Conv nets, and `backbone` is `{self.backbone}`; leave it out")
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise FieldError(name, f"is {readable(getattr(self, name))}; take at most {most:,}")
        if self.weights is not None:
            require_path("weights", self.weights)

    def _require_used(self) -> None:
        """Refuse options that are without effect beside the others."""
        for name, untouched, needed in (
            ("vic", self.penalised or self.vic == Vic(), "`ProFOCT`"),
            ("ctx", self.method.startswith("CTX") or self.ctx == "spatial", "`CTX`"),
        ):
            if not untouched:
                raise FieldError(name, f"is an option of {needed}, and `method` is `{self.method}`; leave it out")
        if self.momentum != _MOMENTUM and self.optimiser != "SGD":
            raise FieldError("momentum", f"is an option of `SGD`, and `optimiser` is `{self.optimiser}`; leave it out")
        if self.amp_dtype != "auto" and not self.use_amp:
            raise FieldError("amp_dtype", f"is `{self.amp_dtype}`, and `use_amp` is false; leave one of them out")

    def _require_vic(self) -> None:
        if self.use_vic_on_attention and not self.penalised:
            raise FieldError(
                "use_vic_on_attention",
                f"is an option of `ProFOCT`, and `method` is `{self.method}`; leave it out, or take `ProFOCT_cosine`",
            )
        if self.penalised and self.n_way * self.k_shot < 2:
            raise FieldError("k_shot", "leaves one support image, which has no variance; take more images or classes")

    @property
    def penalised(self) -> bool:
        """Whether the loss has the penalty on variance and covariance."""
        return self.method.startswith("ProFOCT")

    @property
    def images(self) -> int:
        """Images of one episode."""
        return self.n_way * (self.k_shot + self.n_query)


@record
class ComponentMetrics(Brief):
    """One part of the training: a stage of the backbone, the head, the regulariser or the optimiser."""

    planned_bytes: int | None
    """Bytes that the plan foresees for it: what autograd keeps of it at once, or the moments of the optimiser."""
    measured_bytes: int | None
    """The same, counted in the first step of this attempt; null where none was made."""
    output_shape: tuple[int, ...] | None
    """Shape of what a stage of the backbone makes of one image."""


@record
class EpisodeAccuracy:
    """Accuracy on episodes of one split, and what it must be compared with."""

    split: str
    """`validation` or `test`."""
    episodes: int
    """Episodes that were tested."""
    accuracy: float
    """Mean share of queries that were classified rightly."""
    half_width: float
    """1.96 s/√episodes, half of the 95 % interval."""
    pixels: float
    """Accuracy of the nearest mean of the images' own pixels on the same episodes."""
    pixels_half_width: float
    """Half of its 95 % interval."""
    untrained: float
    """Accuracy of the nearest mean of features of the untrained network on the same episodes."""
    untrained_half_width: float
    """Half of its 95 % interval."""


@record
class FewshotTrainingSummary(Brief):
    """The whole training."""

    components: int
    """Parts of the training, each with a row."""
    parameters: int
    """Trainable parameters of backbone and head."""
    accuracies: tuple[EpisodeAccuracy, ...]
    """Accuracy of the model that is kept, on each split that was tested."""
    test_accuracy: float
    """That on test classes."""
    test_half_width: float
    """Half of its 95 % interval."""
    episodes: int
    """Training episodes, over all epochs."""
    best_epoch: int | None
    """Epoch, from 1, after which the kept model stood; null without training."""
    losses: tuple[float, ...]
    """Mean loss of the episodes of each epoch."""
    vic: Vic | None
    """Weights of the penalty after the last episode; null without a penalty."""
    slices: int
    """Slices that the images of an episode went through the backbone in."""
    head_slices: int
    """Slices that its queries went through the head in."""
    checkpointing: bool
    """Whether blocks were computed again in the backward pass."""
    exact: str
    """Why the gradient is that of the undivided episode."""
    compute_dtype: str
    """Precision that the network computed in."""
    amp_fallback: str | None
    """Why that is not 16 bits, where `use_amp` asks for these."""
    skipped_steps: int
    """Steps that were left out since a gradient in float16 was not finite."""
    predicted_peak_bytes: int | None
    """Peak of the training by the plan; on a processor with what the process held before, as the measured one."""
    measured_peak_bytes: int | None
    """Peak that was measured meanwhile, by the same measure as the plan's stages."""
    dense_covariance_bytes: int | None
    """Bytes that a covariance matrix of the features, its square and its gradients would have added; null without a
    penalty."""
    model_sha256: str
    """SHA-256 of the kept weights: of a line for each tensor, its name and the SHA-256 of dtype, shape and bytes."""


def _sentence(options: Mapping[str, Any]) -> str:
    steps = f"{options['num_epoch']} epochs of {options['n_episode']} episodes with {options['optimiser']}"
    return (
        f"the accuracy of {options['method']} on {options['backbone']} over {options['test_iter']} test episodes of "
        f"{options['n_way']} classes with {options['k_shot']} support and {options['n_query']} query images each, "
        f"after {steps} (learning rate {options['learning_rate']:g}), each step by the gradient of the whole episode"
    )


_WORKS = {
    "ProtoNet": """\
@inproceedings{snell2017prototypical,
  title = {Prototypical Networks for Few-shot Learning},
  author = {Snell, Jake and Swersky, Kevin and Zemel, Richard},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2017}
}""",
    "CTX": """\
@inproceedings{doersch2020crosstransformers,
  title = {{CrossTransformers}: Spatially-aware Few-shot Transfer},
  author = {Doersch, Carl and Gupta, Ankush and Zisserman, Andrew},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2020}
}""",
    "FSCT": """\
@article{nguyen2023fewshot,
  title = {Enhancing Few-shot Image Classification with Cosine Transformer},
  author = {Nguyen, Quang-Huy and Nguyen, Cuong Q. and Le, Dung D. and Pham, Hieu H.},
  journal = {IEEE Access},
  doi = {10.1109/ACCESS.2023.3298299},
  year = {2023}
}""",
}
_VICREG = """\
@inproceedings{bardes2022vicreg,
  title = {{VICReg}: Variance-Invariance-Covariance Regularization for Self-Supervised Learning},
  author = {Bardes, Adrien and Ponce, Jean and LeCun, Yann},
  booktitle = {International Conference on Learning Representations},
  year = {2022}
}"""


def _works(options: Mapping[str, Any]) -> tuple[str, ...]:
    head = options["method"].partition("_")[0]
    return (_WORKS["FSCT"], _VICREG) if head == "ProFOCT" else (_WORKS[head],)


def _closing(summary: Mapping[str, Any]) -> str:
    tests = ", ".join(
        f"{each['split']} accuracy {each['accuracy']:.1%} ± {each['half_width']:.1%} (pixels {each['pixels']:.1%}, "
        f"untrained {each['untrained']:.1%}) over {each['episodes']} episodes"
        for each in summary["accuracies"]
    )
    divided = f"slices={summary['slices']} head_slices={summary['head_slices']}"
    return (
        f"episodes={summary['episodes']} {tests}; {divided} checkpointing={summary['checkpointing']} "
        f"compute_dtype={summary['compute_dtype']} skipped_steps={summary['skipped_steps']} "
        f"peak_bytes={summary['measured_peak_bytes']} planned_bytes={summary['predicted_peak_bytes']}"
    )


def _row(metrics: Mapping[str, Any]) -> str:
    return f"planned_bytes={metrics['planned_bytes']} measured_bytes={metrics['measured_bytes']}"


FEWSHOT_TRAINING = Analysis(
    kind="fewshot_training",
    title="Few-shot training",
    description="Train and test a few-shot model within a memory budget, by the gradient of the undivided episode.",
    implementation="engine.analyses.fewshot_training:FewshotTraining",
    estimate="engine.analyses.fewshot_training:estimate_training",
    params=FewshotTrainingParams,
    metrics=ComponentMetrics,
    summary=FewshotTrainingSummary,
    inputs=("data",),
    data_sources=("strokes", "image_splits"),
    unit="component",
    stages=(
        AnalysisStage(name="training", planned="training", share=0.8),
        AnalysisStage(name="fewshot_training", planned="testing", share=0.2),
    ),
    columns=(
        Column("metrics.planned_bytes", "planned", "Planned", "Bytes that the plan foresees", form="bytes"),
        Column("metrics.measured_bytes", "measured", "Measured", "Bytes counted in the first step", form="bytes"),
        Column("observed.seconds", "seconds", "Seconds", "The bar compares the components", relative=True),
    ),
    figures=(
        Figure("Accuracy, {split}", "{accuracy:percent}",
               "± {half_width:percent}; pixels {pixels:percent}, untrained {untrained:percent}",
               "Mean over {episodes} episodes with half of its 95% interval, beside the nearest mean of the pixels "
               "and of an untrained network's features on the same episodes.",
               "{split}: {accuracy:percent} ± {half_width:percent} (pixels {pixels:percent}, untrained "
               "{untrained:percent})", each="accuracies"),
        Figure("Episodes", "{episodes:count}", "{slices:slice|slices} of images, {head_slices:slice|slices} of queries",
               "Training episodes, each with one step by the gradient of the undivided episode.",
               "{episodes:count} training episodes"),
        Figure("Memory", "{measured_peak_bytes:bytes}", "{predicted_peak_bytes:bytes} planned",
               "The peak of the training, beside the one that was planned.",
               "a peak of {measured_peak_bytes:bytes} ({predicted_peak_bytes:bytes} planned)"),
    ),
    sentence=_sentence,
    works=_works,
    log_row=_row,
    log_summary=_closing,
    damped=False,
)  # fmt: skip
