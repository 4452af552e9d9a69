"""Parser of HTML reports."""

from collections import Counter
from html.parser import HTMLParser


class Content(HTMLParser):
    """Parser that collects table rows, tile texts, ids and links of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.rows: list[list[str]] = []
        self._at: str | None = None
        self.tiles: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                self.links.append(value or "")
            if name.startswith("on"):
                self.tags[name] += 1
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag in ("dt", "dd"):
            self.tiles.append("")
        self._at = tag if tag in ("td", "th", "dt", "dd") else self._at

    def handle_endtag(self, tag: str) -> None:
        if tag == self._at:
            self._at = None

    def handle_data(self, data: str) -> None:
        if self._at in ("td", "th"):
            self.rows[-1][-1] += data
        elif self._at is not None:
            self.tiles[-1] += data

    def row(self, first: str) -> list[str]:
        return next([cell.strip() for cell in row] for row in self.rows if row[0].strip() == first)

    def tile(self, label: str) -> tuple[str, str]:
        """Return the value with its unit, and the note, of the tile with this label."""
        at = next(i for i, text in enumerate(self.tiles) if text.strip() == label)
        value, note = self.tiles[at + 1 : at + 3]
        return " ".join(value.split()), " ".join(note.split())


def number(text: str) -> float:
    return float(text.replace(",", ""))
