"""Figures that circulate about K-FAC scripts, each computed or measured again.

The rows are those of ``docs/circulating-figures.md``. What needs only shapes is computed; what depends on a machine is
measured here, on the device that this process has.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks import results_file
from benchmarks.reconstruction import basis, factor, spectrum
from engine.factors.clipping.clip_eigenvalues import PLACEMENTS, placement_bytes, stabilise_
from engine.planning.decomposition_memory import eigendecomposition_bytes
from kronoscope.local import measure

CLASSES = 50_257
"""Outputs of GPT-2's head."""
TERMS = 2_048
"""Loss terms of two sequences of 1,024 tokens."""
WIDTH = 768
WIDE = 10_000
REBUILT = 4_096
KAPPA_MAX = 1e6


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


def decomposition_bytes() -> dict[str, float]:
    """GB of decomposing a matrix of 10,000 rows that is kept in float32, and of its square in float32."""
    return {
        "matrix_gb": 4 * WIDE**2 / 1e9,
        "with_vectors_gb": eigendecomposition_bytes(WIDE, vectors=True).host_bytes / 1e9,
        "values_alone_gb": eigendecomposition_bytes(WIDE, vectors=False).host_bytes / 1e9,
    }


def freed_by_rows() -> dict[str, float]:
    """GB that rows in 16 bits and their Gram matrix take less than decomposing the head's dense G, and than G alone."""
    kept = 2 * TERMS * CLASSES + 4 * TERMS**2
    return {
        "of_a_decomposition_gb": (4 * 4 * CLASSES**2 - kept) / 1e9,
        "of_the_matrix_gb": (4 * CLASSES**2 - kept) / 1e9,
    }


def rebuild_bytes() -> dict[str, float]:
    """MB of ``(Q * λ) @ Q.T`` with Q at 4,096 rows in float32, and the most that an update takes beside both."""
    cpu = torch.device("cpu")
    ours = [max(placement_bytes(REBUILT, None, torch.float32, placement, cpu)) for placement in PLACEMENTS]
    return {"basis_product_and_result_mb": 3 * 4 * REBUILT**2 / 1e6, "update_at_most_mb": max(ours) / 1e6}


def rebuild_milliseconds() -> dict[str, float]:
    """Milliseconds of rebuilding a factor of 4,096 rows in float32 from its eigenvectors, and of the updates."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    exact, figures = basis(REBUILT), {}
    vectors = exact.to(device, torch.float32)
    for name, clipped in (("half_clipped", REBUILT // 2), ("twentieth_clipped", REBUILT // 20)):
        values = spectrum(REBUILT, clipped)
        scaled = values.to(device, torch.float32)
        figures["whole_ms"] = _median_ms(lambda by=scaled: (vectors * by) @ vectors.T, device)
        original = factor(values, exact)
        for placement in ("device", "panels"):
            home = device if placement == "device" else torch.device("cpu")
            stands, stored = original.to(home), vectors.to(home)
            work = stands.clone()
            figures[f"{name}_{placement}_ms"] = _median_ms(
                lambda place=placement, of=work, by=values, through=stored: stabilise_(
                    of, by, through, KAPPA_MAX, placement=place, device=device
                ),
                device,
                # a factor that has been through it is no longer what its basis says
                lambda of=work, before=stands: of.copy_(before),
            )
    return figures


def forward_passes() -> dict[str, float]:
    """Forward passes of a batch with labels sampled from the model, and with those of the data; and their seconds."""
    inputs, targets = torch.randn(16 * 256, 256), torch.randint(10, (16 * 256,))

    def passes(fisher: str, batches: int) -> tuple[int, float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        model.register_forward_hook(count)
        start = time.perf_counter()
        measure(
            model,
            (inputs[: batches * 256], targets[: batches * 256]),
            task="classification",
            kinds=("factors",),
            collection={"fisher": fisher, "batch_size": 256, "self_check": "off", "exact_trace": False},
        )
        return calls, time.perf_counter() - start

    figures = {}
    for fisher in ("mc", "empirical"):
        many, few = ([passes(fisher, batches) for _ in range(3)] for batches in (16, 8))
        figures[f"{fisher}_passes"] = (many[0][0] - few[0][0]) / 8
        figures[f"{fisher}_batch_ms"] = 1e3 * (min(each[1] for each in many) - min(each[1] for each in few)) / 8
    return figures


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


def _median_ms(work: Callable[[], object], device: torch.device, prepare: Callable[[], object] = lambda: None) -> float:
    seconds = []
    for _ in range(6):
        prepare()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds[1:])


def main() -> None:
    """Compute and measure all of them."""
    errors, saved, ratio = local_gram_errors(), saved_for_backward(), communication_ratio()
    passes, rebuilt = forward_passes(), rebuild_bytes()
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
            results_file.claim("forward passes of a batch with labels sampled from the model", passes["mc_passes"], 1),
            results_file.claim(
                "MB of an update at 4,096 rows beside factor and basis", rebuilt["update_at_most_mb"], 64
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
            "decomposition_of_10000_rows": decomposition_bytes(),
            "rebuild_of_4096_rows_bytes": rebuilt,
            "rebuild_of_4096_rows": rebuild_milliseconds(),
            "freed_by_rows": freed_by_rows(),
            "true_fisher": passes,
        },
    )


if __name__ == "__main__":
    main()
