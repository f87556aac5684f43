"""No field of a stranger's config.json goes beyond its bound, in any architecture, and no build beyond its own."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from catalog.requests.inputs import DirectoryModel, Task
from ops.list_architectures import is_next_token_seen
from worker.execution.files.open_files import OpenFolder
from worker.execution.loader_context import LoaderContext
from worker.execution.models.architectures import bounded_build
from worker.execution.models.architectures.bounded_build import bounded
from worker.execution.models.architectures.config_fields import Field, declared_fields, integer_bounds, read_value
from worker.execution.models.architectures.config_json import read_architecture
from worker.execution.models.architectures.model_types import model_types
from worker.execution.models.checkpoint import load
from worker.execution.refusal import Refusal

PARTS = 16
OUTSIDE = ("someone/kernel", "..\\up", "http:x", "os.system", "__import__")
WRONG: tuple[Any, ...] = ({"a": 1}, [{"a": 1}], [[0] * 1_025], [0] * 1_025, ["someone/kernel"], 10**400, 1e300)


def loaded(folder: Path, config: dict[str, Any], task: str) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    context = LoaderContext(store=folder / "store", shapes_only=True)
    return load(DirectoryModel(source="directory", path=str(folder)), Task(type=task), context)  # type: ignore[arg-type]


def hostile(field: Field) -> Iterator[Any]:
    """Yield values that no field may have, and those beyond a field's own bounds."""
    yield from (*OUTSIDE, *WRONG)
    least, most = integer_bounds(field)
    if float not in field.kinds:
        yield from (least - 1, most + 1, [most + 1], [[least - 1]])


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("part", range(PARTS))
def test_every_field_of_every_architecture_is_bounded(part: int) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415 - not at collection

    for name in sorted(model_types())[part::PARTS]:
        for field in declared_fields(CONFIG_MAPPING[name]).values():
            for value in hostile(field):
                if isinstance(value, list) and float in field.elements and not isinstance(value[0], (str, dict)):
                    value = [10**400]  # noqa: PLW2901 - a number's own bound
                with pytest.raises(Refusal, match=r"config\.json"):
                    read_value(field, value, "/model/path")


@pytest.mark.parametrize(
    ("model_type", "task", "changes"),
    [
        ("llama", "causal_lm", {"num_hidden_layers": 1_025}),
        ("t5", "embedding", {"num_layers": -1}),
        ("swin", "classification", {"depths": [600, 600]}),
        ("swin", "classification", {"depths": [1] * 1_025}),
        ("modernbert", "masked_lm", {"hidden_activation": "someone/kernel"}),
        ("mamba", "causal_lm", {"time_step_rank": "evil:rank"}),
        ("wav2vec2", "classification", {"conv_dim": [10**9]}),
        ("clip_vision_model", "embedding", {"image_size": 10**9}),
        ("gemma3", "embedding", {"text_config": {"hidden_size": 10**9}}),
        ("llava", "embedding", {"text_config": {"model_type": "timm_wrapper"}}),
        ("llava", "embedding", {"vision_config": {"model_type": "clip_vision_model", "auto_map": {"A": "b"}}}),
        ("llava", "embedding", {"vision_config": "clip_vision_model"}),
        ("gemma3_text", "causal_lm", {"layer_types": ["someone/kernel"]}),
        ("qwen3", "causal_lm", {"rope_parameters": {"evil": {"rope_type": "default"}}}),
        ("qwen3", "causal_lm", {"pad_token_id": 10**9}),
        ("gemma4_text", "causal_lm", {"per_layer_config": {"1": {"max_position_embeddings": 8}}}),
        ("gemma4_text", "causal_lm", {"per_layer_config": {"1": {"head_dim": 10**9}}}),
        ("detr", "classification", {}),
        ("rwkv", "causal_lm", {}),
    ],
)  # fmt: skip
def test_a_hostile_config_is_refused_in_a_second(
    model_type: str, task: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    started = time.process_time()
    with pytest.raises(Refusal, match=r"config\.json"):
        loaded(tmp_path, {"model_type": model_type, **changes}, task)
    assert time.process_time() - started < 5


def test_more_modules_than_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bounded_build, "MOST_MODULES", 100)
    with pytest.raises(Refusal, match="more than 100 modules"):
        loaded(tmp_path, {"model_type": "bert"}, "embedding")


def test_a_build_ends_at_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_build, "MOST_SECONDS", 0.2)

    def swallow() -> None:
        while True:
            with contextlib.suppress(Exception):  # as another package may do
                time.sleep(5)

    with pytest.raises(Refusal, match=r"more than 0 s"), bounded("/model/path"):
        swallow()


