"""Names of layers that must fit a width: elided in the middle, and never into equal texts."""

from collections.abc import Sequence

from kronoscope.display.printable import printable

NAME_WIDTH = 40


def shorten(name: str, width: int = NAME_WIDTH) -> str:
    """Shorten one layer's name; of several names that are shown together, see `shorten_all`.

    Leading parts become initials, numbers kept, such as `e.l.11.attention.self.query`; a name that is still too long
    loses its middle. Characters that cannot be printed are replaced.
    """
    plain = printable(name, lines=False)
    parts = plain.split(".")
    for place in range(len(parts) - 1):
        if len(".".join(parts)) <= width:
            break
        if not parts[place].isdecimal():
            parts[place] = parts[place][:1]
    plain = ".".join(parts)
    if len(plain) <= width:
        return plain
    start = width // 4
    return f"{plain[:start]}…{plain[-(width - start - 1) :]}"


def shorten_all(names: Sequence[str], width: int = NAME_WIDTH) -> list[str]:
    """Shorten names that are shown together to ``width``, 12 or more, so that different names remain different.

    One text for each name, alike for equal ones: `shorten`'s; where several names would come out equal, the part in
    which they differ, with as much of both ends as there is room for; where that part is too long itself, numbers at
    the end.
    """
    shown = {name: shorten(name, width) for name in names}
    for alike in _alike(shown):
        shown |= dict(
            zip(alike, _around_difference([printable(name, lines=False) for name in alike], width), strict=True)
        )
    for alike in _alike(shown):
        taken = set(shown.values())
        for name in alike[1:]:
            number, text = 2, shown[name]
            while text in taken:
                text = f"{shorten(name, width - 4)}~{number}"
                number += 1
            taken.add(text)
            shown[name] = text
    return [shown[name] for name in names]


def _alike(shown: dict[str, str]) -> list[list[str]]:
    """Return the groups of different names that are shown by one text."""
    groups: dict[str, list[str]] = {}
    for name, text in shown.items():
        groups.setdefault(text, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _around_difference(names: list[str], width: int) -> list[str]:
    """Return names cut so that the part in which they differ is shown, where that is short enough."""
    start = _common_start(names)
    end = _common_start([name[start:][::-1] for name in names])
    texts = []
    for name in names:
        middle = name[start : len(name) - end]
        room = width - len(middle) - 2
        if room < 0:
            texts.append(shorten(name, width))
            continue
        before, after = min(start, room // 2), min(end, room - room // 2)
        before, after = min(start, room - after), min(end, room - before)
        head, tail = name[start - before : start], name[len(name) - end :][:after]
        texts.append(f"{'…' if before < start else ''}{head}{middle}{tail}{'…' if after < end else ''}")
    return texts


def _common_start(names: list[str]) -> int:
    """Return how many first characters all names share."""
    first, last = min(names), max(names)
    return next((place for place, each in enumerate(first) if each != last[place]), len(first))
