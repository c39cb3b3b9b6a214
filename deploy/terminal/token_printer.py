"""Prints a stream of tokens as it arrives, wrapped at words, with drafted tokens in a color."""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from paceline.generation import Chunk, Origin

STYLES: dict[Origin, str] = {"draft": "green", "target": "bold yellow"}
MAX_WIDTH = 80
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that control a terminal. Only newlines and tabs are printed."""


class TokenPrinter:
    """Writes text to a console, at most MAX_WIDTH columns a line.

    A word is held back until a space follows it, since it may not fit the line. Without a terminal
    there are no colors. `write`: takes the parts in place of the console.
    """

    def __init__(self, console: Console, write: Callable[[Text], None] | None = None) -> None:
        self._console = console
        self._write = write or self._print
        self._width = min(console.width, MAX_WIDTH)
        self._column = 0
        self._word = Text()

    def add(self, chunk: Chunk) -> None:
        """Print the text that became certain with these tokens."""
        if not chunk.pieces:
            self._append(chunk.text, "target")
        for piece, origin in zip(chunk.pieces, chunk.origins, strict=bool(chunk.pieces)):
            self._append(piece, origin)

    def close(self) -> None:
        """Print what is held back, and end the line."""
        self._flush_word()
        self._newline()

    def _append(self, piece: str, origin: Origin) -> None:
        for part in re.split(r"(\s)", _CONTROL.sub("", piece)):
            if not part:
                continue
            if part.isspace():
                self._flush_word()
                self._space(part)
            else:
                self._word.append(part, STYLES[origin])

    def _space(self, space: str) -> None:
        if space == "\n":
            self._newline()
        elif self._column < self._width:
            self._write(Text(" "))
            self._column += 1

    def _flush_word(self) -> None:
        length = self._word.cell_len
        if self._column and self._column + length > self._width:
            self._newline()
        self._write(self._word)
        self._column += length
        self._word = Text()

    def _newline(self) -> None:
        self._write(Text("\n"))
        self._column = 0

    def _print(self, text: Text) -> None:
        self._console.print(text, end="", soft_wrap=True)
