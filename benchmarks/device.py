"""Device jobs: whole collections on a GPU, their seconds before, in and after the batches, and what was planned.

Each row stores ``results/device.json`` before the next begins, the most valuable section first, so that a run that is
cut short leaves what it has measured; a row that fails is a sentence there.

    gpt2 …     GPT-2 small, 8 batches of 8 × 512 tokens, float32, without and with its head, beside one gradient of the
               layers measured and of all parameters, curvlinops' whole collection with and without the copy of its
               factors to the host, and (without head) the same job by `precision: tf32`, the errors of both against
               float64, dattri-llm's covariance callback and profiles of a warm job
    plans      plan against measured, bytes and seconds: ResNet-50, Llama shapes in bf16, a mixture of experts and an
               LSTM; those of GPT-2 stand in its own sections
    peers      MiniLM's and ResNet-50's shapes beside kronfluence's covariance fit, as found
    llama_1b   Llama-1B's shapes in bf16, 4 batches of 4 × 1024 tokens: tokens a second of the whole job
    eigh       seconds, and bytes at the peak over n², of decompositions with and without vectors, and of the product
               V · diag · Vᵀ that rebuilds the matrix
    mlp        784-1024-1024-10, 8 batches of 256

The Fisher is the empirical one everywhere, ours and theirs, and float32 products are exact (no TF32) for all, but for
the products behind A and G in the rows named tf32. It needs torch, numpy, scipy and transformers alone, and the peers
for their comparisons. Without a GPU it runs at sizes that show that it works.

    python -m benchmarks.device [--sections gpt2_without_head eigh] [--output NAME] [--add]
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from benchmarks import results_file
from benchmarks.cases import device_models
from benchmarks.cases.device_jobs import (
    FAILED,
    Figures,
    Row,
    agreement,
    allocated,
    attempt,
    begin_peak,
    collected,
    copies,
    functions,
    gradient,
    now,
    operations,
    peak,
    peer,
    plan_claims,
    ratio_claim,
    timed,
)
from benchmarks.cases.device_models import BATCHES, DEVICE, SMALL, Case
from benchmarks.cases.precision_errors import precision_errors
from engine.linalg.eigensolvers import solvers

OVER_GRADIENT, OVER_BATCHES = 0.75, 1.3
"""Most of: a batch over one gradient of the layers measured, and a whole job over its batches."""
OVER_PEER, UNCHECKED_OVER_PEER = 1.65, 1.3
"""Most of a whole job over curvlinops', whose factors stay on the device: with the self-check, and without it."""
HEAD_OVER_GRADIENT, HEAD_AFTER_SECONDS, HEAD_OVER_PEAK = 1.15, 2.0, 1.3
"""Limits of a language model with its head: a batch over a gradient of all parameters, seconds after the last batch,
and the peak beside the rows that the plan keeps on the device, over that gradient's peak."""
BEFORE, UNCHECKED_BEFORE, AFTER = 3.5, 2.0, 1.0
"""Gradients' time before the first batch, with the self-check and without it, and after the last."""
EIGEN_SIZES = (64,) if SMALL else (768, 1024, 2048, 3072, 4096, 8192)
MOST_FACTOR_BYTES = 45 * 2**30
"""Bytes that a device of 80 GB holds beside a model and its activations."""
PEERS = ("curvlinops-for-pytorch", "kronfluence", "dattri-llm")


