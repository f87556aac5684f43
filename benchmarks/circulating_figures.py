"""Figures that circulate about K-FAC scripts, each computed or measured again.

The rows are those of ``docs/circulating-figures.md``. What needs only shapes is computed; what depends on a machine is
measured here, on the device that this process has.
"""

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import results_file
from engine.planning.eigendecomposition_memory import eigendecomposition_bytes

CLASSES = 50_257
"""Outputs of GPT-2's head."""
TERMS = 2_048
"""Loss terms of two sequences of 1,024 tokens."""
WIDTH = 768


def dense_head_bytes() -> dict[str, float]:
    """Bytes of decomposing the dense G of the head, in float32 by ``eigh``'s divide and conquer.

    It holds the matrix, its copy that becomes the eigenvectors, and a workspace of ``2 n²`` numbers.
    """
    square = 4 * CLASSES**2
    return {
        "matrix_gb": square / 1e9,
        "matrix_vectors_and_workspace_gb": 4 * square / 1e9,
        "widest_matrix_of_lapack_gib": eigendecomposition_bytes(46_340, vectors=True).host_bytes / 2**30,
    }


def row_bytes() -> dict[str, float]:
    """Bytes of the gradient rows in 16 bits, of the head and of a layer as wide as the model."""
    return {
        "head_mb": 2 * TERMS * CLASSES / 1e6,
        "hidden_layer_mb": 2 * TERMS * WIDTH / 1e6,
        "gram_mb": 4 * TERMS**2 / 1e6,
    }


def solve_milliseconds(terms: int, outputs: int) -> dict[str, float]:
    """Milliseconds of one damped solve with G kept as rows, and of preparing it (float32, median of five)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = torch.randn(terms, outputs, device=device) / outputs**0.5
    right = torch.randn(outputs, 8, device=device)

    def prepare() -> Tensor:
        return torch.linalg.cholesky(rows @ rows.T + 1e-2 * torch.eye(terms, device=device))

    factor = prepare()

    def solve() -> Tensor:
        return (right - rows.T @ torch.cholesky_solve(rows @ right, factor)) / 1e-2

    return {"prepare_ms": _median_ms(prepare, device), "solve_ms": _median_ms(solve, device)}


def local_gram_errors() -> dict[str, float]:
    """Relative errors of ``(G + λI)⁻¹ V`` where each of four ranks uses its own rows' Gram matrix, and of the sum."""
    torch.manual_seed(0)
    ranks, terms, outputs, damping = 4, 64, 512, 1e-3
    shared = torch.randn(8, outputs, dtype=torch.float64)
    mix = torch.randn(ranks * terms, 8, dtype=torch.float64)
    rows = (mix @ shared + torch.randn(ranks * terms, outputs, dtype=torch.float64)) / (ranks * terms) ** 0.5
    gradient = torch.randn(outputs, 1, dtype=torch.float64)
    eye = torch.eye(terms, dtype=torch.float64)
    exact = torch.linalg.solve(rows.T @ rows + damping * torch.eye(outputs, dtype=torch.float64), gradient)
    summed = sum(part @ part.T for part in rows.split(terms))
    assert isinstance(summed, Tensor)
    errors = []
    for part in rows.split(terms):
        weights = torch.linalg.solve(summed + damping * eye, part @ gradient)
        wrong = (gradient - part.T @ weights) / damping
        errors.append(float((wrong - exact).norm() / exact.norm()))
    gram = torch.linalg.solve(rows @ rows.T + damping * torch.eye(len(rows), dtype=torch.float64), rows @ gradient)
    right = (gradient - rows.T @ gram) / damping
    return {
        "smallest": min(errors),
        "largest": max(errors),
        "whole_gram": float((right - exact).norm() / exact.norm()),
    }


def communication_ratio(ranks: int = 4) -> dict[str, float]:
    """Bytes that each of the ranks sends for the head's G: dense all-reduce over rows in shards and a packed Gram."""
    share = (ranks - 1) / ranks
    dense = share * 4 * CLASSES * (CLASSES + 1)
    gather = share * CLASSES * TERMS * 2
    gram = share * CLASSES * TERMS * 2 / ranks + share * 4 * TERMS * (TERMS + 1)
    return {"dense_over_gram": dense / gram, "dense_over_gather": dense / gather, "gram_mib": gram / 2**20}


def saved_for_backward() -> dict[str, float]:
    """MiB that autograd saves: a batch, the same with gradients accumulated over two batches, and each batch halved."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.GELU())))
    batches = [torch.randn(1024, 512) for _ in range(2)]
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def peak(pieces: list[Tensor]) -> float:
        largest = 0
        for piece in pieces:
            storages: dict[int, int] = {}

            def keep(tensor: Tensor, seen: dict[int, int] = storages) -> Tensor:
                if tensor.untyped_storage().data_ptr() not in weights:
                    seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = model(piece).square().mean()
            largest = max(largest, sum(storages.values()))
            loss.backward()
        return largest / 2**20

    return {
        "one_batch": peak(batches[:1]),
        "accumulated_over_two_batches": peak(batches),
        "each_batch_in_two_slices": peak([half for batch in batches for half in batch.split(512)]),
    }


def _median_ms(work: Any, device: torch.device) -> float:  # noqa: ANN401 - a function without arguments
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds[1:])


def main() -> None:
    """Compute and measure all of them."""
    errors, saved, ratio = local_gram_errors(), saved_for_backward(), communication_ratio()
    results_file.write(
        "circulating_figures",
        [
            results_file.claim("error of summing the ranks' own Gram matrices", errors["smallest"], 0.1, at_most=False),
            results_file.claim("error of the Gram matrix of all rows", errors["whole_gram"], 1e-10),
            results_file.claim(
                "saved bytes with gradients accumulated over batches, over those of one batch",
                saved["accumulated_over_two_batches"] / saved["one_batch"],
                0.99,
                at_most=False,
            ),
            results_file.claim(
                "saved bytes with each batch in two slices, over those of one batch",
                saved["each_batch_in_two_slices"] / saved["one_batch"],
                0.55,
            ),
        ],
        {
            "dense_head_bytes": dense_head_bytes(),
            "row_bytes": row_bytes(),
            "solve_hidden_layer": solve_milliseconds(TERMS, 4 * WIDTH),
            "solve_head": solve_milliseconds(TERMS, CLASSES),
            "local_gram_errors": errors,
            "communication": ratio,
            "saved_for_backward_mib": saved,
        },
    )


if __name__ == "__main__":
    main()
