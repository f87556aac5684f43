"""Simulated workers: how far a divided collection of a Llama-3-8B gets faster, from measured pieces.

Layer shapes come from the model's configuration, the collection's seconds from the planner's count of its arithmetic on
the meta device, calibrated by what MiniLM took here against what the planner had foreseen. With W workers, N examples,
B bytes of one piece, each worker's store throughput s, and no limit of the store's own:

    collect      the longest piece, ⌈N/W⌉ examples
    write        B / s
    merge        one worker: W·B / s and W·B times the measured seconds per byte; or divided by layer, LPT by bytes
    decompose    one worker: Σ c·n³; or divided by layer, LPT by n³

Not measured: the processors of others, and a store that many read at once.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import results_file
from benchmarks.llama_plan import Asked, planned

LLAMA = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
EXAMPLES, TOKENS, BATCH = 16_384, 512, 4
STORE_BYTES_PER_SECOND = 1e9
"""The throughput of each worker's store, about that of a network of 10 Gb/s; assumed."""
FASTER = (1, 100)
"""How much faster workers compute than one core here: this machine's own, and an assumed accelerator."""
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def sides() -> list[tuple[int, ...]]:
    """Sides n of the factors of each linear layer of the decoder; an A that layers share stands with the first."""
    wide, inner = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    keys = wide // LLAMA["num_attention_heads"] * LLAMA["num_key_value_heads"]
    block = [(wide, wide), (keys,), (keys,), (wide, wide), (wide, inner), (inner,), (inner, wide)]
    return block * LLAMA["num_hidden_layers"]


def measure(pieces: dict[str, Any]) -> dict[str, Any]:
    """Simulate both ways to join, from the figures of the shards on this machine.

    Args:
        pieces: What ``scale_shards.measure`` returned.
    """
    plan = planned(LLAMA, Asked(host_gibibytes=None, examples=EXAMPLES, batch_size=BATCH, tokens=TOKENS))
    pace = _pace(pieces)
    collect = plan["stages"]["collection"]["seconds"] * pace["collection_over_plan"]
    layers = sides()
    triangles = [sum(4 * n * (n + 1) // 2 for n in layer) for layer in layers]
    cubes = [sum(pace["eigenvalue_seconds_per_n3"] * n**3 for n in layer) for layer in layers]
    ways: dict[str, Any] = {}
    for faster in FASTER:
        for divided in (False, True):
            seconds = {
                workers: _seconds(
                    workers, collect / faster, triangles, [each / faster for each in cubes], pace, divided
                )
                for workers in WORKERS
            }
            whole = sum(seconds[1].values())
            speed_up = {workers: whole / sum(each.values()) for workers, each in seconds.items()}
            best = max(speed_up, key=lambda workers: speed_up[workers])
            name = f"{'joined by all workers' if divided else 'joined by one worker'}, {faster} times this core"
            ways[name] = {
                "seconds": {str(workers): each for workers, each in seconds.items()},
                "speed_up": {str(workers): each for workers, each in speed_up.items()},
                "stops_at": best,
                "efficient_to": max(workers for workers, each in speed_up.items() if each >= workers / 2),
            }
    return {
        "method": __doc__,
        "examples": EXAMPLES,
        "tokens": TOKENS,
        "store_bytes_per_second": STORE_BYTES_PER_SECOND,
        "bytes_of_a_piece": sum(triangles),
        "planned_collection_seconds": plan["stages"]["collection"]["seconds"],
        "measured": pace,
        "ways": ways,
    }


def claims(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """There is no target of a simulation; its arithmetic must at least give one worker a speed-up of one."""
    for name, way in found["ways"].items():
        yield results_file.claim(f"simulation ({name}): speed-up of one worker", abs(way["speed_up"]["1"] - 1), 0.0)


def _pace(pieces: dict[str, Any]) -> dict[str, float]:
    """Seconds on this machine, per unit that the simulation counts in; medians over rounds would hide nothing here."""
    whole, two, four = (pieces["rounds"][count][0] for count in ("1", "2", "4"))
    return {
        "collection_over_plan": four["pieces"][0]["cpu_seconds"] / four["pieces"][0]["planned_seconds"],
        "merge_seconds_per_byte": two["merge_cpu_seconds"] / two["read_bytes"],
        "eigenvalue_seconds_per_n3": whole["eigenvalues_cpu_seconds"] / whole["eigenvalues_of"] ** 3,
    }


def _seconds(
    workers: int,
    collect: float,
    triangles: Sequence[int],
    cubes: Sequence[float],
    pace: dict[str, float],
    divided: bool,
) -> dict[str, float]:
    batches = EXAMPLES // BATCH
    pieces = min(workers, batches)
    joiners = workers if divided else 1
    one = sum(triangles)
    per_byte = 1 / STORE_BYTES_PER_SECOND + pace["merge_seconds_per_byte"]
    return {
        "collect": collect * -(-batches // pieces) / batches,
        "write": 0.0 if workers == 1 else one / STORE_BYTES_PER_SECOND,
        "merge": 0.0 if workers == 1 else _longest([pieces * each * per_byte for each in triangles], joiners),
        "decompose": _longest(cubes, joiners),
    }


def _longest(weights: Sequence[float], workers: int) -> float:
    """The last worker's end, where the longest of what is left goes to whoever is free first."""
    ends = [0.0] * workers
    for weight in sorted(weights, reverse=True):
        heapq.heapreplace(ends, ends[0] + weight)
    return max(ends)