def language_model(*, head: bool) -> Iterator[Row]:
    """Yield the rows of GPT-2."""
    case = device_models.gpt2(head=head)
    runs: Figures = {}
    yield from whole_jobs(case, runs)
    yield Row({"gradient_of_all": attempt(lambda: gradient(case, every=True))})
    yield from beside_curvlinops(case, runs)
    if not head:
        runs["tf32"] = attempt(lambda: collected(case, precision="tf32"))
        text = f"{case.name}: a whole job by tf32 over one by ieee"
        yield Row({"tf32": runs["tf32"], **ratio(text, runs["tf32"], runs["checked"])})
        yield Row({"errors_against_float64": attempt(lambda: precision_errors(case))})
        runs["dattri_llm"] = attempt(lambda: peer("dattri_llm", case)[0])
        text = f"{case.name}: a whole job over dattri-llm's callback, as found"
        yield Row({"dattri_llm": runs["dattri_llm"], **ratio(text, runs["checked"], runs["dattri_llm"])})
        yield Row({"profile_of_functions": attempt(lambda: functions(case))})
        yield Row({"profile_of_operations": attempt(lambda: operations(case))})


def multilayer_perceptron() -> Iterator[Row]:
    """Yield the rows of an MLP."""
    case = device_models.perceptron()
    runs: Figures = {}
    yield from whole_jobs(case, runs)
    yield from beside_curvlinops(case, runs)


def whole_jobs(case: Case, runs: Figures) -> Iterator[Row]:
    """Yield the rows of a case's whole jobs and of its gradient, and keep them in ``runs``."""
    for name, check in (("cold", "growing"), ("checked", "growing"), ("unchecked", "off")):
        runs[name] = attempt(lambda check=check: collected(case, check))  # type: ignore[misc]
        yield Row({name: runs[name]}, plan_claims(case.name, runs[name]) if name == "checked" else [])
    runs["gradient"] = attempt(lambda: gradient(case))
    yield Row({"gradient": runs["gradient"]}, list(job_claims(case.name, runs)))


def job_claims(name: str, runs: Figures) -> Iterator[dict[str, Any]]:
    """Yield the claims on a warm job beside one gradient."""
    checked, unchecked, one = runs["checked"], runs["unchecked"], (runs["gradient"], "seconds")
    if name.endswith("with head"):
        yield ratio_claim(f"{name}: a batch over one gradient", HEAD_OVER_GRADIENT, (unchecked, "batch_seconds"), one)
        text = f"{name}: seconds after the last batch"
        yield ratio_claim(text, HEAD_AFTER_SECONDS, (checked, "after_seconds"), ({"one": 1.0}, "one"))
        rows = sum(size for term, size in checked.get("planned_terms", {}).items() if "gradient rows" in term)
        beside = checked if FAILED in checked else {"bytes": checked["peak_bytes"] - rows}
        text = f"{name}: peak beside the rows that the plan keeps on the device over a gradient's"
        if DEVICE.type == "cuda":
            yield ratio_claim(text, HEAD_OVER_PEAK, (beside, "bytes"), (runs["gradient"], "peak_bytes"))
    else:
        yield ratio_claim(f"{name}: a batch over one gradient", OVER_GRADIENT, (unchecked, "batch_seconds"), one)
    text = f"{name}: before the first batch over one gradient"
    yield ratio_claim(text, BEFORE, (checked, "before_seconds"), one)
    yield ratio_claim(f"{text}, self-check off", UNCHECKED_BEFORE, (unchecked, "before_seconds"), one)
    yield ratio_claim(f"{name}: after the last batch over one gradient", AFTER, (checked, "after_seconds"), one)
    together = checked if FAILED in checked else {"seconds": BATCHES * checked["batch_seconds"]}
    text = f"{name}: a whole job over its batches"
    yield ratio_claim(text, OVER_BATCHES, (checked, "whole_seconds"), (together, "seconds"))


