"""The methods paragraph and the BibTeX entries that a paper needs from a job's results.

Everything is read from the stored document, the manifest and the records of the layers, so that the text says what
was computed and not what was meant. A work is cited only where its method was used.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from catalog import ANALYSES
from catalog.record import plain
from catalog.responses.coverage import CoverageView, describe_kinds
from catalog.responses.views import ResultsView
from kronoscope.client.responses import Layer

_FISHER = {
    "mc": "the Fisher information, with {samples} sampled from the model for each example and loss term",
    "type2": "the Fisher information in closed form, which is the generalised Gauss-Newton matrix",
    "empirical": "the empirical Fisher, from the labels of the data (which is not the Fisher information)",
    "forward_only": "the input factor A alone, with G set to the identity",
}
_TOKEN_TASKS = ("causal_lm", "masked_lm", "token_classification")
_KFAC = """\
@inproceedings{martens2015kfac,
  title = {Optimizing Neural Networks with {Kronecker}-factored Approximate Curvature},
  author = {Martens, James and Grosse, Roger},
  booktitle = {International Conference on Machine Learning},
  year = {2015}
}"""
_SHARING = """\
@inproceedings{eschenhagen2023kfac,
  title = {{Kronecker}-Factored Approximate Curvature for Modern Neural Network Architectures},
  author = {Eschenhagen, Runa and Immer, Alexander and Turner, Richard E. and Schneider, Frank and Hennig, Philipp},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2023}
}"""
_EKFAC = """\
@inproceedings{george2018ekfac,
  title = {Fast Approximate Natural Gradient Descent in a {Kronecker}-factored Eigenbasis},
  author = {George, Thomas and Laurent, C{\\'e}sar and Bouthillier, Xavier and Ballas, Nicolas and Vincent, Pascal},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2018}
}"""


def methods_text(results: ResultsView, rows: Sequence[Layer]) -> str:
    """Return a paragraph on what a job computed, a blank line, and the BibTeX entries of what it used."""
    document, manifest = results.job.document, results.manifest or {}
    sentences = [*_measured(results, rows), *_inputs(document, manifest, rows), *_damping(document, rows)]
    sentences += [_coverage(results.job.coverage), *_computed_with(manifest, rows), *_digests(results)]
    return "\n\n".join((" ".join(filter(None, sentences)), *_entries(document, rows, manifest)))


def _measured(results: ResultsView, rows: Sequence[Layer]) -> list[str]:
    document = results.job.document
    version = _version(results.manifest or {})
    refused = {each.kind: each for each in results.job.refused or ()}
    done = [computed(kind, document) for kind in results.job.kinds if kind not in refused]
    # phrases have commas of their own
    sentences = [f"We computed {'; '.join(done)} with Kronoscope {version}."]
    if results.job.imported:
        sentences.append("The results were imported from a foreground run; the service did not compute them.")
    sentences += [f"The analysis {kind} was refused: {each.message}." for kind, each in refused.items()]
    if not results.job.ended or results.job.state != "succeeded":
        sentences.append(f"The job is {results.job.state}: this describes the layers so far.")
    if document.get("factors") is not None:
        named = _reference(document["factors"])
        stored = f"The matrices were stored earlier ({named}); how they were collected is described there."
        return [*sentences, stored, *_second_set(document, results.job.kinds)]
    if document.get("extends") is not None:
        added = (
            f"The data {_source(document['data'])} were added to those of an earlier collection "
            f"({_reference(document['extends'])}), where model and options are described."
        )
        return [*sentences, added, *_second_set(document, results.job.kinds)]
    if not _collects(results.job.kinds):
        return sentences
    collection = document["collection"]
    fisher = _FISHER[collection["fisher"]].format(samples=_count(collection["samples"], "label"))
    sentences.append(f"The estimator is K-FAC (Martens & Grosse, 2015) of {fisher}.")
    if _shares_weights(document, rows):
        sentences.append(
            f"Layers that share their weight over positions use K-FAC-{collection['sharing']} "
            "(Eschenhagen et al., 2023)."
        )
    if collection["ekfac"]:
        sentences.append(
            "The eigenvalues were estimated anew in the eigenbases of A and G (EK-FAC; George et al., 2018)."
        )
    return [*sentences, *_second_set(document, results.job.kinds)]


def _collects(kinds: Sequence[str]) -> bool:
    """Whether a job measures the curvature of a model, as far as this client knows its analyses."""
    return all(kind not in ANALYSES or ANALYSES[kind].collects for kind in kinds)


def computed(kind: str, document: Mapping[str, Any]) -> str:
    """Return the noun phrase of what an analysis computes; its name where this client does not know it."""
    analysis = ANALYSES.get(kind)
    sentence = "" if analysis is None else analysis.sentence
    if analysis is None or isinstance(sentence, str):
        return str(sentence) or kind
    return sentence(_options(kind, document))


def _options(kind: str, document: Mapping[str, Any]) -> dict[str, Any]:
    params = ANALYSES[kind].params
    return {**({} if params is None else plain(params())), **(document.get(kind) or {})}


def _second_set(document: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    """Which factors these were compared with."""
    sources = [(document.get(kind) or {}).get("against") for kind in kinds]
    return [f"They were compared with the factors stored in {_reference(source)}." for source in sources if source]


def _reference(source: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in source.items() if value is not None)


def _inputs(document: Mapping[str, Any], manifest: Mapping[str, Any], rows: Sequence[Layer]) -> list[str]:
    if document.get("factors") is not None or document.get("extends") is not None:
        return []
    if document.get("model") is None:
        return [f"The data are {_source(document['data'])}."]
    task, collection = document["task"], document["collection"]
    sentences = [f"The model is {_source(document['model'])}, the data are {_source(document['data'])}."]
    seen = []
    if manifest.get("examples") is not None:
        seen.append(_count(manifest["examples"], "example"))
    terms = _most(rows, "terms")
    if terms is not None:
        seen.append(_count(terms, "token" if task["type"] in _TOKEN_TASKS else "loss term"))
    positions = _most(rows, "positions")
    if positions is not None and positions != terms:
        seen.append(f"at most {_count(positions, 'position')} of a layer")
    averaged = "a plain average"
    if collection["ema_decay"] is not None:
        averaged = f"a moving average with decay {collection['ema_decay']:g}"
    every = "" if collection["update_freq"] == 1 else f" over one of every {collection['update_freq']} batches"
    loss = f" and the loss {task['loss']}" if task.get("loss") else ""
    sentences.append(
        f"The task is {task['type']}{loss}; {', '.join(seen) or 'the data'} entered {averaged}{every}, "
        f"in batches of {collection['batch_size']}, with seed {collection['seed']}."
    )
    amp = "" if collection["amp"] == "off" else f", with the model in {collection['amp']} (automatic mixed precision)"
    if any(row.record is not None and row.record.accumulation_precision == "tf32" for row in rows):
        amp += ", with the products behind A and G in TF32"
    stored = collection["storage_dtype"]
    kept = "" if stored in {None, collection["dtype"]} else f"; the factors were kept in {stored}"
    return [*sentences, f"Passes and sums were in {collection['dtype']}{amp}{kept}."]


def _damping(document: Mapping[str, Any], rows: Sequence[Layer]) -> list[str]:
    if not _is_damped(rows):
        return []
    rule = document["stabilisation"]
    value = f"{rule['damping']:g}"
    relative = rule["damping_mode"] == "relative"
    if rule["damping_split"] == "pi":
        size = f"{value} times the mean eigenvalue of the layer's block" if relative else value
        text = f"The damping is λ = {size}, split between A and G by the factor π of Martens & Grosse (2015)"
    else:
        size = f"{value} times the mean eigenvalue of each factor" if relative else value
        text = f"The damping is {size}, added to A and to G"
    own = {side: rule[f"damping_{side}"] for side in ("A", "G") if rule[f"damping_{side}"] is not None}
    of = " times its mean eigenvalue" if relative else ""
    said = [f"that of {side} is {size:g}{of}" for side, size in own.items()]
    both = len(own) == len(("A", "G"))
    text = f"Of the damping, {' and '.join(said)}" if both else "; ".join([text, *said])
    kappa = rule["kappa_max"]
    limit = "no eigenvalue was clipped" if kappa is None else f"eigenvalues below λ_max/{kappa:g} count as clipped"
    return [f"{text}; {limit}."]


def _is_damped(rows: Sequence[Layer]) -> bool:
    """Whether damping enters an analysis of the job."""
    return any(row.kind not in ANALYSES or ANALYSES[row.kind].damped for row in rows)


def _coverage(measured: CoverageView | None) -> str:
    if measured is None:
        return ""
    forms = f" Their curvature was kept in these forms: {describe_kinds(measured)}."
    forms = forms if measured.percent("diagonal", "sketched") else ""
    if measured.message is None:
        return (
            f"All {measured.trainable_parameters:,} trainable parameters that the loss depends on were measured "
            f"({measured.measured_percent:.1f}% of the trainable ones).{forms}"
        )
    percent = {part.reason: part.percent for part in measured.parts}
    missing = ", ".join(f"{percent[each.reason]:.1f}% {each.reason}" for each in measured.not_measured)
    return (
        f"Only {measured.measured_percent:.1f}% of the {measured.trainable_parameters:,} trainable parameters "
        f"were measured, and all figures are of that part; not measured: {missing}.{forms}"
    )


def _computed_with(manifest: Mapping[str, Any], rows: Sequence[Layer]) -> list[str]:
    environment = manifest.get("environment")
    if not environment:
        return []
    device = environment.get("device_name") or environment.get("processor") or environment.get("device")
    facts = [f"on {device}" if device else "", f"with CUDA {environment['cuda']}" if environment.get("cuda") else ""]
    facts.append(f"in {_count(environment['threads'], 'thread')}" if environment.get("threads") else "")
    versions = {"Python": environment.get("python"), **(environment.get("packages") or {})}
    named = ", ".join(f"{name} {of}" for name, of in versions.items() if of and name != "kronoscope")
    facts.append(f"with {named}" if named else "")
    sentence = f"It ran {' '.join(filter(None, facts))}." if any(facts) else ""
    uncertain = sorted({row.layer for row in rows if row.record is not None and row.record.nondeterministic})
    note = f"Operations of {_count(len(uncertain), 'layer')} have no deterministic form." if uncertain else ""
    return [sentence, note]


def _digests(results: ResultsView) -> list[str]:
    manifest = results.manifest or {}
    named = {
        "the model": manifest.get("model_sha256"),
        **{
            f"its {name}": each.get(digest)
            for each in manifest.get("adapters") or ()
            for name, digest in (("base", "base_sha256"), ("adapter", "weights_sha256"))
        },
        "the data": manifest.get("data_sha256"),
        "the factors": manifest.get("factors_sha256"),
        "the factors compared with": manifest.get("against_sha256"),
        "the job document": results.job.document_sha256,
    }
    listed = "; ".join(f"{name} {digest}" for name, digest in named.items() if digest)
    return [f"SHA-256 of {listed}."]


def _entries(document: Mapping[str, Any], rows: Sequence[Layer], manifest: Mapping[str, Any]) -> list[str]:
    version = _version(manifest)
    ours = (
        f"@software{{kronoscope,\n  title = {{Kronoscope}},\n  version = {{{version}}},\n"
        "  note = {Measures the curvature of trained neural networks, layer by layer}\n}"
    )
    for kind in document["kind"] if isinstance(document["kind"], list) else [document["kind"]]:
        works = ANALYSES[kind].works if kind in ANALYSES else None
        if works is not None:
            return [ours, *works(_options(kind, document))]
    if document.get("factors") is not None or document.get("extends") is not None:
        pi = _is_damped(rows) and document["stabilisation"]["damping_split"] == "pi"
        return [ours, *([_KFAC] if pi else [])]
    used = [ours, _KFAC]
    if _shares_weights(document, rows):
        used.append(_SHARING)
    if document["collection"]["ekfac"]:
        used.append(_EKFAC)
    return used


def _shares_weights(document: Mapping[str, Any], rows: Sequence[Layer]) -> bool:
    """Whether a weight was shared over positions: only then do `expand` and `reduce` differ from plain K-FAC."""
    if document["task"]["type"] in _TOKEN_TASKS or document["collection"]["sharing"] == "reduce":
        return True
    records = [row.record for row in rows if row.record is not None]
    return any((record.positions or 0) > (record.terms or math.inf) for record in records)


def _most(rows: Sequence[Layer], name: str) -> int | None:
    counts = [getattr(row.record, name) for row in rows if row.record is not None]
    return max((count for count in counts if count is not None), default=None)


def _source(source: Mapping[str, Any]) -> str:
    options = plain({name: value for name, value in source.items() if name != "source" and value not in (None, {}, [])})
    named = next((options.pop(name) for name in ("name", "id", "path", "factory") if name in options), None)
    adapter, revision = options.pop("adapter", None), options.pop("adapter_revision", None)
    merged = options.pop("adapter_merged", False)
    rest = ", ".join(f"{name}={value}" for name, value in options.items())
    whole = " ".join(filter(None, (str(source["source"]), None if named is None else str(named))))
    whole = f"{whole} ({rest})" if rest else whole
    if adapter is None:
        return whole
    at = "" if revision is None else f" at {revision}"
    how = "added into its weights" if merged else "beside its frozen weights"
    return f"{whole} with the LoRA adapter {adapter}{at} {how}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _version(manifest: Mapping[str, Any]) -> str:
    packages = (manifest.get("environment") or {}).get("packages") or {}
    return str(packages.get("kronoscope", "(version unknown)"))
