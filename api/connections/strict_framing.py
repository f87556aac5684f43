"""Framing that one reader alone can see in a request: RFC 9112 without the leniencies that h11 grants.

Where two servers read one stream differently, a request hides in the body of another. So what is ambiguous is refused::

    Content-Length with Transfer-Encoding, either of them twice, a list of lengths     400
    Transfer-Encoding in HTTP/1.0, a line that CR or LF alone ends, a folded line      400
    a chunk header that is not digits and extensions, or a chunk beyond the limit      400
    more than 100 headers or trailers, or 32 KiB of them                               431
"""

import re

import h11
from h11._receivebuffer import ReceiveBuffer

MOST_HEADER_BYTES = 32 * 1024
MOST_HEADERS = 100
_MOST_CHUNK_LINE_BYTES = 512
_BARE = re.compile(rb"\r(?!\n|\Z)|(?<!\r)\n")
_FOLDED = re.compile(rb"\n[ \t]")
_LENGTH = re.compile(rb"\ncontent-length:[^\r]*", re.IGNORECASE)
_CODING = re.compile(rb"\ntransfer-encoding:", re.IGNORECASE)
_OLD = re.compile(rb"[^\r]* HTTP/1\.0\r")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[^\r\n]*)?\r\n")


class StrictBuffer(ReceiveBuffer):
    """The bytes that a connection has received and not read yet; h11 offers no other place to look at the lines."""

    def __init__(self, most_chunk_bytes: int) -> None:
        """Begin without any.

        Args:
            most_chunk_bytes: The largest chunk of a body.
        """
        super().__init__()
        self._most_chunk_bytes = most_chunk_bytes

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines up to the first blank one, without it; None while it has not come."""
        received, head = len(self), bytes(self._data[: MOST_HEADER_BYTES + 1])
        lines = super().maybe_extract_lines()
        size = received if lines is None else received - len(self)
        _require_few(head[:size], size)
        if lines is not None:
            _require_one_reading(head[:size])
        return lines

    def maybe_extract_next_line(self) -> bytearray | None:
        """Return the header of a chunk; None while it has not come."""
        line = super().maybe_extract_next_line()
        if line is None:
            if b"\n" in self._data or len(self) > _MOST_CHUNK_LINE_BYTES:
                raise h11.LocalProtocolError("a chunk's header is too long, or ends in LF alone")
            return None
        parts = _CHUNK_LINE.fullmatch(line)
        if parts is None or len(line) > _MOST_CHUNK_LINE_BYTES:
            raise h11.LocalProtocolError("a chunk's header is not digits and extensions")
        if int(parts[1], 16) > self._most_chunk_bytes:
            raise h11.LocalProtocolError("a chunk is larger than any body may be")
        return line


def _require_few(head: bytes, size: int) -> None:
    """Require lines that end in CR and LF, few of them, and no long ones."""
    if _BARE.search(head):
        raise h11.LocalProtocolError("a line ends in CR or LF alone")
    # the request line and the blank line are no headers
    if size > MOST_HEADER_BYTES or head.count(b"\r\n") > MOST_HEADERS + 2:
        raise h11.LocalProtocolError("too many headers", error_status_hint=431)


def _require_one_reading(head: bytes) -> None:
    """Require a header from which every server reads the same body."""
    lengths, codings = _LENGTH.findall(head), len(_CODING.findall(head))
    if len(lengths) + codings > 1 or any(b"," in length for length in lengths):
        raise h11.LocalProtocolError("the length of the body is given twice")
    if codings and _OLD.match(head):
        raise h11.LocalProtocolError("HTTP/1.0 has no transfer codings")
    if _FOLDED.search(head):
        raise h11.LocalProtocolError("a header is folded")
