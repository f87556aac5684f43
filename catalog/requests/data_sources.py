"""Data sources: files, images in classes, of which episodes are drawn, and all sources that a document can name."""

import array
import math
from pathlib import PurePath
from typing import Annotated, Literal

from catalog.record import FieldError, Tagged, record
from catalog.requests.collection import MAX_SEED
from catalog.requests.inputs import (
    BuiltinData,
    DataFactory,
    HuggingFaceData,
    SyntheticData,
    require_path,
    require_positive,
)

_LEAST_IMAGE = 8
_TABLES = (".jsonl", ".csv", ".parquet")
_MOST_CHANNELS = 1_024


@record
class Pixels:
    """Numbers that a model reads of uint8 images: `(x · scale − mean) / deviation`, by channel."""

    scale: float
    """The factor of a pixel, such as 0.00392156862745098 for 1/255; `rescale_factor` of a preprocessor_config.json."""
    mean: tuple[float, ...] = (0.0,)
    """Subtracted after scaling: a number for each channel, which is dimension 1 of the images, or one for all."""
    deviation: tuple[float, ...] = (1.0,)
    """The divisor: a number for each channel, or one for all."""

    def __post_init__(self) -> None:
        """Refuse numbers by which images would vanish or be none."""
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise FieldError("scale", f"is {self.scale}; take a number above 0, such as 0.00392156862745098 (1/255)")
        for name in ("mean", "deviation"):
            numbers = getattr(self, name)
            if not 1 <= len(numbers) <= _MOST_CHANNELS:
                raise FieldError(name, f"holds {len(numbers):,} numbers; give one for each channel, or one for all")
            for number in numbers:
                if not math.isfinite(number) or (name == "deviation" and number <= 0):
                    raise FieldError(
                        name, f"holds {number}; take finite numbers{' above 0' if name == 'deviation' else ''}"
                    )
        self._require_distinct()

    def _require_distinct(self) -> None:
        """Refuse numbers by which two pixels, or all of them, become one number of float32, or no finite one."""
        scale = _in_float32([self.scale])[0]
        scaled = _in_float32([pixel * scale for pixel in range(256)])
        _require_all("scale", scaled, self.scale)
        for channel in range(max(len(self.mean), len(self.deviation))):
            mean, deviation = (each[min(channel, len(each) - 1)] for each in (self.mean, self.deviation))
            centred = _in_float32([pixel - _in_float32([mean])[0] for pixel in scaled])
            _require_all("mean", centred, mean)
            divisor = _in_float32([deviation])[0]
            _require_all("deviation", _in_float32([pixel / (divisor or math.nan) for pixel in centred]), deviation)


def _in_float32(numbers: list[float]) -> list[float]:
    return array.array("f", numbers).tolist()


def _require_all(name: str, pixels: list[float], number: float) -> None:
    if len(set(pixels)) < len(pixels) or not all(map(math.isfinite, pixels)):
        raise FieldError(
            name,
            f"is {number} of a channel, by which pixels from 0 to 255 are not 256 numbers of float32; take the "
            "model's own, such as a scale of 1/255, a mean of 0.485 and a deviation of 0.229",
        )


