"""Attention on the meta device: it saves for the backward pass what the kernel that runs saves, byte for byte."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.model.activation_memory import storage_identity, storage_of
from engine.model.determinism import Numerics
from engine.model.meta_device import attention_workspace, simulate_device

CPU, CUDA, META = (torch.device(name) for name in ("cpu", "cuda", "meta"))
HEADS, LENGTH, HEAD = 4, 24, 16
MASKS: dict[str, Callable[[torch.dtype, torch.device], Tensor | None]] = {
    "none": lambda dtype, device: None,
    "boolean": lambda dtype, device: torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool, device=device),
    "added": lambda dtype, device: torch.zeros(LENGTH, LENGTH, dtype=dtype, device=device),
}


def numerics(device: torch.device, *attention: str, instructions: str = "sm_90") -> Numerics:
    return Numerics(
        device=device.type, instructions=instructions, threads=1, version=str(torch.__version__), attention=attention
    )


def saved_bytes(attend: Callable[[Tensor, Tensor, Tensor], Tensor], *heads: Tensor) -> int:
    """The bytes of all storages that autograd saves of one call, without those of its inputs."""
    found: dict[int, int] = {}
    kept: list[Tensor] = []
    known = {storage_of(each) for each in heads}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.append(tensor.detach())
        if storage_identity(storage) not in known:
            found[storage_identity(storage)] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attended = attend(*heads)
    del attended
    return sum(found.values())


def drawn(
    device: torch.device, dtype: torch.dtype = torch.float32, *, groups: int = HEADS, head: int = HEAD
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(  # type: ignore[return-value]
        torch.randn(2, heads, LENGTH, head, device=device, dtype=dtype).requires_grad_()
        for heads in (HEADS, groups, groups)
    )


def attention(mask: Tensor | None, *, grouped: bool, causal: bool = False) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, enable_gqa=grouped)

    return attend


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_a_cpus_kernels_save_what_is_foretold(kernel: SDPBackend, mask: str, groups: int) -> None:
    kernels = [kernel, SDPBackend.MATH] if groups < HEADS else [kernel]
    found = []
    for device in (CPU, META):
        attend = attention(MASKS[mask](torch.float32, device), grouped=groups < HEADS)
        with sdpa_kernel(kernels), simulate_device(CPU, numerics(CPU, "torch's own choice")):
            found.append(saved_bytes(attend, *drawn(device, groups=groups)))
    assert found[0] == found[1]
    assert found[0] > 0


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_math_on_a_gpu_saves_the_scores(dtype: torch.dtype, mask: str, groups: int) -> None:
    # math is written in torch's own operations, which save the same on any device
    heads = drawn(CPU, dtype, groups=groups)
    with sdpa_kernel(SDPBackend.MATH):
        real = saved_bytes(attention(MASKS[mask](dtype, CPU), grouped=groups < HEADS), *heads)
    with simulate_device(CUDA, numerics(CUDA, "math")):
        foretold = saved_bytes(
            attention(MASKS[mask](dtype, META), grouped=groups < HEADS), *drawn(META, dtype, groups=groups)
        )
    assert foretold == real > 2 * HEADS * LENGTH * LENGTH * dtype.itemsize


@pytest.mark.parametrize(("groups", "head"), [(HEADS, HEAD), (2, HEAD), (HEADS, 20)])
def test_flash_on_a_gpu_saves_no_scores_and_grouped_heads_as_they_are(groups: int, head: int) -> None:
    attend = attention(None, grouped=groups < HEADS, causal=True)
    with simulate_device(CUDA, numerics(CUDA, "math", "flash")):
        saved = saved_bytes(attend, *drawn(META, torch.bfloat16, groups=groups, head=head))
    padded = 8 * math.ceil(head / 8)
    # outputs, and the sums of exponentials; random states are a few numbers
    least = 2 * 2 * HEADS * LENGTH * padded + 4 * 2 * HEADS * LENGTH
    # heads that are no multiple of 8 are copied into some that are
    least += 2 * 2 * LENGTH * padded * (HEADS + 2 * groups) if padded > head else 0
    assert least <= saved <= least + 64


@pytest.mark.parametrize("mask", MASKS)
def test_the_memory_efficient_kernel_saves_what_its_operation_saves(mask: str) -> None:
    aten = torch.ops.aten
    given = MASKS[mask](torch.float32, META)
    added = None if given is None else torch.zeros(given.shape, device=META).expand(2, HEADS, LENGTH, LENGTH)

    def fused(*heads: Tensor) -> Tensor:
        return aten._scaled_dot_product_efficient_attention(*heads, added, True)[0]  # type: ignore[no-any-return]

    with simulate_device(CUDA, numerics(CUDA, "math", "memory-efficient")):
        foretold = saved_bytes(attention(given, grouped=False), *drawn(META))
    assert foretold == saved_bytes(fused, *drawn(META))
    assert foretold < HEADS * LENGTH * LENGTH * 4 * 2


@pytest.mark.parametrize(
    ("allowed", "dtype", "change"),
    [
        (("math", "flash"), torch.float32, {}),
        (("math", "memory-efficient"), torch.bfloat16, {"groups": 2}),
        (("math", "memory-efficient"), torch.float64, {}),
        (("math", "memory-efficient"), torch.float32, {"head": 18}),
        (("math", "flash"), torch.bfloat16, {"head": 264}),
    ],
)
def test_a_call_that_no_allowed_kernel_takes_is_written_out(
    allowed: tuple[str, ...], dtype: torch.dtype, change: dict[str, int]
) -> None:
    attend = attention(None, grouped="groups" in change)
    found = []
    for attended in (allowed, ("math",)):
        with simulate_device(CUDA, numerics(CUDA, *attended)):
            found.append(saved_bytes(attend, *drawn(META, dtype, **change)))
    assert found[0] == found[1]


def saved_by_a_layer(device: torch.device) -> int:
    """Measure what torch's own layer of attention saves; its function hides the call within it from a mode."""
    layer = nn.MultiheadAttention(HEADS * HEAD, HEADS, batch_first=True, device=device)

    def attend(inputs: Tensor, *_: Tensor) -> Tensor:
        attended: Tensor = layer(inputs, inputs, inputs, need_weights=False)[0]
        return attended

    inputs = torch.randn(2, LENGTH, HEADS * HEAD, device=device, requires_grad=True)
    return saved_bytes(attend, inputs, *layer.parameters())


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_torchs_own_layer_of_attention_takes_the_kernel_that_its_call_takes(kernel: SDPBackend) -> None:
    with sdpa_kernel(kernel), simulate_device(CPU, numerics(CPU, "torch's own choice")):
        assert saved_by_a_layer(CPU) == saved_by_a_layer(META)
    with simulate_device(CUDA, numerics(CUDA, "math", "memory-efficient")):
        fused = saved_by_a_layer(META)
    with simulate_device(CUDA, numerics(CUDA, "math")):
        assert saved_by_a_layer(META) - fused > 2 * HEADS * LENGTH * LENGTH * 4


