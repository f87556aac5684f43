"""A plan from shapes alone against the plan that the job itself makes with its weights."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from engine import estimate as planning
from engine.collect import collect_or_read
from engine.errors import BudgetExceeded
from engine.estimate import estimate, plan_job
from engine.memory.budget import MemoryBudget
from engine.memory.plan import Plan
from tests.oracles import MemoryArtifacts, workspace

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.randint(0, 90, (6, 24), generator=torch.Generator().manual_seed(0))
TEXT = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
CLASSES = torch.zeros(6, dtype=torch.int64)


def built(kind: str, config: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, kind).from_config(config)


def llama(**sizes: int) -> Callable[[], nn.Module]:
    return built("AutoModelForCausalLM", transformers.LlamaConfig(**sizes))


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Tensor, str, dict[str, Any]]] = {
    "llama": (llama(vocab_size=100, num_key_value_heads=2, **SMALL), TEXT, IDS, "causal_lm", {}),
    "gpt2": (
        built(
            "AutoModelForCausalLM",
            transformers.GPT2Config(
                vocab_size=100, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
            ),
        ),
        TEXT, IDS, "causal_lm", {"ekfac": True},
    ),
    "bert": (
        built("AutoModelForSequenceClassification", transformers.BertConfig(vocab_size=100, **SMALL)),
        TEXT, CLASSES, "sequence_classification", {},
    ),
    "vit": (
        built("AutoModelForImageClassification", transformers.ViTConfig(image_size=32, patch_size=8, **SMALL)),
        {"pixel_values": torch.zeros(6, 3, 32, 32)}, CLASSES, "classification", {},
    ),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3)),
        torch.zeros(6, 10), CLASSES, "classification", {"nested": True},
    ),
}  # fmt: skip


def one_block() -> nn.Module:
    """A GPT-2 of one block on the meta device."""
    small = transformers.GPT2Config(
        vocab_size=100, n_embd=32, n_layer=1, n_head=4, bos_token_id=None, eos_token_id=None
    )  # fmt: skip
    with torch.device("meta"):
        return built("AutoModelForCausalLM", small)()


class Planned(Exception):
    """Ends a collection once its plan stands."""


def sizes(plan: Any) -> dict[tuple[str, ...], int]:
    """Every term but the process's own bytes, another process's in each run, and the weights that they hold."""
    return {
        (term["name"], term["stage"], term["place"], str(term["layer"])): term["size_bytes"]
        for term in plan["terms"]
        if term["source"] != "measured" and term["name"] not in ("weights", "converted weights")
    }


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("name", MODELS)
def test_shapes_alone_give_the_plan_that_the_job_makes(name: str) -> None:
    make, inputs, targets, task, options = MODELS[name]
    plans: list[Any] = []

    def stop(plan: Any) -> None:
        plans.append(plan)
        raise Planned

    real = workspace(make(), [(inputs, targets)], task, **options)
    real.ports.announce_plan, real.inputs.examples = stop, 6
    with pytest.raises(Planned):
        collect_or_read(real)
    with torch.device("meta"):
        model = make()
    meta = workspace(model, [(inputs, targets)], task, **options)
    meta.inputs.examples = 6
    planned = plan_job(meta).as_json()
    assert sizes(planned) == sizes(plans[0])
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert [term["size_bytes"] for term in planned["terms"] if term["name"] == "weights"] == [weights]


@pytest.mark.part(of=2, law="a plan that is made alone is that of the job")
def test_a_model_is_planned_where_it_stands_with_what_is_tied_in_it() -> None:
    make, inputs, targets, task, options = MODELS["gpt2"]
    model = make()
    with torch.device("meta"):
        bare = make()
    plans = [plan_job(workspace(each, [(inputs, targets)], task, **options)) for each in (model, bare)]
    assert plans[0].chosen == plans[1].chosen
    assert sizes(plans[0].as_json()) == sizes(plans[1].as_json())
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.part(of=2, law="a plan that is made alone is that of the job")
def test_the_kernels_of_the_planned_device_and_of_an_earlier_attempt_decide() -> None:
    task = MODELS["gpt2"][3]
    ids = torch.zeros(4, 256, dtype=torch.int64)

    def activations(amp: str, *earlier: str, term: str = "activations") -> int:
        made = workspace(one_block(), [({"input_ids": ids}, ids)], task, dtype="float32", amp=amp, batch_size=4)
        made.machine.device = torch.device("cuda")
        made.machine.budget = MemoryBudget(device_bytes=2**36, host_bytes=2**40)
        made.resume.numerics = {"attention": list(earlier)} if earlier else None
        return next(each.size_bytes for each in plan_job(made).terms if each.name == term)

    written_out = activations("off", "math")
    assert activations("off", "math", "flash") == written_out, "flash takes 16 bits alone"
    assert activations("bf16", "math") == written_out
    # scores of four heads, and their softmax is another copy
    scores = 4 * 4 * 256**2 * 4
    assert written_out - activations("bf16") > 0.8 * scores
    assert written_out - activations("off") > 0.8 * scores
    assert activations("off", "math", "memory-efficient") == activations("off")
    # the queries' gradients in float32, once for each share: heads of 16 numbers are rounded up to 32
    assert activations("bf16", "math", term="patches") < 131 * 256 * 32 * 4 <= activations("bf16", term="patches")


@pytest.mark.parametrize(
    ("layers", "billions", "seconds"), [(4, 1.072, 5), pytest.param(32, 6.738, 20, marks=pytest.mark.nightly)]
)
def test_seven_billion_weights_are_planned_in_seconds(layers: int, billions: float, seconds: float) -> None:
    with torch.device("meta"):
        model = llama(
            vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_hidden_layers=layers,
            num_attention_heads=32,
        )()  # fmt: skip
    ids = torch.zeros(4, 512, dtype=torch.int64)
    made = workspace(model, [({"input_ids": ids}, ids)], "causal_lm", batch_size=4)
    begun = time.process_time()
    plan: Plan = plan_job(made)
    assert time.process_time() - begun < seconds
    weights = next(term.size_bytes for term in plan.terms if term.name == "weights")
    assert weights == pytest.approx(4e9 * billions, rel=1e-3)
    # down_proj's A alone: 11008² numbers in each layer
    assert plan.stage_bytes("host", "collection") > layers * 4 * 11_008**2


def within(host_bytes: int, *, scratch: bool = True) -> Any:
    """The plan of a small job within a budget; what the process holds stays out of it."""
    _, inputs, targets, task, _ = MODELS["gpt2"]
    made = workspace(one_block(), [(inputs, targets)], task, ekfac=True)
    made.machine.budget = MemoryBudget(device_bytes=2**62, host_bytes=host_bytes)
    made.ports.scratch = MemoryArtifacts() if scratch else None
    return estimate(made)


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("scratch", [True, False])
@pytest.mark.part(of=2, law="a plan that is made alone is that of the job")
def test_the_smallest_budget_is_accepted_and_a_mebibyte_less_is_not(
    monkeypatch: pytest.MonkeyPatch, scratch: bool
) -> None:
    monkeypatch.setattr(planning, "resident_bytes", lambda: 0)
    smallest = within(2**20, scratch=scratch)["smallest_budget"]["host_bytes"]
    exactly = within(smallest, scratch=scratch)
    assert exactly["fits"]
    assert exactly["host_peak_bytes"] <= smallest
    assert exactly["smallest_budget"]["host_bytes"] == smallest
    assert not within(smallest - 2**20, scratch=scratch)["fits"]


def test_a_job_that_is_refused_names_the_smallest_budget_that_takes_it() -> None:
    def job(host_bytes: int) -> Any:
        make, inputs, targets, task, _ = MODELS["mlp"]
        made = workspace(make(), [(inputs, targets)], task)
        made.machine.budget = MemoryBudget(device_bytes=2**62, host_bytes=host_bytes)
        return made

    with pytest.raises(BudgetExceeded, match="the smallest that would do") as refused:
        collect_or_read(job(2**20))
    named = re.search(r"`memory.host` to (\d+)MiB", str(refused.value))
    assert named is not None
    assert collect_or_read(job(int(named[1]) * 2**20)).layers


@pytest.mark.part(of=2, law="a plan that is made alone is that of the job")
def test_a_named_budget_is_not_refused_to_a_process_that_holds_a_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    held = 400 * 2**20
    monkeypatch.setattr(planning, "resident_bytes", lambda: held)
    named = within(2**20)["smallest_budget"]["host_bytes"]
    for more in (0, 12 * 2**20):
        monkeypatch.setattr(planning, "resident_bytes", lambda more=more: held + more)
        again = within(named)
        assert again["fits"], more
        assert again["host_peak_bytes"] <= named
    # it leaves no more than that: a budget is not named to be on the safe side
    monkeypatch.setattr(planning, "resident_bytes", lambda: held + 24 * 2**20)
    assert not within(named)["fits"]
