"""The file of machine classes: what it says is read, and what makes no sense is refused by field, value and remedy."""

from pathlib import Path
from typing import Any

import pytest

from jobs.autoscale.classes import read_classes
from jobs.errors import ClassesInvalid

MACHINE = "0192f0c1-7a00-7000-8000-000000000001"
FIELDS = {
    "name": '"small"',
    "device": '"cpu"',
    "device_bytes": '"2GiB"',
    "ceiling": "3",
    "wall": '"4h"',
    "template": "'''#!/bin/sh\nexec {{ worker }}\n'''",
}


def written(folder: Path, head: str = "", **changes: str | None) -> Path:
    """A file of one class, some of its fields replaced or left out."""
    place = folder / "classes.toml"
    fields = {name: text for name, text in (FIELDS | changes).items() if text is not None}
    place.write_text(head + "[[class]]\n" + "".join(f"{name} = {text}\n" for name, text in fields.items()))
    return place


def test_a_worker_is_told_its_machine_and_its_lifetime(tmp_path: Path) -> None:
    (tmp_path / "gpu.sbatch").write_text(
        "#!/bin/sh\n#SBATCH --gpus={{ devices }} # {{class}} {{{class}}} ${X} {a}\n"
        "exec {{ worker }} # {{ wall_minutes }}\n"
    )
    place = written(
        tmp_path, 'worker = "/venv/bin/kronoscope worker"\n', template=None, template_file='"gpu.sbatch"',
        device='"cuda"', device_bytes='"79GiB"', devices="4", wall='"90s"', drain_before='"20s"',
    )  # fmt: skip
    file = read_classes(place, "slurm", ("lab:net",))
    (only,) = file.classes
    assert (only.kind, only.device_bytes, only.factories) == ("cuda", 79 * 2**30, ("lab:net",))
    assert only.script(MACHINE, file.worker) == (
        "#!/bin/sh\n#SBATCH --gpus=4 # small {small} ${X} {a}\n"
        f"exec env KRONOSCOPE_MACHINE={MACHINE} KRONOSCOPE_UNTIL_IDLE=1 KRONOSCOPE_SLOTS=4 "
        "KRONOSCOPE_WALL=90s KRONOSCOPE_DRAIN_BEFORE=20s /venv/bin/kronoscope worker # 2\n"
    )


def test_without_a_wall_a_worker_ends_when_it_is_idle_alone(tmp_path: Path) -> None:
    (only,) = read_classes(written(tmp_path, wall=None), "command").classes
    assert "KRONOSCOPE_UNTIL_IDLE=1" in only.script(MACHINE, "worker")
    assert "KRONOSCOPE_WALL" not in only.script(MACHINE, "worker")


@pytest.mark.parametrize(
    ("changes", "launcher", "said"),
    [
        ({"ceiling": "0"}, "command", r"'small': ceiling must be a whole number from 1 on \(got 0\)"),
        ({"ceiling": None}, "command", "'small': ceiling is missing; it must be a whole number"),
        ({"ceiling": "true"}, "command", r"ceiling must be .* \(got True\)"),
        ({"devices": "-1"}, "command", r"devices must be .* \(got -1\)"),
        ({"device": '"tpu"'}, "command", r"device must be one of cuda, cpu, fake \(got 'tpu'\)"),
        ({"device_bytes": "80"}, "command", r'device_bytes must be a size such as "79GiB" \(got 80\)'),
        ({"device_bytes": '"much"'}, "command", r"device_bytes must be a size .*\(got 'much'\)"),
        ({"cooldown": '"soon"'}, "command", r'cooldown must be a number with its unit .* "10m" \(got \'soon\'\)'),
        ({"cieling": "2"}, "command", r"'small': has no field 'cieling'.* did you mean `ceiling`"),
        ({"ceiling": None, "cieling": "2"}, "command", r"'small': has no field 'cieling'.* did you mean `ceiling`"),
        ({"name": None, "nam": '"a"'}, "command", r"class 1: has no field 'nam'"),
        ({"name": '"A b"'}, "command", r"class 1: name must be .* \(got 'A b'\)"),
        ({"wall": None}, "slurm", "'small': wall is missing; give one such as \"4h\""),
        ({"wall": '"10m"'}, "slurm", r"wall must leave .* \(got 600 s and 600 s\)"),
        ({"factories": '["lab"]'}, "command", r"factories must be entries .* \(got 'lab'\)"),
        ({"template": "'sleep 1'"}, "command", r"template must contain \{\{ worker \}\}"),
        ({"template": "'{{ worker }} {{ gpus }}'"}, "command", r"placeholder \{\{ gpus \}\}, .* take one of worker"),
        ({"template": "'{{ worker }'"}, "command", r"template line 1 has braces that are no placeholder"),
        ({"template": "'exec {{ worker }}'"}, "slurm", "template must begin with `#!/bin/bash`"),
        ({}, "kubernetes", r"template must contain \{\{ machine \}\}"),
        ({"template_file": "'x'"}, "command", "either template, the text, or template_file"),
        ({"template": None, "template_file": "'none.sh'"}, "command", r"none\.sh cannot be read"),
    ],
)
def test_a_class_that_makes_no_sense_is_refused(tmp_path: Path, changes: Any, launcher: str, said: str) -> None:
    with pytest.raises(ClassesInvalid, match=said):
        read_classes(written(tmp_path, **changes), launcher)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class = 3", r"must have at least one class; write one below a line \[\[class\]\]"),
        ("[[class]\n", "is not TOML"),
        ('workers = "x"\n', r"has no field 'workers'; take one of worker, .* did you mean `worker`"),
    ],
)
def test_a_file_without_classes_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "classes.toml").write_text(text)
    with pytest.raises(ClassesInvalid, match=said):
        read_classes(tmp_path / "classes.toml", "command")


def test_a_worker_that_a_shell_would_change_is_refused(tmp_path: Path) -> None:
    place = written(tmp_path, "worker = 'sh -c \"a; b\"'\n")
    with pytest.raises(ClassesInvalid, match=r"plain words \(got 'a; b'\); put what needs quotes into the template"):
        read_classes(place, "command")


def test_two_classes_of_one_name_are_refused(tmp_path: Path) -> None:
    place = written(tmp_path)
    place.write_text(place.read_text() * 2)
    with pytest.raises(ClassesInvalid, match="two classes of the name 'small'"):
        read_classes(place, "command")
