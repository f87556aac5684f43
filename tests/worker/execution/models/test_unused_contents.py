"""Nothing in a checkpoint's folder is dropped in silence: it is used, refused, listed, or a notice."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from catalog.requests.inputs import DirectoryModel, Task
from worker.execution.loader_context import LoaderContext
from worker.execution.models.checkpoint import load
from worker.execution.refusal import Refusal

D = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 60}
Saved = Callable[..., Path]


def bert(**more: Any) -> Any:
    return transformers.BertConfig(**D, max_position_embeddings=24, **more)


def gpt2() -> Any:
    return transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=60, n_positions=24, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )


class Notes:
    """What a loader says."""

    def __init__(self) -> None:
        self.unused: list[str] = []
        self.notices: list[str] = []
        self.lines: list[str] = []

    def context(self, folder: Path) -> LoaderContext:
        return LoaderContext(
            store=folder / "store",
            note=self.notices.append,
            unused=self.unused.append,
            log=lambda level, message: self.lines.append(f"{level}: {message}"),
        )


def loaded(folder: Path, task: str = "sentence_embedding") -> tuple[Any, Notes]:
    notes = Notes()
    found = load(DirectoryModel(source="directory", path=str(folder)), Task(type=task), notes.context(folder))  # type: ignore[arg-type]
    return found, notes


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def save(folder: Path, state: dict[str, torch.Tensor], name: str = "model.safetensors") -> None:
    safetensors.torch.save_file(state, folder / name, metadata={"format": "pt"})


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(2, 14).view(2, 6)
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
    return found


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_beside_weights_is_refused(saved: Saved, name: str) -> None:
    folder = saved("AutoModel", bert())
    (folder / name).write_text("{}")
    with pytest.raises(Refusal, match="merge_and_unload") as refused:
        loaded(folder)
    assert refused.value.code == "adapter"
    (folder / "config.json").unlink()
    with pytest.raises(Refusal, match="belong to an adapter"):
        loaded(folder)


def test_an_adapter_in_a_folder_of_its_own_is_a_notice(saved: Saved) -> None:
    folder = saved("AutoModel", bert())
    (folder / "tuned").mkdir()
    (folder / "tuned" / "adapter_config.json").write_text("{}")
    _, notes = loaded(folder)
    assert any("adapter in the folder `tuned` is not applied" in each for each in notes.notices)
    assert "file `tuned/adapter_config.json`" in notes.unused


@pytest.mark.parametrize(
    ("auto", "config", "task", "head", "table"),
    [
        ("AutoModelForCausalLM", gpt2, "causal_lm", "lm_head.weight", "transformer.wte.weight"),
        ("AutoModelForMaskedLM", bert, "masked_lm", "cls.predictions.decoder.weight",
         "bert.embeddings.word_embeddings.weight"),
    ],
)  # fmt: skip
def test_a_tied_configuration_whose_tensors_differ_is_untied_as_transformers_does(
    saved: Saved, auto: str, config: Any, task: str, head: str, table: str
) -> None:
    folder = saved(auto, config())
    state = tensors(folder)
    same = state | {head: state[table].clone()}
    save(folder, same)
    both, notes = loaded(folder, task)
    assert notes.notices == []
    own = both.model.state_dict()
    assert own[head].data_ptr() == own[table].data_ptr()
    save(folder, same | {head: state[table] + 0.5})
    untied, notes = loaded(folder, task)
    reference = getattr(transformers, auto).from_pretrained(folder).eval()
    torch.testing.assert_close(logits(untied.model), logits(reference))
    own = untied.model.state_dict()
    assert torch.equal(own[head], state[table] + 0.5)
    assert torch.equal(own[table], state[table])
    assert {name for name, _ in untied.model.named_parameters()} == {name for name, _ in reference.named_parameters()}
    assert len(notes.notices) == 1
    assert "different numbers: they are measured untied" in notes.notices[0]
    assert notes.lines[0].startswith("warning: ")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_the_prefixes_of_wrappers_are_understood(saved: Saved, prefix: str) -> None:
    folder = saved("AutoModel", bert())
    state = tensors(folder)
    expected = logits(loaded(folder)[0].model)
    save(folder, {prefix + name: tensor for name, tensor in state.items()})
    found, notes = loaded(folder)
    assert torch.equal(logits(found.model), expected)
    assert any("without a wrapper's prefix" in line for line in notes.lines)
    within = {name.replace("layer.0.", "layer.0._orig_mod."): tensor for name, tensor in state.items()}
    save(folder, within)
    assert torch.equal(logits(loaded(folder)[0].model), expected)
    first = min(state)
    save(folder, state | {f"module.{first}": state[first] + 1})
    with pytest.raises(Refusal, match="does not have"):
        loaded(folder)


def test_files_that_are_not_read_are_listed_and_more_weights_are_a_notice(saved: Saved) -> None:
    folder = saved("AutoModelForCausalLM", gpt2())
    expected = logits(loaded(folder, "causal_lm")[0].model)
    for name in ("generation_config.json", "pytorch_model.bin", "tf_model.h5", "vocab.txt", "README.md"):
        (folder / name).write_text("{}")
    more = "model-00003-of-00002.safetensors"
    save(folder, {"lm_head.weight": torch.ones(60, 16)}, more)
    found, notes = loaded(folder, "causal_lm")
    assert torch.equal(logits(found.model), expected)
    listed = {each for each in notes.unused if each.startswith("file ")}
    assert listed == {
        f"file `{name}`" for name in ("generation_config.json", "pytorch_model.bin", "tf_model.h5", "vocab.txt", more)
    }
    assert [each for each in notes.notices if "model-00003" in each]


def test_an_index_that_names_what_is_not_there_is_refused(saved: Saved) -> None:
    folder = saved("AutoModelForMaskedLM", bert())
    state = tensors(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    places = dict.fromkeys(state, "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert torch.equal(logits(loaded(folder)[0].model), logits(transformers.AutoModel.from_pretrained(folder).eval()))
    # one that the task would not have missed
    index.write_text(json.dumps({"weight_map": places | {"cls.more.weight": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(Refusal, match=r"names 1 tensors that the files do not hold: `cls\.more\.weight`"):
        loaded(folder)


def test_tensors_that_the_task_does_not_use_are_listed(saved: Saved) -> None:
    folder = saved("AutoModelForMaskedLM", bert())
    state = tensors(folder)
    save(folder, state | {"bert.embeddings.position_ids": torch.arange(24)[None]})
    _, notes = loaded(folder)
    assert "tensor `cls.predictions.bias`" in notes.unused
    assert "tensor `bert.embeddings.position_ids`" in notes.unused


def test_numbers_of_another_type_are_refused_or_said(saved: Saved) -> None:
    folder = saved("AutoModel", bert())
    state = tensors(folder)
    name = "encoder.layer.0.output.dense.weight"
    save(folder, state | {name: state[name].double()})
    _, notes = loaded(folder)
    assert notes.notices == [f"1 tensors are float64 in the files and are read as float32: `{name}`"]
    save(folder, state | {name: state[name].to(torch.int8)})
    with pytest.raises(Refusal, match="curvature needs floating-point weights"):
        loaded(folder)


@pytest.mark.parametrize(
    ("field", "value"), [("is_decoder", True), ("add_cross_attention", True), ("is_encoder_decoder", True)]
)
def test_a_field_that_would_make_another_model_is_refused(saved: Saved, field: str, value: Any) -> None:
    folder = saved("AutoModel", bert())
    rewrite(folder, **{field: value})
    with pytest.raises(Refusal, match=rf"`{field}` \(.*would make it another model") as refused:
        loaded(folder)
    assert refused.value.code == "unread_field"


def test_fields_that_change_nothing_are_listed_where_they_differ(saved: Saved) -> None:
    folder = saved("AutoModel", bert())
    _, notes = loaded(folder)
    plain = set(notes.unused)
    rewrite(folder, hidden_dropout_prob=0.4, my_own_note="x", use_cache=False, bos_token_id=7)
    _, notes = loaded(folder)
    assert set(notes.unused) - plain == {
        f"config.json: `{name}`" for name in ("hidden_dropout_prob", "my_own_note", "use_cache", "bos_token_id")
    }
    assert notes.notices == []


def test_rotary_fields_that_are_not_read_are_refused(saved: Saved) -> None:
    config = transformers.LlamaConfig(**D, num_key_value_heads=1, max_position_embeddings=24)
    folder = saved("AutoModelForCausalLM", config)
    loaded(folder, "causal_lm")
    rewrite(folder, rope_scaling={"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}, rope_parameters=None)
    with pytest.raises(Refusal, match="`mscale`, which is not read"):
        loaded(folder, "causal_lm")
    rewrite(folder, rope_scaling=None, partial_rotary_factor=0.5)
    with pytest.raises(Refusal, match=r"`partial_rotary_factor` is 0\.5"):
        loaded(folder, "causal_lm")


@pytest.mark.parametrize(("mode", "said"), [("cls_token", True), ("mean_tokens", False), ("max_tokens", True)])
def test_the_pooling_of_a_sentence_encoder_is_a_notice_where_it_is_not_the_mean(
    saved: Saved, mode: str, said: bool
) -> None:
    folder = saved("AutoModel", bert())
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 16, f"pooling_mode_{mode}": True})
    )
    _, notes = loaded(folder)
    assert any("measures the mean" in each for each in notes.notices) == said
    for broken in ('{"pooling_mode_mean_tokens": true,}', '{"pooling_mode": "mean", "pooling_mode": "cls"}', "[]"):
        (folder / "1_Pooling" / "config.json").write_text(broken)
        _, notes = loaded(folder)
        assert any("a pooling that cannot be read" in each for each in notes.notices)
    (folder / "2_Dense").mkdir()
    save(folder / "2_Dense", {"linear.weight": torch.ones(4, 16)})
    _, notes = loaded(folder)
    assert any("weights in the folder `2_Dense`" in each for each in notes.notices)


@pytest.mark.parametrize(
    ("types", "said"),
    [
        (["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling"], None),
        (["sentence_transformers.models.Transformer", "sentence_transformers.models.Normalize"], "own `Normalize`,"),
        (["custom_st.Transformer"], "own `custom_st.Transformer`,"),
        (["sentence_transformers.\n.Pooling"], "own 'sentence_transformers.\\n.Pooling',"),
        ([None], "not a list of 1 to 32 steps"),
        ([], "not a list of 1 to 32 steps"),
        (["sentence_transformers.models.Pooling"] * 33, "not a list of 1 to 32 steps"),
    ],
)
def test_a_further_step_of_a_sentence_encoder_is_a_notice(saved: Saved, types: list[Any], said: str | None) -> None:
    folder = saved("AutoModel", bert())
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "path": "", "type": each} for each in types]))
    _, notes = loaded(folder)
    assert len(notes.notices) == (said is not None)
    assert said is None or said in notes.notices[0]
    assert "file `modules.json`" in notes.unused
    _, notes = loaded(folder, "embedding")
    assert notes.notices == []


@pytest.mark.parametrize("text", ["{}", "[1]", "[", "[" * 100_000, '[{"type": "a", "type": "b"}]', " " * 2**21 + "[]"])
def test_a_list_of_steps_that_cannot_be_read_is_a_notice(saved: Saved, text: str) -> None:
    folder = saved("AutoModel", bert())
    (folder / "modules.json").write_text(text)
    _, notes = loaded(folder)
    assert len(notes.notices) == 1
    assert "not a list of 1 to 32 steps" in notes.notices[0]


def test_the_preprocessing_of_images_is_a_notice(saved: Saved) -> None:
    config = transformers.ViTConfig(
        **{name: value for name, value in D.items() if name != "vocab_size"}, image_size=8, patch_size=4, num_channels=1
    )
    folder = saved("AutoModelForImageClassification", config)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    _, notes = loaded(folder, "classification")
    assert any("`preprocessor_config.json` is not applied" in each for each in notes.notices)


def test_a_field_that_stands_twice_is_refused(saved: Saved) -> None:
    folder = saved("AutoModel", bert())
    path = folder / "config.json"
    path.write_text(path.read_text().replace("{", '{"hidden_act": "relu", ', 1))
    with pytest.raises(Refusal, match="two fields are called `hidden_act`"):
        loaded(folder)


def test_a_quantised_configuration_is_refused(saved: Saved) -> None:
    folder = saved("AutoModel", bert())
    rewrite(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(Refusal, match="unquantised"):
        loaded(folder)


def test_the_real_encoder_has_one_step_that_changes_numbers(minilm: Path) -> None:
    _, notes = loaded(minilm)
    said = (
        "the model's own `Normalize`, a step in `modules.json`, is not applied: `sentence_embedding` measures the mean "
        "itself, over the tokens that are not padding"
    )
    assert notes.notices == [said]
    assert "file `vocab.txt`" in notes.unused
