"""What was left out of a source of conversations, and why: every row is counted, the first few are shown."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from data.shapes import RowError

_SHOWN_ROWS = 3  # of each reason


@dataclass
class Skips:
    """Of one source."""

    source: str
    num_rows: int = 0
    """Read, good and bad."""
    counts: Counter[str] = field(default_factory=Counter)
    """Reason -> rows."""
    shown: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> where the first of them stand, and what was found there."""
    missing: int = 0
    """Of its share, more than it has."""

    def add(self, place: str, defect: RowError) -> None:
        self.counts[defect.reason] += 1
        shown = self.shown.setdefault(defect.reason, [])
        if len(shown) < _SHOWN_ROWS:
            shown.append(f"{place}: {defect.found}")

    def describe(self) -> str:
        """A line for each reason below what they come to; "" where there is nothing to tell."""
        lines = [f"  {reason} {count:,}: {self._rows(reason)}" for reason, count in self.counts.items()]
        if lines:
            total = f"{self.counts.total():,} of {self.num_rows:,}"
            lines.insert(0, f"prompts {self.source}: {total} rows are left out")
        if self.missing:
            lines.append(f"prompts {self.source}: ran out, {self.missing:,} short of its share by weight")
        return "\n".join(lines)

    def _rows(self, reason: str) -> str:
        more = self.counts[reason] - len(self.shown[reason])
        return "; ".join([*self.shown[reason], *([f"and {more:,} more"] if more else [])])


def describe_skips(skips: Sequence[Skips]) -> str:
    """Of all sources."""
    return "\n".join(text for text in (each.describe() for each in skips) if text)


def count_skips(skips: Sequence[Skips]) -> dict[str, int]:
    """Reason -> rows, over all sources."""
    return dict(sum((each.counts for each in skips), Counter()))
