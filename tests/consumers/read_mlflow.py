"""MLflow's own store holds what `kronoscope export --to mlflow` has written of a run: parameters, metrics, files."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

from mlflow import MlflowClient

sys.path.insert(0, sys.argv[2])
from tracked import ROOT, RUN, exported, metrics


def main() -> None:
    folder = Path(sys.argv[1]) / "mlflow"
    for _ in range(2):  # a second export is a second run
        exported("mlflow", folder)
    tracker = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = tracker.get_experiment_by_name("kronoscope")
    runs = tracker.search_runs([experiment.experiment_id])
    assert len(runs) == 2
    run = runs[0]
    assert run.info.status == "FINISHED"
    document = json.loads((RUN / "job.json").read_text())["document"]
    assert run.data.params["model.factory"] == document["model"]["factory"]
    assert float(run.data.params["stabilisation.damping"]) == document["stabilisation"]["damping"]
    job = json.loads((RUN / "job.json").read_text())
    assert run.data.tags["kronoscope.model_sha256"] == job["model_sha256"]
    wanted = metrics()
    assert len(wanted) > 20
    for (name, step), value in wanted.items():
        history = {each.step: each.value for each in tracker.get_metric_history(run.info.run_id, name)}
        assert history[step] == value, (name, step)
    place = Path(tracker.download_artifacts(run.info.run_id, "layers.csv"))
    rows = list(csv.DictReader(place.open()))
    assert [row["layer"] for row in rows] == [
        row["layer"] for row in json.loads((RUN / "results.json").read_text())["layers"]
    ]
    stopped = folder.with_name("stopped")
    shutil.copytree(RUN, stopped)
    (stopped / "job.json").write_text(json.dumps(job | {"state": "cancelled"}))
    exported("mlflow", folder, stopped, code=5)
    last = tracker.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])[0]
    assert (last.info.status, last.data.tags["kronoscope.state"]) == ("KILLED", "cancelled")
    broken = folder.with_name("broken")
    broken.mkdir()
    (broken / "artifacts").touch()  # so that no file can be taken
    exported("mlflow", broken, code=2)
    tracker = MlflowClient(f"sqlite:///{broken / 'mlflow.db'}")
    (left,) = tracker.search_runs([tracker.get_experiment_by_name("kronoscope").experiment_id])
    assert left.info.status == "KILLED"
    refused = subprocess.run(
        [sys.executable, "-P", "-m", "kronoscope.cli.main", "export", str(RUN), "--to", "mlflow", "-o", "ftp://nowhere/x"],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode != 0
    assert "mlflow did not take the run" in " ".join(refused.stderr.split())
    print(f"  {len(wanted)} metrics at their layers")


main()
