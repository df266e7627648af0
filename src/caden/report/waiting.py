"""A picture of who waited for whom, from the files of a run with a clock."""

from html import escape

import pandas as pd

from caden.engine.run_directory import Record
from caden.report.model import Drawing

LARGEST = 60  # agents: more would be too fine to see
_CELL, _LEFT, _TOP, _BAR = 14, 34, 34, 120


def drawing(name: str, label: str, record: Record) -> Drawing | None:
    """Return the picture of a run, or None if it has no clock or too many agents."""
    files = record.path / "agents.csv", record.path / "waiting.csv"
    if not all(file.exists() for file in files):
        return None
    agents, waiting = map(pd.read_csv, files)
    total = float(record.summary.get("time") or 0)
    if len(agents) > LARGEST or total <= 0:
        return None
    note = "Row: who waited. Column: for whom; darker: for a larger share of the time. Bars: the share spent computing."
    if waiting.empty:
        note = "Bars: the share of the time spent computing. Nobody waited for anybody."
    waited = list(zip(waiting["agent"].astype(int), waiting["neighbour"].astype(int), waiting["seconds"].astype(float)))
    return Drawing(name, label, _svg(agents["busy"].tolist(), waited, total), note)


def _svg(busy: list[float], waited: list[tuple[int, int, float]], total: float) -> str:
    count = len(busy)
    edge = count * _CELL
    width, height, bars = _LEFT + edge + 16 + _BAR, _TOP + edge + 4, _LEFT + edge + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="waiting" viewBox="0 0 {width} {height}" role="img" '
        'font-family="sans-serif" font-size="9" fill="currentColor" color="#777">',
        f'<text x="{_LEFT}" y="10">waited for agent</text><text x="{bars}" y="10">computed</text>',
    ]
    for i in range(0, count, max(1, count // 20)):
        at = i * _CELL + _CELL / 2
        parts.append(f'<text x="{_LEFT + at}" y="{_TOP - 4}" text-anchor="middle">{i}</text>')
        parts.append(f'<text x="{_LEFT - 5}" y="{_TOP + at + 3}" text-anchor="end">{i}</text>')
    for i, share in enumerate(busy):
        frame = f'x="{bars}" y="{_TOP + i * _CELL + 2}" height="{_CELL - 4}"'
        title = _title(f"agent {i}: {share:.0%}")
        parts.append(f'<rect {frame} width="{_BAR}" fill-opacity="0.15"/>')
        parts.append(f'<rect {frame} width="{_BAR * share:.1f}" fill="#009e73">{title}</rect>')
    for agent, neighbour, seconds in waited:
        corner = f'x="{_LEFT + neighbour * _CELL + 1}" y="{_TOP + agent * _CELL + 1}"'
        dark = min(1.0, 0.1 + 0.9 * seconds / total)
        title = _title(f"agent {agent} waited {seconds:.3g} s for agent {neighbour}")
        size = f'width="{_CELL - 2}" height="{_CELL - 2}"'
        parts.append(f'<rect {corner} {size} fill="#d55e00" fill-opacity="{dark:.2f}">{title}</rect>')
    parts.append(f'<rect x="{_LEFT}" y="{_TOP}" width="{edge}" height="{edge}" fill="none" stroke="currentColor"/>')
    return "".join([*parts, "</svg>"])


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"
