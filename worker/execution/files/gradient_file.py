"""A gradient of the caller's own: a safetensors file with one tensor for each trainable parameter.

Its header is checked before a tensor is read; names, shapes and values are held against the model's parameters by the
engine, which knows them.
"""

from safetensors import safe_open
from torch import Tensor

from engine.memory.plan import readable_bytes
from worker.execution.files.open_files import OpenFolder
from worker.execution.files.safetensors_header import ELEMENT_BYTES, read_header
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal

POINTER = "/natural_gradient/gradient/path"
_TYPES = ("F64", "F32", "F16", "BF16")


def load_gradient(path: str, context: LoaderContext) -> dict[str, Tensor]:
    """Read a gradient.

    Args:
        path: The file, as the document names it.
        context: The loaders' rules for paths, and how many bytes may be read.

    Returns:
        Host tensors by parameter, of the shapes and dtypes that the file has.

    Raises:
        Refusal: If the file lies outside what the operator lists, is no safetensors file, holds a tensor that is not of
            floating-point numbers, or has more bytes than are left to the job.
    """
    found = context.open_path(path, POINTER)
    if isinstance(found, OpenFolder):
        raise Refusal(
            f"{found.name} is a folder; name a `.safetensors` file with a tensor for each trainable parameter",
            pointer=POINTER,
        )
    header = read_header(found, POINTER)
    other = next((name for name, entry in sorted(header.items()) if entry.dtype not in _TYPES), None)
    if other is not None:
        raise Refusal(
            f"`{other}` of {found.name} is of type {header[other].dtype}; a gradient is of one of {', '.join(_TYPES)}",
            pointer=POINTER,
            code="broken_gradient",
        )
    size = sum(entry.numbers * ELEMENT_BYTES[entry.dtype] for entry in header.values())
    if size > context.most_bytes:
        raise Refusal(
            f"{found.name} has {readable_bytes(size)} of tensors, and {readable_bytes(context.most_bytes)} of host "
            "memory are left to this job; give it more (`memory.host`)",
            pointer=POINTER,
            code="budget_exceeded",
        )
    with safe_open(found, framework="pt") as file:
        return {name: file.get_tensor(name) for name in header}
