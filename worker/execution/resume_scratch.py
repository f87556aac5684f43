"""Resumed scratch: files that an earlier attempt of the same job left in its scratch folder.

Every attempt writes into a folder of its own. A file is never written in place, so a link to it
keeps its bytes whatever a zombie of the earlier attempt does next.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from engine.analyses.spectra import search_checkpoints
from engine.collection import checkpoints
from engine.measurement import stored_decompositions

MANIFESTS = (checkpoints.MANIFEST, *search_checkpoints.MANIFESTS)
"""The files that make others a checkpoint: of a collection, of a search for eigenvalues, and of a training."""
_MARKERS = f"bases/*{stored_decompositions.DEVICE_ASKED}"
_PART = ".part-"


def adopt_checkpoint(own: Path, earlier: Iterable[Path]) -> None:
    """Bring the newest checkpoint of earlier attempts, and what it needs, into this attempt's folder.

    The earlier folders are deleted. Without a checkpoint, or where a file cannot be had, ``own``
    holds none: the attempt begins anew. A marker of decompositions that an attempt ended in is brought like one.
    """
    for torn in own.rglob(f"{_PART}*") if own.is_dir() else ():
        torn.unlink(missing_ok=True)
    earlier = tuple(earlier)
    if not _holds_one(own):
        newest = next((each for each in earlier if _holds_one(each)), None)
        if newest is not None:
            try:
                _link_all(newest, own)
            except OSError:
                shutil.rmtree(own, ignore_errors=True)
    for each in earlier:
        shutil.rmtree(each, ignore_errors=True)


def _holds_one(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MANIFESTS) or any(folder.glob(_MARKERS))


def _link_all(source: Path, target: Path) -> None:
    """Link every complete file, the manifests last: they are what makes the others a checkpoint."""
    names = [
        each.relative_to(source) for each in source.rglob("*") if each.is_file() and not each.name.startswith(_PART)
    ]
    for name in sorted(names, key=lambda name: name.as_posix() in MANIFESTS):
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, place)
        except FileExistsError:
            continue
        except OSError:
            # a file system without links
            shutil.copyfile(source / name, place)