def beside_curvlinops(case: Case, runs: Figures) -> Iterator[Row]:
    """Yield the rows of curvlinops' whole collection, and of its factors' way to the host."""
    held: Figures = {}

    def collect() -> Figures:
        figures, held["factors"] = peer("curvlinops", case)
        return figures

    theirs = attempt(collect)
    text, whole = f"{case.name}: a whole job over curvlinops'", (theirs, "whole_seconds")
    claims = [
        ratio_claim(text, OVER_PEER, (runs["checked"], "whole_seconds"), whole),
        ratio_claim(f"{text}, self-check off", UNCHECKED_OVER_PEER, (runs["unchecked"], "whole_seconds"), whole),
    ]
    yield Row({"curvlinops": theirs}, claims)
    if "factors" not in held:
        return
    moved = attempt(lambda: copies(held.pop("factors")))
    if FAILED not in moved:
        moved["whole_and_pageable_seconds"] = theirs["whole_seconds"] + moved["pageable_seconds"]
        if "pinned_seconds" in moved:
            moved["whole_and_pinned_seconds"] = theirs["whole_seconds"] + moved["pinned_seconds"]
    yield Row({"curvlinops_to_host": moved})


def ratio(text: str, ours: Figures, theirs: Figures) -> Figures:
    """Return the ratio of two whole jobs as a figure without a target; nothing where one was not measured."""
    if FAILED in ours or FAILED in theirs:
        return {}
    return {text: ours["whole_seconds"] / theirs["whole_seconds"]}


def plans() -> Iterator[Row]:
    """Yield a row of each model: its plan beside a whole job, after a job of one batch that warms the process."""
    for name, build in device_models.PLANNED.items():
        torch.manual_seed(0)

        def row(build: Callable[[], Case] = build) -> Figures:
            case = build()
            timed(case, batches=1)
            return collected(case)

        figures = attempt(row)
        yield Row({name: figures}, plan_claims(name, figures))


def beside_kronfluence() -> Iterator[Row]:
    """Yield the rows of two models, ours and kronfluence's, both warm and with factors on the host."""
    for build in (device_models.minilm, device_models.resnet):
        torch.manual_seed(0)
        held: Figures = {}

        def ours(build: Callable[[], Case] = build, held: Figures = held) -> Figures:
            case = held["case"] = build()
            timed(case, batches=1)
            figures, held["outcome"] = timed(case)
            return figures

        def theirs(held: Figures = held) -> Figures:
            if "case" not in held:
                return {FAILED: "the case could not be built"}
            figures, factors = peer("kronfluence", held["case"])
            if "outcome" in held:
                figures["traces_over_ours"] = agreement(factors, held["outcome"])
            return figures

        own = attempt(ours)
        yield Row({f"{build.__name__}: kronoscope": own})
        fit = attempt(theirs)
        text = f"{build.__name__}: a whole job over kronfluence's covariance fit, as found"
        yield Row({f"{build.__name__}: kronfluence": fit, **ratio(text, own, fit)})


def largest_llama() -> Iterator[Row]:
    """Yield the row of Llama-1B's shapes, cut to fewer layers where the whole could not be measured."""
    warming = attempt(lambda: timed(device_models.llama_1b(1), batches=1)[0])
    yield Row({"warming, one layer": warming})
    for layers in (16, 4, 1):
        figures = attempt(lambda layers=layers: llama_row(layers))  # type: ignore[misc]
        yield Row({f"{layers} layers": figures}, plan_claims(f"Llama-1B, {layers} layers", figures))
        if FAILED not in figures:
            return


def llama_row(layers: int) -> Figures:
    """Return the figures of so many layers, with tokens a second of the whole job."""
    begun = now()
    case = device_models.llama_1b(layers)
    built = now() - begun
    of_factors = sum(factor_bytes(case.model.get_submodule(name)) for name in case.layers)
    if of_factors > MOST_FACTOR_BYTES:
        return {FAILED: f"the factors of {layers} layers are {of_factors:,} bytes, more than {MOST_FACTOR_BYTES:,}"}
    figures = collected(case)
    tokens = sum(targets.numel() for _, targets in case.data)
    return figures | {
        "build_seconds": built,
        "factor_bytes": of_factors,
        "tokens": tokens,
        "tokens_a_second": tokens / figures["whole_seconds"],
        "tokens_a_second_of_batches": tokens / len(case.data) / figures["batch_seconds"],
    }


