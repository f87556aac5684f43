"""The file of each format, by its name in the catalog."""

from collections.abc import Mapping

from catalog.analyses.export import ExportFormat
from engine.analyses.exports.activation_files import CordaFile, GptqFile, SecondMomentFile
from engine.analyses.exports.exported_file import ExportedFile
from engine.analyses.exports.kronecker_files import KronfluenceFile, LaplaceFile

FORMATS: Mapping[ExportFormat, type[ExportedFile]] = {
    each.format: each for each in (GptqFile, CordaFile, LaplaceFile, KronfluenceFile, SecondMomentFile)
}
