"""laplace-torch loads the exported state; its log evidence is that of the same cut blocks, made dense."""

import math
import sys
from pathlib import Path

import torch
from laplace import Laplace
from torch.nn.utils import parameters_to_vector

sys.path.insert(0, sys.argv[2])
from nets import examples, net

PRIOR = 2.5


def main() -> None:
    torch.set_default_dtype(torch.float64)
    inputs, labels = (each.double() if each.is_floating_point() else each for each in examples())
    torch.set_default_dtype(torch.float32)
    model = net().double()
    torch.set_default_dtype(torch.float64)
    state = torch.load(Path(sys.argv[1]) / "laplace", weights_only=True)
    state["H"] = [[each.double() for each in factors] for factors in state["H"]]
    state["mean"] = parameters_to_vector(model.parameters()).detach()
    state["loss"] = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum").detach()
    made = Laplace(model, "classification", subset_of_weights="all", hessian_structure="kron", prior_precision=PRIOR)
    made.load_state_dict(state)
    made.prior_precision = torch.tensor([PRIOR])
    found = float(made.log_marginal_likelihood())
    # the same blocks, dense: log p(D|θ) − ½ θᵀθ·δ − ½ log det(H + δI) + ½ P log δ
    mean, total, place = state["mean"], 0.0, 0
    for factors, parameter in zip(state["H"], model.parameters(), strict=True):
        block = torch.kron(*factors) if len(factors) == 2 else factors[0]
        assert len(block) == parameter.numel()
        total += float(torch.linalg.slogdet(block + PRIOR * torch.eye(len(block)))[1])
        place += len(block)
    expected = float(-state["loss"]) - 0.5 * (total - place * math.log(PRIOR) + PRIOR * float(mean @ mean))
    print(f"  log evidence {found:.10g}, dense {expected:.10g}")
    assert abs(found / expected - 1) <= 1e-6


main()