def factor_bytes(module: nn.Module) -> int:
    """Return the bytes of a linear layer's A and G in float32."""
    entering, leaving = int(module.in_features), int(module.out_features)  # type: ignore[arg-type]
    return 4 * (entering**2 + leaving**2)


def decompositions() -> Iterator[Row]:
    """Yield seconds and bytes of the first solver of each size, and seconds of the rebuild."""
    for size in EIGEN_SIZES:
        for single in (False, True):
            for need in ("values", "vectors"):
                figures = attempt(lambda need=need, single=single, size=size: solved(size, need, single=single))  # type: ignore[misc]
                name = f"{figures.pop('solver', 'float32' if single else 'float64')} {need} {size}"
                claims = []
                if figures.get("planned_bytes"):
                    one = (figures, "held_bytes"), (figures, "planned_bytes")
                    claims.append(ratio_claim(f"{name}: held over planned bytes", 1.0, *one))
                yield Row({name: figures}, claims)


def solved(size: int, need: str, *, single: bool) -> Figures:
    """Return the figures of one decomposition, run once before; with vectors, of the rebuild too."""
    matrix = torch.randn(size, size, device=DEVICE)
    matrix = matrix @ matrix.T
    solver = solvers(size, need, DEVICE, torch.float32, single=single)[0]  # type: ignore[arg-type]
    solver.solve(matrix)
    begin_peak()
    before, begun = allocated(), now()
    values, vectors = solver.solve(matrix)
    figures = {
        "solver": solver.cost.name,
        "seconds": now() - begun,
        "held_bytes": peak() - before,
        "planned_bytes": solver.cost.device_bytes,
    }
    if vectors is not None:
        (vectors * values) @ vectors.mT
        begun = now()
        again = (vectors * values) @ vectors.mT
        figures["rebuild_seconds"] = now() - begun
        figures["rebuild_error"] = float((again - matrix.to(again)).norm() / matrix.norm())
    return figures


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "gpt2_without_head": lambda: language_model(head=False),
    "plans": plans,
    "gpt2_with_head": lambda: language_model(head=True),
    "peers": beside_kronfluence,
    "llama_1b": largest_llama,
    "eigh": decompositions,
    "mlp": multilayer_perceptron,
}


def main() -> None:
    """Measure section by section, and store the result after each row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--output", default="device")
    parser.add_argument("--add", action="store_true", help="add to what other sections of this commit have stored")
    options = parser.parse_args()
    # ours multiplies at full width whatever stands here; the peers take what they find
    torch.backends.cudnn.allow_tf32 = False
    # what stands here for good is not looked through again by each collection of garbage
    gc.freeze()
    claims, figures = results_file.read(options.output) if options.add else ([], {})
    figures["machine"] = _machine()
    for name in options.sections:
        torch.manual_seed(0)
        begun, figures[name] = time.perf_counter(), {}
        for row in SECTIONS[name]():
            claims += row.claims
            figures[name] |= row.figures | {"section_seconds": time.perf_counter() - begun}
            results_file.store(options.output, claims, figures)
            results_file.show(row.claims)
            for key, value in row.figures.items():
                if isinstance(value, dict) and FAILED in value:
                    print(f"NOT MEASURED: {name}, {key}: {value[FAILED]}", flush=True)


def _machine() -> dict[str, Any]:
    if DEVICE.type == "cpu":
        return {"device": "cpu", "peers": _versions()}
    properties = torch.cuda.get_device_properties(DEVICE)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": _driver(),
        "matrix_products_in_tf32": torch.backends.cuda.matmul.allow_tf32,
        "peers": _versions(),
    }


def _versions() -> dict[str, str]:
    """Version of each peer that is there."""
    versions = {}
    for name in PEERS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _driver() -> str:
    """Version of the driver; a sentence where it cannot be asked."""
    try:
        import pynvml  # noqa: PLC0415 - it may be absent

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception as error:  # noqa: BLE001 - a fact that is nice to have
        return f"unknown: {error}"


if __name__ == "__main__":
    main()