@record
class FileOptions:
    """The options of a file of data."""

    limit: int | None = None
    """Take only the first `limit` examples."""
    sequence_length: int = 128
    """Texts are cut at this many tokens."""
    text_key: str | None = None
    """The column of the texts, or of the words of `token_classification`; null finds it by its usual names."""
    pair_key: str | None = None
    """The column of the other halves of pairs, which the tokenizer joins to the texts; it needs `text_key`."""
    label_key: str | None = None
    """The column of the labels, or of the tags of `token_classification`; null finds it by its usual names. Labels of
    a classification are whole numbers, or names, by `id2label` of the model, else numbered in sorted order."""
    pixels: Pixels | None = None
    """How uint8 images become floats; null leaves numbers as they are."""

    def require_fit(self, name: str) -> None:
        """Refuse sizes below one, and options that the kind of a file, by its name, has no use for."""
        require_positive("limit", self.limit)
        require_positive("sequence_length", self.sequence_length)
        suffix = PurePath(name).suffix.lower()
        keys = {each: getattr(self, each) for each in ("text_key", "pair_key", "label_key")}
        named = [each for each, key in keys.items() if key is not None]
        if named and suffix not in _TABLES:
            raise FieldError(
                named[0], f"names a column, and `{suffix}` has none; leave it out, or give {', '.join(_TABLES)}"
            )
        if self.pair_key is not None and self.text_key is None:
            raise FieldError("pair_key", "names the other halves; name the texts too (`text_key`)")
        for place, each in enumerate(named):
            if keys[each] in [keys[other] for other in named[:place]]:
                raise FieldError(each, f"is `{keys[each]}`, which another field names; give another column")
        if self.pixels is not None and suffix != ".safetensors":
            raise FieldError("pixels", f"are of images, which `{suffix}` does not hold; give a `.safetensors` file")


@record
class DataFile(FileOptions):
    """A file: `.jsonl`, `.csv` or `.parquet` with columns of texts, `.txt` (a text each line), or tensors."""

    source: Literal["file"]
    """Tells this source from the others: `file`."""
    path: str
    """The file. A `.safetensors` holds `inputs` and `targets`, or uint8 `images` (N, channels, rows, columns) and
    `labels` (N,)."""

    def __post_init__(self) -> None:
        """Refuse an empty path, and options that do not fit it."""
        require_path("path", self.path)
        self.require_fit(self.path)


@record
class UploadedData(FileOptions):
    """A file of data uploaded to this service."""

    source: Literal["upload"]
    """Tells this source from the others: `upload`."""
    id: str
    """The id that the upload gave."""


@record
class StrokesData:
    """Handwriting-like characters of two to four strokes, drawn from a seed, in classes that no split shares."""

    source: Literal["strokes"]
    """Tells this source from the others: `strokes`."""
    image_size: int = 28
    """Rows and columns of an image."""
    channels: int = 1
    """Channels of an image: the same strokes, with noise of their own."""
    train_classes: int = 120
    """Classes that are trained on."""
    validation_classes: int = 30
    """Classes that choose the best epoch."""
    test_classes: int = 60
    """Classes that are tested."""
    per_class: int = 40
    """Images of each class."""
    seed: int = 0
    """Seed of the characters."""

    def __post_init__(self) -> None:
        """Refuse empty or absurd sizes."""
        most = {"image_size": 512, "channels": 16, "per_class": 10_000}
        classes = dict.fromkeys(("train_classes", "validation_classes", "test_classes"), 100_000)
        for name, bound in {**most, **classes}.items():
            require_positive(name, getattr(self, name))
            if getattr(self, name) > bound:
                raise FieldError(name, f"is {getattr(self, name):,}; at most {bound:,} are drawn")
        if self.image_size < _LEAST_IMAGE:
            raise FieldError("image_size", f"is {self.image_size}; take {_LEAST_IMAGE} or more")
        if not 0 <= self.seed <= MAX_SEED:
            raise FieldError("seed", f"is {self.seed}; take 0 to 2^63-1")


@record
class ImageSplits:
    """A folder with `train`, `validation` and `test.safetensors`, each of `images` (uint8) and `labels` (int64)."""

    source: Literal["image_splits"]
    """Tells this source from the others: `image_splits`."""
    path: str
    """The folder. `images` are (N, channels, rows, columns), all splits of one shape; `labels` number the classes of
    the whole data set, so that no split shares a class with another."""

    def __post_init__(self) -> None:
        """Refuse an empty path."""
        require_path("path", self.path)


DataSource = Annotated[
    BuiltinData | HuggingFaceData | DataFile | UploadedData | SyntheticData | DataFactory | StrokesData | ImageSplits,
    Tagged("source"),
]
