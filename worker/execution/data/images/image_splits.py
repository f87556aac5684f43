"""Image splits: a folder with a safetensors file for each split, read by class and index and never whole.

Classes are told apart by their labels, which are those of the whole data set, and images by digests of their bytes: a
class or an image that stands in two splits would make a test of what was trained on.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from catalog.requests.data_sources import ImageSplits
from engine.image_data import SPLITS, ImageData
from engine.memory.plan import readable_bytes
from worker.execution.data.byte_count import no_room
from worker.execution.files.open_files import OpenFile, OpenFolder
from worker.execution.files.safetensors_header import TensorEntry, read_header, read_rows
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal, names

_POINTER = "/data/path"
_CHUNK_BYTES = 16 * 2**20
_DIGEST_BYTES = 8
_MOST_CLASSES = 100_000
_LABEL_BYTES = 12 * 8
"""Bytes for each label: itself, its place in the order of classes, and while the images of two splits are compared,
their digests, sorted."""
_IMAGE_COPIES = 6
"""Bytes for each number of an image: it is read, joined with the others of an episode, and converted to float32."""


class ImageFile:
    """One split: its open file, labels int64 (N,), and the header's images, uint8 (N, channels, rows, columns)."""

    def __init__(self, file: OpenFile, labels: Tensor, images: TensorEntry) -> None:
        channels, height, width = images.shape[1:]
        self.shape = channels, height, width
        self.name = file.name
        self._order = torch.argsort(labels, stable=True)
        classes, counts = torch.unique_consecutive(labels[self._order], return_counts=True)
        if len(classes) > _MOST_CLASSES:
            raise _broken(self.name, f"holds {len(classes):,} classes; at most {_MOST_CLASSES:,} are taken")
        self.labels: list[int] = classes.tolist()
        self.sizes: Sequence[int] = counts.tolist()
        self._first = counts.cumsum(0) - counts
        self._file = file
        self._begin = images.begin
        self.prints: Tensor | None = None
        """Digests of the images, int64 (N,), which those that are read later must have; None where none was taken."""

    @property
    def names(self) -> Sequence[str]:
        """Classes by their labels."""
        return [str(label) for label in self.labels]

    @property
    def order(self) -> Tensor:
        """Rows of the file by class, and within a class as they stand there, int64 (N,)."""
        return self._order

    @property
    def held_bytes(self) -> int:
        """The bytes that are held of the images: none, as each is read when it is asked for."""
        return 0

    def read(self, place: int, images: Sequence[int]) -> Tensor:
        """Read images of one class, uint8 (n, C, H, W); ``Refusal`` if one is not as the digest of the data has it."""
        first = int(self._first[place])
        rows = [int(self._order[first + index]) for index in images]
        found = torch.cat([self._rows(row, 1) for row in rows])
        if self.prints is not None and not torch.equal(_prints(found), self.prints[rows]):
            raise self._changed()
        return found

    def chunks(self) -> Iterator[Tensor]:
        """Yield all images in the order of the file, some MiB at a time."""
        count = sum(self.sizes)
        step = max(1, _CHUNK_BYTES // torch.Size(self.shape).numel())
        for begin in range(0, count, step):
            yield self._rows(begin, min(step, count - begin))

    def _rows(self, first: int, count: int) -> Tensor:
        size = torch.Size(self.shape).numel()
        read = self._file.read_at(self._begin + first * size, count * size)
        if len(read) < count * size:
            raise self._changed()
        return torch.frombuffer(read, dtype=torch.uint8).view(count, *self.shape)

    def _changed(self) -> Refusal:
        what = "has other images than when this job began; run it again, and change no file while it runs"
        return _broken(self.name, what, code="data_differ")


def load(source: ImageSplits, context: LoaderContext) -> ImageData:
    """Open the three files of a folder; every image is read once, for the digest.

    It takes at most ``_LABEL_BYTES`` for each image, and ``_IMAGE_COPIES`` of one image or some MiB of images.
    """
    folder = context.open_path(source.path, _POINTER)
    if not isinstance(folder, OpenFolder):
        raise Refusal(
            f"{source.path} is a file; name the folder with {names([f'{split}.safetensors' for split in SPLITS])}",
            pointer=_POINTER,
        )
    splits: dict[str, ImageFile] = {split: _open(folder, split, context) for split in SPLITS}
    first = splits[SPLITS[0]]
    for split, images in splits.items():
        if images.shape != first.shape:
            raise _broken(
                images.name,
                f"holds images of shape {list(images.shape)}, and {first.name} of {list(first.shape)}; give all splits "
                "one shape",
            )
        _require_apart(splits, split)
    return ImageData(splits=splits, sha256="" if context.shapes_only else _digest(splits, context))


def _open(folder: OpenFolder, split: str, context: LoaderContext) -> ImageFile:
    file = folder.file(f"{split}.safetensors")
    if file is None:
        raise Refusal(
            f"the folder has no {split}.safetensors; give one file of `images` and `labels` for each of "
            f"{', '.join(SPLITS)}",
            pointer=_POINTER,
            code="not_found",
        )
    header = read_header(file, _POINTER)
    images, labels = _entry(file, header, "images", "U8", 4), _entry(file, header, "labels", "I64", 1)
    for name in sorted(header.keys() - {"images", "labels"}):
        context.unused(f"{file.name}: {name}")
    if images.shape[0] != labels.shape[0]:
        raise _broken(file.name, f"holds {images.shape[0]:,} images and {labels.shape[0]:,} labels; give one for each")
    image_bytes = images.numbers // images.shape[0]
    if _LABEL_BYTES * labels.numbers + _IMAGE_COPIES * image_bytes > context.most_bytes:
        taken = (
            f"{file.name} has labels of {readable_bytes(8 * labels.numbers)} and images of "
            f"{readable_bytes(image_bytes)} each, of which one is held {_IMAGE_COPIES} times"
        )
        raise no_room(taken, context.most_bytes, _POINTER, "give it more (`memory.host`), or smaller images")
    return ImageFile(file, read_rows(file, labels, 0, labels.numbers, _POINTER), images)


def _entry(file: OpenFile, header: Mapping[str, TensorEntry], name: str, dtype: str, rank: int) -> TensorEntry:
    entry = header.get(name)
    form = "uint8 (N, channels, rows, columns)" if name == "images" else "int64 (N,)"
    if entry is None:
        raise _broken(file.name, f"holds no `{name}`; save {form} under that name")
    if entry.dtype != dtype or len(entry.shape) != rank or entry.numbers == 0:
        raise _broken(file.name, f"holds `{name}` of type {entry.dtype} and shape {list(entry.shape)}; save {form}")
    return entry


def _require_apart(splits: Mapping[str, ImageFile], split: str) -> None:
    """Refuse a class that an earlier split has as well."""
    for other in SPLITS[: SPLITS.index(split)]:
        shared = sorted(set(splits[split].labels) & set(splits[other].labels))
        if shared:
            raise _broken(
                splits[split].name,
                f"and {splits[other].name} share {'class' if len(shared) == 1 else 'classes'} "
                f"{names([str(label) for label in shared])}; give each class to one split, with labels of the whole "
                "data set",
                code="shared_classes",
            )


def _digest(splits: Mapping[str, ImageFile], context: LoaderContext) -> str:
    """Return the SHA-256 of labels and images, and refuse an image that stands in two splits."""
    digest = hashlib.sha256()
    seen: dict[str, Tensor] = {}
    total = sum(sum(images.sizes) for images in splits.values())
    done = 0
    for split, images in splits.items():
        digest.update(f"{split} {images.shape} {images.labels} {list(images.sizes)}".encode())
        digest.update(images.order.numpy().tobytes())
        prints = torch.empty(sum(images.sizes), dtype=torch.int64)
        place = 0
        for chunk in images.chunks():
            digest.update(chunk.flatten().numpy().data)
            prints[place : place + len(chunk)] = _prints(chunk)
            place += len(chunk)
            done += len(chunk)
            context.report("data", done, total, "images")
            context.checkpoint()
        seen[split] = images.prints = prints
        for other in SPLITS[: SPLITS.index(split)]:
            shared = int(torch.isin(seen[split], seen[other]).sum())
            if shared:
                raise _broken(
                    images.name,
                    f"holds {shared} images that {splits[other].name} holds too; give each image to one split",
                    code="shared_images",
                )
    return digest.hexdigest()


def _prints(images: Tensor) -> Tensor:  # (n, C, H, W) uint8 -> (n,) int64
    digests = bytearray()
    for row in images.flatten(1).numpy():
        digests += hashlib.blake2b(row, digest_size=_DIGEST_BYTES).digest()
    return torch.frombuffer(digests, dtype=torch.int64)


def _broken(name: str, what: str, code: str = "broken_images") -> Refusal:
    return Refusal(f"{name} {what}", pointer=_POINTER, code=code)
