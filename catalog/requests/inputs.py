"""Inputs of a job: the model, the data and the task that joins them.

``factory`` and ``directory``/``file`` name things of the machine that runs the job. They work
in the CLI; the service takes them only where its operator lists them.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from catalog.record import FieldError, Tagged, option, record
from catalog.requests.collection import MAX_SEED

Loss = Literal["cross_entropy", "mse", "bce", "model"]
TaskType = Literal[
    "classification",
    "causal_lm",
    "masked_lm",
    "sequence_classification",
    "token_classification",
    "regression",
    "sentence_embedding",
    "embedding",
]
EMBEDDINGS = ("sentence_embedding", "embedding")
"""Tasks of a Gaussian model of the outputs themselves: targets play no part."""

_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)

_USUAL_LOSS: dict[str, Loss] = {
    "classification": "cross_entropy",
    "causal_lm": "cross_entropy",
    "masked_lm": "cross_entropy",
    "sequence_classification": "cross_entropy",
    "token_classification": "cross_entropy",
    "regression": "mse",
    "sentence_embedding": "mse",
    "embedding": "mse",
}


@record
class BuiltinModel:
    """A small model that Kronoscope trains itself, once, on real data."""

    source: Literal["builtin"]
    """Tells this source from the others: `builtin`."""
    name: Literal["digits_cnn", "digits_mlp", "tiny_gpt"]
    """`digits_cnn` and `digits_mlp` classify scikit-learn's digits; `tiny_gpt` models English bytes."""


@record
class AdaptableModel:
    """A checkpoint that an adapter may be applied to."""

    adapter: str | None = None
    """A LoRA adapter to apply to the model: a folder (`/…`, `./…`, `../…` or `~…`), or `owner/name` on the hub."""
    adapter_revision: str | None = None
    """A branch, tag or commit of an adapter on the hub; pinned to a commit when it is fetched."""
    adapter_merged: bool = False
    """Whether the adapter is added into the model's weights, all of which are then measured. By default the model stays
    frozen beside it, and what PEFT trains is measured."""

    def __post_init__(self) -> None:
        """Refuse an adapter without a name, and settings of an adapter that is not there."""
        if self.adapter is not None:
            require_path("adapter", self.adapter)
        if self.adapter_revision is not None and (self.adapter is None or is_path(self.adapter)):
            raise FieldError("adapter_revision", "is for an adapter of the hub (`adapter: owner/name`); leave it out")
        if self.adapter_merged and self.adapter is None:
            raise FieldError("adapter_merged", "is for an adapter; name one in `adapter`, or leave it out")


@record
class HuggingFaceModel(AdaptableModel):
    """A model of the Hugging Face hub: config, safetensors weights, tokenizer."""

    source: Literal["huggingface"]
    """Tells this source from the others: `huggingface`."""
    id: str
    """`owner/name` on the hub."""
    revision: str | None = None
    """A branch, tag or commit; pinned to a commit when it is fetched."""


@record
class DirectoryModel(AdaptableModel):
    """A checkpoint on disk in the Hugging Face layout (config.json, *.safetensors, tokenizer.json)."""

    source: Literal["directory"]
    """Tells this source from the others: `directory`."""
    path: str
    """The folder."""

    def __post_init__(self) -> None:
        """Refuse an empty path, which would mean wherever the worker stands."""
        super().__post_init__()
        require_path("path", self.path)


@record
class UploadedModel(AdaptableModel):
    """A model uploaded to this service."""

    source: Literal["upload"]
    """Tells this source from the others: `upload`."""
    id: str
    """The id that the upload gave."""


@record
class Factory:
    """A Python callable that makes a part of a job."""

    source: Literal["factory"]
    """Tells this source from the others: `factory`."""
    factory: str
    """`package.module:callable`."""
    kwargs: Mapping[str, Any] = option(dict)
    """Arguments for the callable, by name."""

    def __post_init__(self) -> None:
        """Refuse what names no callable."""
        require_factory("factory", self.factory)


@record
class ModelFactory(Factory):
    """A Python callable that returns an `nn.Module`; it is run in `eval()`."""


ModelSource = Annotated[
    BuiltinModel | HuggingFaceModel | DirectoryModel | UploadedModel | ModelFactory, Tagged("source")
]


@record
class BuiltinData:
    """Data that comes with Kronoscope's own dependencies."""

    source: Literal["builtin"]
    """Tells this source from the others: `builtin`."""
    name: Literal["digits", "english"]
    """`digits`: scikit-learn's 8×8 images; `english`: Python's own documentation as bytes."""
    limit: int | None = None
    """Take only the first `limit` examples."""

    def __post_init__(self) -> None:
        """Refuse an empty selection."""
        require_positive("limit", self.limit)


