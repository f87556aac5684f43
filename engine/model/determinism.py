"""Determinism: the settings that decide the bits of a result besides the plan, chosen once, held, and recorded.

A job's first attempt writes them into its plan, and every later one holds the same. What a machine
cannot repeat (another class of device, other instructions, another torch) is said, not hidden.
What cannot be asked of a card, its driver or its libraries is unknown, and nothing fails for it: CUDA may be linked
into torch, or absent where a job is planned.
"""

import contextlib
import ctypes
import functools
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.autograd.graph import Node

UNKNOWN = "unknown"
_MAPPED = Path("/proc/self/maps")
_DRIVER_LENGTH = 80
"""Bytes of the longest version of a driver, as NVML's header has it."""


def device_versions(device: torch.device) -> dict[str, Any]:
    """Read the card's name and multiprocessors, and the versions of driver, CUDA, cuBLAS, cuDNN and cuSOLVER.

    By the names of the fields of ``Numerics``; `unknown` where one cannot be asked, as of a device that is not present.
    """
    present = torch.cuda.is_available()
    properties: Any = torch.cuda.get_device_properties(device) if present else None
    cudnn: Any = torch.backends.cudnn
    return {
        "device_name": str(properties.name) if present else UNKNOWN,
        "multiprocessors": int(properties.multi_processor_count) if present else UNKNOWN,
        "driver": _driver() if present else UNKNOWN,
        "cuda": str(torch.version.cuda or UNKNOWN),
        "cublas": _library_version("cublas") if present else UNKNOWN,
        "cudnn": str((cudnn.version() if present else None) or UNKNOWN),
        "cusolver": _library_version("cusolver") if present else UNKNOWN,
    }


@functools.cache
def _driver() -> str:
    """The driver's version, as NVML says it."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        version = ctypes.create_string_buffer(_DRIVER_LENGTH)
        if library.nvmlInit_v2() != 0:
            return UNKNOWN
        failed = library.nvmlSystemGetDriverVersion(version, ctypes.c_uint(_DRIVER_LENGTH)) != 0
        library.nvmlShutdown()
    except (OSError, AttributeError):
        return UNKNOWN
    return UNKNOWN if failed else version.value.decode(errors="replace")


@functools.cache
def _library_version(name: str) -> str:
    """The version that a library of CUDA's says of itself: `cublas` or `cusolver`."""
    numbers = [ctypes.c_int() for _ in range(3)]
    try:
        path = next(_paths(name), None)
        if path is None:
            return UNKNOWN
        ask = getattr(ctypes.CDLL(str(path)), f"{name}GetProperty")
        # major, minor and patch level
        failed = any(ask(place, ctypes.byref(number)) != 0 for place, number in enumerate(numbers))
    except (OSError, AttributeError):
        return UNKNOWN
    return UNKNOWN if failed else ".".join(str(number.value) for number in numbers)


def _paths(name: str) -> Iterator[Path]:
    """Yield the library that is loaded; then those that would be, as torch loads cuSOLVER at its first use."""
    file = f"lib{name}.so"
    lines = (line.split(maxsplit=5) for line in _MAPPED.read_text(errors="replace").splitlines())
    loaded = [Path(words[5]) for words in lines if len(words) > 5 and ".so" in words[5]]
    yield from (path for path in loaded if path.name.startswith(file))
    for path in loaded:
        if path.name.startswith("libcublas.so"):
            # all in one folder, or each in one of its own
            yield from sorted(path.parent.glob(f"{file}*"))
            yield from sorted(path.parent.parent.parent.glob(f"{name}/lib/{file}*"))
            return


