"""The lines of the audit trail: who changed what, by identifiers alone."""

import logging

_NAME = "kronoscope.audit"
_log = logging.getLogger(_NAME)


def write_audit_line(**fields: object) -> None:
    """Write one line of the logger ``kronoscope.audit``.

    Args:
        fields: Its fields: identifiers and words of this program, and nothing that a caller writes freely.
    """
    # a logger's own `extra` becomes the fields of the line
    _log.info("audit", extra={"logger": _NAME, **fields})
