"""Tables in Markdown, as all cases print them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, num_words: int = 1) -> list[str]:
    """The lines of a table."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return [first, "|---" * num_words + "|" + "---:|" * (len(head) - num_words), *others]
