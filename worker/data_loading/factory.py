"""Data that the caller's own code yields."""

from collections.abc import Iterable, Iterator

from catalog.inputs import DataFactory
from worker.data_loading.examined import guarded
from worker.data_loading.request import DataRequest
from worker.data_loading.stream import Chunk, DataStream
from worker.refusal import Refusal
from worker.resolve import call_factory, resolve_factory

_POINTER = "/data/factory"


def load(source: DataFactory, request: DataRequest) -> DataStream:
    """A stream that calls the factory anew for every pass.

    Raises:
        Refusal: If the factory cannot be imported; on a pass, if it raises or yields something else.
    """
    around = request.surroundings
    factory = resolve_factory(source.factory, around.paths, around.factories, _POINTER)

    def batches() -> Iterator[Chunk]:
        made = call_factory(factory, source.factory, dict(source.kwargs), _POINTER)
        if not isinstance(made, Iterable):
            raise Refusal(
                f"factory `{source.factory}` returned {type(made).__name__}; it must return an iterable of "
                "(inputs, targets)",
                pointer=_POINTER,
                code="wrong_type",
            )
        yield from guarded(lambda: made, source.factory, _POINTER)

    return DataStream(batches=batches, examples=None)
