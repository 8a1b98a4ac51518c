"""`semel guarantees --effects`: four ways to make calls to the outside under the same kills, as a table."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from semel.cli.output import Console
from semel.cli.progress import tell, working
from semel.verify.side_effects import RESULT_NAME, EffectsComparison, compare_effects


def show_side_effects(folder: Path, seed: int) -> EffectsComparison:
    """Run the comparison with a line that says where it is."""
    with working("starting"):
        return compare_effects(folder, seed, lambda way: tell(f"calls under kills: {way}"))


def print_side_effects(comparison: EffectsComparison, folder: Path, console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for head in ("calls", "missing", "repeated", "unknown", "kills"):
        table.add_column(head, justify="right")
    for one in comparison.shown:
        damage = (f"[red]{number}[/red]" if number else "[green]0[/green]" for number in (one.missing, one.repeated))
        table.add_row(one.way, str(one.calls), *damage, str(one.unknown), str(one.kills))
    console.print(table)
    colour = "green" if comparison.outcome == "shown" else "red"
    console.print(f"\n[{colour}]{comparison.conclusion}[/{colour}]", highlight=False)
    console.print(f"Report: {folder / RESULT_NAME}", highlight=False, soft_wrap=True)