@record
class HuggingFaceData:
    """A data set of the Hugging Face hub, or a local path in its layout (CLI only)."""

    source: Literal["huggingface"]
    """Tells this source from the others: `huggingface`."""
    id: str
    """`owner/name` on the hub, or a path."""
    split: str = "train"
    """The split of the data set, such as `train` or `test`."""
    name: str | None = None
    """The data set's configuration, where it has several."""
    revision: str | None = None
    """A branch, tag or commit; null is the newest."""
    input_column: str = "text"
    """The column that the model reads."""
    pair_column: str | None = None
    """The column of the other halves, where the model reads pairs of texts: the tokenizer joins both."""
    target_column: str | None = None
    """The column of labels; null where the task takes its targets from the inputs."""
    limit: int | None = None
    """Take only the first `limit` examples."""
    sequence_length: int = 128
    """Texts are cut at this many tokens."""

    def __post_init__(self) -> None:
        """Refuse sizes below one, and one column for two things."""
        if self.pair_column is not None and self.pair_column in (self.input_column, self.target_column):
            raise FieldError("pair_column", f"is `{self.pair_column}`, which another field names; give another column")
        require_positive("limit", self.limit)
        require_positive("sequence_length", self.sequence_length)


@record
class SyntheticData:
    """Gaussian inputs (or uniform token ids) with uniform targets, from a seed."""

    source: Literal["synthetic"]
    """Tells this source from the others: `synthetic`."""
    shape: tuple[int, ...]
    """Shape of one input, without the batch dimension."""
    examples: int
    """The number of examples."""
    classes: int | None = None
    """Targets are class indices below this; without it, targets are normal numbers of `target_shape`."""
    target_shape: tuple[int, ...] = ()
    """Shape of one target, where targets are numbers."""
    vocabulary: int | None = None
    """Inputs are token ids below this instead of normal numbers."""
    seed: int = 0
    """Seed of the generator."""

    def __post_init__(self) -> None:
        """Refuse empty or absurd shapes."""
        require_positive("examples", self.examples)
        require_positive("classes", self.classes)
        require_positive("vocabulary", self.vocabulary)
        for name in ("shape", "target_shape"):
            size = 1
            for extent in getattr(self, name):
                require_positive(name, extent)
                size *= extent
            if size > 2**28:
                raise FieldError(name, f"one example would hold {size:,} numbers; at most {2**28:,} are taken")
        if not 0 <= self.seed <= MAX_SEED:
            raise FieldError("seed", f"is {self.seed}; take 0 to 2^63-1")


@record
class DataFactory(Factory):
    """A Python callable that yields `(inputs, targets)` or `(inputs, targets, index)`, or returns a PyTorch `Dataset`.

    It is called anew for every pass and must give the same examples in the same order.
    `index` (int64, one per example) keys the sampled labels, else the position in the stream does.
    """


