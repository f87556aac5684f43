"""Opened images: the splits of a document's data, with the digest of what they hold."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from catalog.requests.job import JobDocument
from engine.analyses.fewshot.fewshot_model import weights_digest
from engine.image_data import ImageData
from worker.execution.job_inputs import load_weights
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal
from worker.execution.resolve import resolve

IMAGE_SOURCES = {
    "image_splits": "worker.execution.data.images.image_splits:load",
    "strokes": "worker.execution.data.images.strokes:load",
}


@dataclass(frozen=True, kw_only=True)
class OpenedImages:
    """Images of a job, read by class and index."""

    data: ImageData

    @property
    def examples(self) -> int:
        """Images in all splits."""
        return sum(sum(split.sizes) for split in self.data.splits.values())

    @property
    def model_sha256(self) -> str | None:
        """Digest of the weights that the training begins with; None where it draws its own."""
        return None if self.data.weights is None else weights_digest(self.data.weights)

    def data_sha256(self, checkpoint: Callable[[], None]) -> str:
        """Return the digest of the images."""
        del checkpoint
        return self.data.sha256


def load_images(document: JobDocument, context: LoaderContext) -> OpenedImages:
    """Open the images that a document names.

    Args:
        document: One of an analysis that draws episodes.
        context: The loaders' rules for paths, and what may be held.

    Returns:
        Three splits of one image shape.

    Raises:
        Refusal: If they cannot be read, or share a class or an image.
    """
    source: Any = document.data
    loader = IMAGE_SOURCES.get(source.source)
    if loader is None:
        raise Refusal(
            f"`source: {source.source}` is not served here; take one of {', '.join(IMAGE_SOURCES)}",
            pointer="/data/source",
            code="unsupported_source",
        )
    context.report("data", 0, None, "sources")
    data: ImageData = resolve(loader)(source, context)
    context.checkpoint()
    given = document.given("weights")
    if given is None or context.shapes_only:
        return OpenedImages(data=data)
    return OpenedImages(data=replace(data, weights=load_weights(given[1], context)))