DRAWN = "random numbers drawn in evaluation mode"
"""How a model that draws stands among the operations that another run may do otherwise."""
_ATTENTION = ("math", "flash", "memory-efficient")
"""Attention on a device: cuDNN's kernel has no deterministic backward pass; the two other ones must be asked for it."""
_FUSED = frozenset(
    f"{call}{kernel}AttentionBackward0" for call in ("ScaledDotProduct", "") for kernel in ("Flash", "Efficient")
)
"""Backward passes that are deterministic where torch would refuse those that are not, and else only warn."""
_STRICT = 2
"""Torch's number of the mode in which it refuses them."""
_ALERT = re.compile(r"(?P<operation>\S[^\n]{0,200}?) does not have a deterministic implementation")
_OTHER_ALERTS = {
    "Deterministic behavior was enabled with": "cuBLAS without CUBLAS_WORKSPACE_CONFIG",
    "Memory Efficient attention defaults to": "memory-efficient attention",
    "Flash Attention defaults to": "flash attention",
    "cuDNN Attention defaults to": "cuDNN's attention",
}
"""The beginnings of other messages of torch, and the operations that they are about."""

_OF_DEVICE = ("device_name", "multiprocessors", "driver", "cuda", "cublas", "cudnn", "cusolver")
"""Fields that a CPU does not have, and plans of older versions neither."""


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """A record of what products, sums and attention are computed with."""

    device: str
    """Class of device: `cpu` or `cuda`."""
    instructions: str
    """The widest vector instructions of a CPU, or the compute capability of a device."""
    threads: int
    version: str
    """Torch's version."""
    attention: tuple[str, ...]
    """Kernels of scaled dot-product attention that may be taken."""
    precision: str = "ieee"
    """Products at the width of their numbers: no TF32, no bfloat16. Those that add up A and G may take TF32 where
    ``collection.precision`` asks for it; each layer's record says so."""
    deterministic: bool = True
    device_name: str | None = None
    """Name of the card; this and what follows are None on a CPU, and `unknown` where they cannot be asked."""
    multiprocessors: int | str | None = None
    driver: str | None = None
    cuda: str | None = None
    """Version of CUDA that torch is built for."""
    cublas: str | None = None
    cudnn: str | None = None
    cusolver: str | None = None

    @classmethod
    def here(cls, device: torch.device, earlier: Mapping[str, Any] | None = None) -> "Numerics":
        """Read the numerics of this machine, and choose those that can be chosen.

        Args:
            device: Device that the job computes on.
            earlier: Numerics in the plan of the job's first attempt, whose attention kernels are taken again; None for
                a first attempt.
        """
        chosen = (earlier or {}).get("attention")
        on_device = device.type == "cuda"
        default = _ATTENTION if on_device else ("torch's own choice",)
        return cls(
            device=device.type,
            instructions=_instructions(device),
            threads=torch.get_num_threads(),
            version=str(torch.__version__),
            attention=tuple(str(name) for name in chosen) if chosen and on_device else default,
            **(device_versions(device) if on_device else {}),
        )

    def recorded(self) -> dict[str, Any]:
        """Return the fields as plans, checkpoints and keys hold them: those of a device only where one computes."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def not_replayed(self, earlier: Mapping[str, Any] | None) -> tuple[str, ...]:
        """Describe what differs from the numerics of an earlier attempt.

        Args:
            earlier: Numerics as the earlier plan recorded them; None where there was none.

        Returns:
            One phrase per field that differs, with both values, and one that names the fields that an older plan does
            not have; empty where nothing differs.
        """
        if earlier is None:
            return ()
        own = self.recorded()
        differing = tuple(
            f"{name}: {_said(earlier[name])} then, {_said(value)} now"
            for name, value in own.items()
            if name in earlier and _said(earlier[name]) != _said(value)
        )
        # of another class of device there is nothing to compare
        absent = [name for name in _OF_DEVICE if name in own and name not in earlier]
        unknown = absent if earlier.get("device") == self.device else []
        return (*differing, f"{', '.join(unknown)}: unknown then") if unknown else differing


def _instructions(device: torch.device) -> str:
    if device.type != "cuda":
        return str(torch.backends.cpu.get_cpu_capability())
    # a job may be planned where no such device is
    present = torch.cuda.is_available()
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if present else "unknown"


@contextlib.contextmanager
def set_numerics(numerics: Numerics, heard: set[str]) -> Iterator[None]:
    """Compute with given numerics inside, and restore the caller's afterwards.

    Args:
        numerics: Attention kernels to allow; deterministic algorithms are taken wherever torch has them.
        heard: Receives the names of operations that ran without a deterministic form. Other warnings are shown as
            before.
    """
    fill: Any = torch.utils.deterministic
    before = (
        torch.get_deterministic_debug_mode(),
        fill.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
    )
    with _attention(numerics), _alerts(heard):
        try:
            # the same switch as `use_deterministic_algorithms`, which loads the compiler to set its: 70 MB
            torch.set_deterministic_debug_mode("warn")
            # nothing of ours reads what it has not written, and filling costs a pass over every new tensor
            fill.fill_uninitialized_memory = False
            torch.backends.cudnn.benchmark = False
            yield
        finally:
            torch.set_deterministic_debug_mode(before[0])
            fill.fill_uninitialized_memory = before[1]
            torch.backends.cudnn.benchmark = before[2]


def hold_attention(outputs: Tensor, kernels: Collection[str] = _FUSED) -> None:
    """Let fused attention pull ``outputs`` back in its deterministic form, which torch takes in its strict mode alone.

    The mode is strict while one of these nodes runs, so no operation besides can be refused for it, but what activation
    checkpointing computes again for a node whose attention is the first of its block to need it. Nodes of a graph
    within another one's backward pass (reentrant checkpointing) are not found; torch then warns of them, and is heard.

    Args:
        outputs: What a model returned inside ``set_numerics``, with their graph or without.
        kernels: Names of the graph's nodes.
    """
    for node in attention_nodes(outputs, kernels):
        node.register_prehook(lambda _: torch.set_deterministic_debug_mode("error"))
        node.register_hook(lambda *_: torch.set_deterministic_debug_mode("warn"))


def attention_nodes(outputs: Tensor, kernels: Collection[str] = _FUSED) -> Iterator[Node]:
    """List the nodes of fused attention in a graph.

    Args:
        outputs: What a model returned, with their graph or without.
        kernels: Names of the nodes.

    Yields:
        Each node once.
    """
    waiting, seen = [outputs.grad_fn], set[Node]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
        if node.name() in kernels:
            yield node


def leave_strict() -> None:
    """Undo what a node of ``hold_attention`` has left behind that failed."""
    if torch.get_deterministic_debug_mode() == _STRICT:
        torch.set_deterministic_debug_mode("warn")


@contextlib.contextmanager
def _attention(numerics: Numerics) -> Iterator[None]:
    """Allow the kernels of ``numerics`` alone; a CPU has but its own."""
    if numerics.device != "cuda":
        yield
        return
    backends: Any = torch.backends.cuda
    kernels = {"math": "math", "flash": "flash", "memory-efficient": "mem_efficient", "cudnn": "cudnn"}
    before = {name: getattr(backends, f"{switch}_sdp_enabled")() for name, switch in kernels.items()}
    try:
        for name, switch in kernels.items():
            getattr(backends, f"enable_{switch}_sdp")(name in numerics.attention)
        yield
    finally:
        for name, switch in kernels.items():
            getattr(backends, f"enable_{switch}_sdp")(before[name])


@contextlib.contextmanager
def _alerts(heard: set[str]) -> Iterator[None]:
    always = torch.is_warn_always_enabled()
    with warnings.catch_warnings(), contextlib.ExitStack() as after:
        # in every batch, whatever the caller's filters do with warnings; attention's kernels else warn once a process
        torch.set_warn_always(True)
        after.callback(torch.set_warn_always, always)
        warnings.filterwarnings("always", message=r"[^\n]*does not have a deterministic implementation")
        for beginning in _OTHER_ALERTS:
            warnings.filterwarnings("always", message=beginning)
        show = warnings.showwarning

        def listen(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            text = str(message)
            alert = _ALERT.match(text)
            other = [name for beginning, name in _OTHER_ALERTS.items() if text.startswith(beginning)]
            heard.update([alert["operation"]] if alert is not None else other)
            if alert is None and not other:
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = listen
        yield


def _said(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
