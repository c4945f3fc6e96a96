"""Our docstrings as markdown: lines of the form `name: text` become items of a list, `Raises:` a paragraph.

In the source they stand one below the other without markup, which markdown would run together.
"""

import re
from collections import deque
from typing import Any

import griffe

NAME = r"[a-z_][\w.]*(?:\[\w+\])*"
ITEM = re.compile(rf"({NAME}(?:, {NAME})*): (?=\S)")
ANOTHER = re.compile(rf"(?<=\.) (?={ITEM.pattern})")  # on the same line
INDEXED = re.compile(r"(?<![`\w])\w+(?:\[\w+\]){2,}")  # markdown would read `a[b][c]` as a link
SECTION = re.compile(r"(Raises|Shape|Cost|Source): ")


class OneItemALine(griffe.Extension):
    """Rewrites each docstring after it was read from the source."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = as_markdown(obj.docstring.value)
            obj.docstring.value = INDEXED.sub(lambda found: f"`{found[0]}`", text)


def as_markdown(text: str) -> str:
    """A list and paragraphs of lines; blocks that are markdown already stay as they are."""
    lines: list[str] = []
    in_item = in_code = False
    rest = deque(text.splitlines())
    while rest:
        line = rest.popleft()
        if (in_item or ITEM.match(line)) and (another := ANOTHER.search(line)):
            rest.appendleft(line[another.end() :])
            line = line[: another.start()]
        item, section = ITEM.match(line), SECTION.match(line)
        before = lines[-1] if lines else ""
        if before == "" and line.startswith("    ") and not in_item:
            in_code = True
        in_code = in_code and (line == "" or line.startswith("    "))
        if in_code:
            lines.append(line)
        elif item:
            lines += [] if in_item or not before else [""]
            names = ", ".join(f"`{name}`" for name in item[1].split(", "))
            lines.append(f"- {names}: {line[item.end() :]}")
            in_item = True
        elif in_item and line and not section and not starts_sentence(before, line):
            lines.append(f"    {line.strip()}")
        else:
            lines += [""] if before and (in_item or section) else []
            lines.append(f"**{section[1]}:** {line[section.end() :]}" if section else line)
            in_item = False
    return "\n".join(lines)


def starts_sentence(before: str, line: str) -> bool:
    """Whether a line without indentation begins anew below an item, and does not continue it."""
    return before.endswith((".", ")")) and line[0].isupper()