@pytest.mark.parametrize("case", ["mask across", "one query for all", "mask that learns"])
def test_a_devices_fused_kernels_have_their_conditions(case: str) -> None:
    """As torch has them: a mask is contiguous along keys, nothing is spread over examples, and it may learn."""
    query, key, value = drawn(META)
    mask = torch.zeros(2, HEADS, LENGTH, LENGTH, device=META, requires_grad=case == "mask that learns")
    if case == "mask across":
        mask = mask.transpose(2, 3)
    query = query[:1] if case == "one query for all" else query
    found = []
    for kernels in (("math", "memory-efficient"), ("math",)):
        with simulate_device(CUDA, numerics(CUDA, *kernels)):
            found.append(saved_bytes(attention(mask, grouped=False), query, key, value))
    assert (found[0] == found[1]) == (case != "mask that learns")


def test_heads_under_autocast_are_aligned_as_those_of_16_bits() -> None:
    found = []
    for narrow in (True, False):
        with simulate_device(CUDA, numerics(CUDA, "math", "memory-efficient"), narrow=narrow):
            mask = torch.zeros(2, HEADS, LENGTH, LENGTH, device=META)
            found.append(saved_bytes(attention(mask, grouped=False), *drawn(META, head=20)))
    assert found[0] > found[1], "20 numbers of 16 bits are no multiple of 16 bytes"


def test_a_gpu_without_flash_is_planned_with_scores() -> None:
    attend = attention(None, grouped=False)
    found = []
    for instructions in ("sm_75", "sm_80", "unknown"):
        with simulate_device(CUDA, numerics(CUDA, "math", "flash", instructions=instructions)):
            found.append(saved_bytes(attend, *drawn(META, torch.float16)))
    assert found[0] > found[1] == found[2]


@pytest.mark.parametrize("heads", [2, 12, 40])
@pytest.mark.parametrize(("length", "head"), [(300, 20), (32_000, 64)])
def test_flash_takes_room_for_as_many_sums_as_occupy_the_multiprocessors(heads: int, length: int, head: int) -> None:
    """The oracle counts what the kernel allocates for each batch; the bound of one line is at most twice as much."""
    query = torch.randn(3, heads, length, head, device=META, dtype=torch.bfloat16, requires_grad=True)
    with simulate_device(CUDA, numerics(CUDA, "math", "flash")):
        attended = nn.functional.scaled_dot_product_attention(query, query * 2, query, is_causal=True)
    planned = attention_workspace(attended.sum(), 3, 144)
    assert planned is not None
    rows, columns = 128 * math.ceil(length / 128), 32 * math.ceil(head / 32)
    for examples in (1, 2, 3, 8, 100):
        shares = math.ceil(144 / (examples * heads))
        allocated = 4 * examples * heads * rows * (shares * columns + 1)
        assert allocated <= planned.of(examples) <= 2 * allocated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_efficient_kernel_takes_room_for_sums_of_narrow_gradients_alone(dtype: torch.dtype) -> None:
    with simulate_device(CUDA, numerics(CUDA, "math", "memory-efficient")):
        attended = attention(None, grouped=False)(*drawn(META, dtype))
    planned = attention_workspace(attended.sum(), 2, 144)
    assert planned is not None
    summed = 0 if dtype == torch.float32 else 3 * HEADS * LENGTH * HEAD
    assert [planned.of(examples) for examples in (1, 5)] == [
        examples * 4 * (HEADS * LENGTH + summed) for examples in (1, 5)
    ]


def test_attention_that_is_not_fused_takes_no_room_of_its_own() -> None:
    with simulate_device(CUDA, numerics(CUDA, "math")):
        attended = attention(None, grouped=False)(*drawn(META))
    assert attention_workspace(attended.sum(), 2, "unknown") is None
