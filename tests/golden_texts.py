"""Texts of errors that are in tests/golden. `UPDATE_GOLDEN=1 pytest` of a file that uses them writes them again."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

HEAD = "=== "


class GoldenTexts:
    """The texts of one file, each under its name."""

    def __init__(self, file: str, names: Iterable[str]):
        self._path, self._names = Path(__file__).parent / "golden" / file, [*names]

    def _read(self) -> dict[str, str]:
        texts = self._path.read_text().split(HEAD)[1:] if self._path.exists() else []
        return {text.partition("\n")[0]: text.partition("\n")[2].strip() for text in texts}

    def check(self, name: str, found: object) -> None:
        """Holds a text, or an error, against that of the file; it has four parts."""
        found = f"{type(found).__name__}: {found}" if isinstance(found, Exception) else str(found)
        if "UPDATE_GOLDEN" in os.environ:
            texts = self._read() | {name: found}
            self._path.write_text("".join(f"{HEAD}{n}\n{texts[n]}\n\n" for n in self._names if n in texts))
        assert found == self._read()[name]
        assert re.findall(r"^  (\w+): +\S", found, re.MULTILINE) == ["where", "why", "do"]

    def check_names(self) -> None:
        """No text is left over."""
        assert list(self._read()) == self._names
