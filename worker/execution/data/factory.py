"""Factory data: batches that the caller's own code yields."""

from collections.abc import Iterable, Iterator

from torch.utils.data import Dataset

from catalog.requests.inputs import DataFactory
from engine.model.examples import read_chunks
from worker.execution.data.stream import Chunk, DataRequest, DataStream
from worker.execution.data.validation import iterate_caller_data
from worker.execution.refusal import Refusal
from worker.execution.resolve import call_factory, resolve_factory

_POINTER = "/data/factory"


def load(source: DataFactory, request: DataRequest) -> DataStream:
    """Open a stream that calls the caller's factory anew for every pass."""
    around = request.context
    factory = resolve_factory(source.factory, around.paths, around.factories, _POINTER)

    def batches() -> Iterator[Chunk]:
        made = call_factory(factory, source.factory, dict(source.kwargs), _POINTER)
        if not isinstance(made, (Iterable, Dataset)):
            raise Refusal(
                f"factory `{source.factory}` returned {type(made).__name__}; it must return an iterable of "
                "(inputs, targets), or a PyTorch dataset",
                pointer=_POINTER,
                code="wrong_type",
            )
        yield from iterate_caller_data(lambda: read_chunks(made), source.factory, _POINTER)

    return DataStream(batches=batches, examples=None)