@record
class Task:
    """What the outputs mean, hence which likelihood's curvature is measured."""

    type: TaskType
    """What the outputs mean; it decides the usual loss. `token_classification` has a class for each token: of files it
    reads `words` and `tags`, a list in each line or row, and the first token of a word has the word's tag. `embedding`
    is `sentence_embedding` for any input: the mean of the last hidden states of a tower or encoder, without targets."""
    loss: Loss | None = None
    """Null takes the task's usual loss: cross-entropy, or `mse` for regression and embeddings."""
    ignore_index: int = -100
    """Targets of this value are no loss terms."""
    class_weights: tuple[float, ...] | None = option(None, known_as="weight")
    """One number for each class, for `cross_entropy`: a term weighs what its label's class does, and the mean
    divides by these weights, as torch's `CrossEntropyLoss(weight=…)` does."""
    label_smoothing: float = 0.0
    """Share of every label that is spread over all classes, for `cross_entropy`."""
    positive_weights: tuple[float, ...] | None = option(None, known_as="pos_weight")
    """One number for each output, or one for all, for `bce`: what a positive label weighs against a negative
    one, as torch's `BCEWithLogitsLoss(pos_weight=…)`."""

    output: str | None = None
    """Name of the tensor that the loss is taken of, where the model returns a mapping or an object of several.
    Null takes `logits` (`last_hidden_state` for embeddings), or the only tensor there is."""
    class_axis: int | None = None
    """Dimension of the outputs that the classes stand on, for a classification with several terms per example: 1 as in
    torch's losses, -1 for the last one. Null takes what the targets' shape or the model's own number of classes say;
    where they leave both open, the job is refused. Under `mse` and `bce`, that of the outputs of a term: null takes 1
    for four dimensions or more, as images have, else the last one."""

    def __post_init__(self) -> None:
        """Refuse losses that the task has no outputs for, and weights that the loss has no use for."""
        if self.output is not None and self.likelihood == "model":
            raise FieldError("output", "has no place in `loss: model`: the model's own loss is taken; leave it out")
        if self.class_axis is not None:
            self._require_class_axis(self.class_axis)
        classes = self.type in ("causal_lm", "masked_lm", "token_classification")
        if classes and self.loss not in (None, "cross_entropy", "model"):
            raise FieldError("loss", f"`{self.loss}` does not fit `{self.type}`; take `cross_entropy` or `model`")
        if self.type == "regression" and self.loss == "cross_entropy":
            raise FieldError("loss", "`cross_entropy` needs classes; take `mse` or `bce`, or `type: classification`")
        if self.type in EMBEDDINGS and self.loss not in (None, "mse"):
            raise FieldError("loss", f"`{self.loss}` does not fit `{self.type}`, a Gaussian model: take `mse`")

        if not -MAX_SEED - 1 <= self.ignore_index <= MAX_SEED:
            # labels are read as int64
            raise FieldError("ignore_index", f"is {readable(self.ignore_index)}; take -2^63 to 2^63-1, such as -100")
        self._require_weights()

    def _require_class_axis(self, axis: int) -> None:
        if axis == 0:
            raise FieldError("class_axis", "is 0, the dimension of the examples; take 1, or -1 for the last dimension")
        if self.type not in ("classification", "sequence_classification", "regression"):
            raise FieldError(
                "class_axis", f"has no place in `{self.type}`, whose outputs leave no choice; leave it out"
            )
        if self.likelihood == "model":
            raise FieldError("class_axis", "has no place in `loss: model`: the model's own loss is taken; leave it out")

    def _require_weights(self) -> None:
        given = {
            "class_weights": ("cross_entropy", self.class_weights is not None),
            "label_smoothing": ("cross_entropy", self.label_smoothing != 0),
            "positive_weights": ("bce", self.positive_weights is not None),
        }
        for name, (loss, present) in given.items():
            if present and self.likelihood == "model":
                raise FieldError(
                    name, f"has no place in `loss: model`: the model weighs its own loss; leave `{name}` out"
                )
            if present and self.likelihood != loss:
                raise FieldError(name, f"belongs to `{loss}`, and the loss is `{self.likelihood}`; leave it out")
        if not 0 <= self.label_smoothing < 1:
            raise FieldError("label_smoothing", f"is {self.label_smoothing}; take a share from 0 to below 1")
        require_weights("class_weights", self.class_weights)
        require_weights("positive_weights", self.positive_weights)

    @property
    def leaves_class_axis(self) -> bool:
        """Whether outputs of several terms may have their classes on one dimension or another."""
        classifies = self.type in ("classification", "sequence_classification")
        return classifies and self.likelihood == "cross_entropy" and self.class_axis is None

    @property
    def likelihood(self) -> Loss:
        """The loss in force."""
        return self.loss or _USUAL_LOSS[self.type]


def readable(number: float) -> str:
    """Return a number as a sentence shows it, cut after 60 characters."""
    try:
        text = f"{number:,}"
    except ValueError:
        # Python prints no whole number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:60]}…"


def require_positive(field: str, value: int | None) -> None:
    """Raise ``FieldError`` for a value that is less than one; an absent one is right."""
    if value is not None and value < 1:
        raise FieldError(field, f"is {readable(value)}; take 1 or more")


def require_weights(field: str, weights: tuple[float, ...] | None) -> None:
    """Raise ``FieldError`` unless weights are absent, or finite and 0 or more, and at least one is not 0."""
    if weights is None:
        return
    for place, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise FieldError(field, f"holds {weight} at place {place}; take finite weights of 0 or more")
    if not any(weights):
        raise FieldError(field, "holds no weight above 0, so nothing would count; give at least one")


def require_path(field: str, value: str) -> None:
    """Raise ``FieldError`` for a text that cannot name a file or folder: an empty one, or one that holds NUL."""
    if not value or "\0" in value:
        raise FieldError(field, "names nothing; give the path of a file or folder")


def require_job_or_path(job: str | None, path: str | None) -> None:
    """Raise ``FieldError`` unless exactly one of the two is given, and the path can name a file or folder."""
    if (job is None) == (path is None):
        raise FieldError("job", "give either `job` or `path`, and not both")
    if path is not None:
        require_path("path", path)


def is_path(name: str) -> bool:
    """Return whether a text that may name a folder or an entry of the hub names a folder."""
    return name.startswith(("/", "./", "../", "~")) or name in (".", "..")


def require_factory(field: str, value: str) -> None:
    """Raise ``FieldError`` for a text that is not written ``package.module:callable``."""
    if not _FACTORY.fullmatch(value):
        raise FieldError(field, "is no factory; write `package.module:callable`")
