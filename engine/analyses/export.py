"""`export`: the factors of each layer in the file of another tool."""

from collections.abc import Mapping
from pathlib import PurePosixPath

import torch
from typing_extensions import override

from catalog.analyses.export import ExportFormat, ExportMetrics, ExportParams, ExportSummary, is_named
from engine.analyses.exports.activation_files import SOLVING_BYTES, CordaFile, GptqFile, SecondMomentFile
from engine.analyses.exports.exported_file import ExportedFile
from engine.analyses.exports.kronecker_files import KronfluenceFile, LaplaceFile
from engine.analyses.layer_analysis import LayerAnalysis
from engine.errors import NoConditionNumber
from engine.measurement.layer_measurement import Measured
from engine.memory.plan import Term
from engine.planning.analysis_cost import Cost, KeptFiles, PlannedJob

FORMATS: Mapping[ExportFormat, type[ExportedFile]] = {
    each.format: each for each in (GptqFile, CordaFile, LaplaceFile, KronfluenceFile, SecondMomentFile)
}
KIND = "export"
FOLDER = PurePosixPath("export")


class Export(LayerAnalysis[ExportParams]):
    """The file of a format, written once all layers are read.

    Memory:
        All matrices of the file, and three of one layer.
    """

    kind = KIND
    _file: ExportedFile

    @override
    def require(self) -> None:
        if self.params.format == "gptq" and self.workspace.options.stabilisation.kappa_max is None:
            raise NoConditionNumber(
                "`stabilisation.kappa_max` is null, and the damping of GPTQ follows from it; give a number above 1, "
                "such as 1e6",
                pointer="/stabilisation/kappa_max",
            )

    @override
    def prepare(self) -> None:
        kappa_max = self.workspace.options.stabilisation.kappa_max
        self._file = FORMATS[self.params.format](self.whole, self.params, kappa_max)
        self._file.require_room(self.workspace.machine.guard)

    @override
    def layer(self, layer: Measured) -> ExportMetrics:
        return self._file.add(layer.facts, self.whole.load(layer.facts.ordinal))

    @override
    def finish(self) -> None:
        files = self.workspace.ports.files
        if files is not None and self.workspace.ports.keeps_files:
            with files.writing(str(FOLDER / self._file.name), self._file.media_type) as file:
                self._file.write(file)

    @override
    def summary(self) -> ExportSummary:
        file = self._file
        return ExportSummary(
            coverage=self.coverage,
            format=file.format,
            file=str(FOLDER / file.name),
            layers=len(file.exported),
            left_out=len(file.left_out),
            total_bytes=sum(tensor.nbytes for tensor in file.tensors.values()),
            convention=file.convention,
        )

    @staticmethod
    @override
    def cost(params: ExportParams, job: PlannedJob) -> Cost:
        terms, kept, operations = job.carried(KIND), 0, 0
        wide = max(job.stored.itemsize, torch.float32.itemsize)
        for layer in job.probe.layers:
            groups = sum(not is_named(part, params.without) for part in layer.parts)
            if not groups or (layer.form != "kronecker" and params.format != "laplace"):
                continue
            a, g = layer.in_dim**2, layer.out_dim**2
            each = {
                "gptq": (wide + torch.float64.itemsize) * a,
                "laplace": wide * ((a if layer.form == "kronecker" else layer.in_dim) + 2 * g),
                "kronfluence": wide * (a + g),
            }.get(params.format, wide * a)
            kept += groups * each
            terms += job.read_back(layer, KIND, copies=1)
            work = SOLVING_BYTES * a if params.format == "gptq" else 3 * each
            terms.append(Term("exported layer", "while it is made", work, "host", KIND, layer.name))
            operations += groups * (12 * layer.in_dim**3 if params.format == "gptq" else each)
        terms.append(Term("exported file", "Σ as written", kept, "host", KIND))
        return Cost(
            terms=tuple(terms),
            seconds={KIND: operations / job.work.pace.operations_per_second},
            kept=(KeptFiles(name="exported file", formula="Σ as written", size_bytes=kept),),
        )
