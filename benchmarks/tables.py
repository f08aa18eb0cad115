"""Tables in Markdown, as all cases print them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, num_words: int = 1) -> list[str]:
    """The lines of a table.

    Args:
        head: names of the columns.
        rows: the cells of each row.
        num_words: columns of words; the others have figures, which stand at the right.
    """
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return [first, "|---" * num_words + "|" + "---:|" * (len(head) - num_words), *others]