@pytest.mark.real_programs
def test_a_build_ends_at_its_memory() -> None:
    program = (
        "from worker.execution.models.architectures.bounded_build import bounded\n"
        "from worker.execution.refusal import Refusal\n"
        "try:\n"
        "    with bounded('/model/path'): big = bytes(3 * 2**29)\n"  # which asks for them, and touches none
        "except Refusal as refused: print(refused.message)\n"
        "big = bytes(3 * 2**29)\n"  # the limit is gone again
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert "more than 1 GiB of memory" in done.stdout


def test_nothing_reaches_out_while_a_model_is_built() -> None:
    import socket  # noqa: PLC0415 - what must not be used

    class Evil(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            try:
                socket.getaddrinfo("localhost", 80)
            except Exception:  # noqa: BLE001 - as another package may do
                self.fallen_back = True

    with pytest.raises(Refusal, match=r"a connection or another program \(`socket\.getaddrinfo`\)"), bounded("/model"):
        Evil()
    socket.getaddrinfo("localhost", 80)


def test_a_list_of_more_numbers_than_the_files_hold_is_refused_early() -> None:
    with pytest.raises(Refusal, match="more than 1,000 weights"), bounded("/model", 1_000), torch.device("meta"):
        nn.Sequential(*(nn.Linear(10, 10) for _ in range(100)))


def test_the_list_is_that_of_a_reviewed_transformers() -> None:
    heads = [name for name, each in model_types().items() if each.heads]
    assert len(heads) > 500
    assert not {"timm_wrapper", "timm_backbone", "detr", "rwkv", "layoutlmv2"} & set(model_types())


NOT_READ = {
    "aria": "projector_patch_to_query_dict", "bailing_hybrid": "linear_head_dim", "dbrx": "ffn_act_fn",
    "deepseek_v4": "compress_rates", "udop": "relative_bias_args", "unlimited_ocr": "layer_types",
    **dict.fromkeys(("nemo_speechlm", "sam3_video", "t5gemma2", "uvdoc"), "deep"),
}  # fmt: skip


@pytest.mark.nightly(
    covered_by="tests/worker/execution/models/test_checkpoint.py::test_what_was_saved_is_what_is_loaded"
)
@pytest.mark.parametrize("part", range(PARTS))
def test_what_transformers_writes_of_its_defaults_is_read_and_is_the_same(part: int, tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415 - not at collection

    folder, refusals = OpenFolder.by_itself(tmp_path, "/model/path"), {}
    for name, listed in sorted(model_types().items())[part::PARTS]:
        if not listed.heads:
            continue
        try:
            config = CONFIG_MAPPING[name]()
            text = config.to_json_string(use_diff=False)
        except Exception:  # noqa: BLE001 - some have no defaults
            continue
        (tmp_path / "config.json").write_text(text)
        file = folder.file("config.json")
        try:
            found = read_architecture(file, LoaderContext(store=tmp_path), "/model/path").configuration
        except Refusal as error:
            refusals[name] = error.message
            continue
        ours, theirs = found.to_dict(), config.to_dict()
        for field in declared_fields(type(config)).values():
            if field.kinds <= {int, float, bool, type(None)} and field.name not in ("use_cache", "audio_vocab_size"):
                assert ours.get(field.name) == theirs.get(field.name), (name, field.name)
    assert not [name for name, said in refusals.items() if NOT_READ.get(name, "backbone_config") not in said], refusals


ONE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 60}
DECODER = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "vocab_size": 60}
ENCODER = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}


@pytest.mark.parametrize(
    ("name", "config", "seen"),
    [
        ("xlnet", {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32, "vocab_size": 60}, True),
        ("bert-generation", ONE, True),
        ("roberta", ONE, True),
        ("gpt_neox", ONE, False),
        ("trocr", DECODER, False),
        ("bart", DECODER | ENCODER, False),
    ],
)
def test_a_type_whose_later_tokens_change_earlier_logits_does_no_language_modelling(
    name: str, config: dict[str, Any], seen: bool
) -> None:
    import transformers  # noqa: PLC0415 - not at collection

    torch.manual_seed(0)
    described = transformers.AutoConfig.for_model(name, **config)
    model = transformers.AutoModelForCausalLM.from_config(described).eval()
    ids = torch.arange(5, 15)[None].repeat(2, 1)
    ids[1, -1] = 30
    with torch.no_grad():
        one, other = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1]
    assert bool((one - other).abs().max() > 1e-6) == seen
    assert ("causal_lm" in model_types()[name].heads) != seen
    assert is_next_token_seen(name) == seen
