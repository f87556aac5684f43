"""Names of classes: one text among the model's own names makes every other text one of them, or an error."""

import json
from pathlib import Path

import pytest
from torch import nn

from catalog.requests.data_sources import DataFile
from catalog.requests.inputs import Task
from worker.execution.data import file
from worker.execution.data.stream import DataRequest
from worker.execution.loaded_model import LoadedModel, Vocabulary
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal

UNNAMED = ("LABEL_0", "LABEL_1", "LABEL_2")
BYTES = Vocabulary(size=256, max_length=16, tokenizer=None)


@pytest.mark.parametrize("other", ["label_1", "pos", "LABEL_3", "1"])
def test_a_text_beside_the_models_own_names_is_refused(tmp_path: Path, context: LoaderContext, other: str) -> None:
    path = tmp_path / "rows.jsonl"
    labels = ("LABEL_0", other, "LABEL_2")
    path.write_text("".join(json.dumps({"text": "ab", "label": label}) + "\n" for label in labels))
    loaded = LoadedModel(model=nn.Linear(3, 3), vocabulary=BYTES, class_names=UNNAMED)
    request = DataRequest(
        task=Task(type="sequence_classification"), loaded=loaded, batch_size=8, seed=0, context=context
    )
    said = rf"line 2: `label` is `{other}`, and the model's classes are `LABEL_0`, `LABEL_1`, `LABEL_2`"
    with pytest.raises(Refusal, match=rf"{said} .*; write one of these, or their numbers"):
        file.load(DataFile(source="file", path=str(path)), request)
