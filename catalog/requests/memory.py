"""How much memory a job may take, on the device and on the host."""

import re
from typing import Literal

from catalog.record import FieldError, option, record

_UNITS = {
    "": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_MOST_BYTES = 2**61
"""Beyond what any machine has, and within the 63 bits that a kernel counts a limit in."""
_AMOUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([a-z]{0,3})", re.IGNORECASE)


@record
class Memory:
    """How much may be held, and how to keep within it.

    Budgets are `auto` (what is free when the job is claimed), `"20GiB"`, or a fraction of what is free.
    """

    device: str | float = "auto"
    """Memory of a GPU that the job may take, such as `20GiB`; `auto` is what is free."""
    host: str | float = "auto"
    """Memory of the host that the job may take; `auto` is what is free."""
    micro_batch: int | None = option(
        None, known_as={"gradient_accumulation_steps": "examples of a slice: `collection.batch_size` over the steps"}
    )
    """Examples that go through the model at once: a batch goes in slices of this size, which changes the
    statistics by rounding only. Null: the whole batch, or the fewest equal slices that fit."""
    offload: Literal["auto", "on", "off"] = "auto"
    """Whether sums stand on the host while the device computes what is added to them. `auto`: where they do not fit
    on the device, and moving them takes less time than further passes over the data."""
    activation_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Whether the model's repeated layers are computed again in the backward pass instead of keeping what they
    computed, where the model offers it. `auto`: where that is the fastest way that fits."""
    model_sharding: Literal["off", "on"] = "off"
    """Whether the ranks of a job with `world_size` above 1 share one copy of the model: each holds its part of every
    parameter, and gathers a block at a time (FSDP2's `fully_shard`). For models larger than one device."""

    def __post_init__(self) -> None:
        """Refuse amounts that cannot be read."""
        for name in ("device", "host"):
            amount_bytes(name, getattr(self, name), free_bytes=2**40)
        if self.micro_batch is not None and self.micro_batch < 1:
            raise FieldError("micro_batch", f"is {self.micro_batch}; take 1 or more, or null to let the plan choose")


def amount_bytes(field: str, amount: str | float, free_bytes: int) -> int:
    """Read one budget.

    Args:
        field: The field's name, for the error.
        amount: `auto` (nine tenths of what is free), a size with its unit, or a fraction in (0, 1] of what is free.

    Returns:
        The budget in bytes.

    Raises:
        FieldError: If it is neither `auto`, a size with a unit, nor a fraction in (0, 1].
    """
    if amount == "auto":
        return int(free_bytes * 0.9)
    if isinstance(amount, (int, float)):
        if not 0 < amount <= 1:
            raise FieldError(field, f'is {amount}; a bare number is a fraction in (0, 1]; write bytes as "20GiB"')
        return int(free_bytes * amount)
    match = _AMOUNT.fullmatch(amount.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise FieldError(
            field, f'is {amount[:40]!r}, which is not a size; write `auto`, a fraction such as 0.5, or "20GiB"'
        )
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size < 1:
        raise FieldError(field, "is zero bytes; write `auto` or a positive size")
    return min(size, _MOST_BYTES)
