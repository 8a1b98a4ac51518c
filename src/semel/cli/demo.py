"""`semel demo`: one Spark pipeline with two sinks under `kill -9`, watched live, with a table and a page at the end."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from semel.errors import SemelError

if TYPE_CHECKING:
    from semel.demo.run import Progress, Result

JAVA_MISSING: Final = (
    "Java 17 or newer is missing. Install it: apt-get install openjdk-17-jdk-headless (or: brew install openjdk@17)"
)
SPARK_MISSING: Final = "pyspark 4.2 or newer is missing. Install it: pip install 'semel[spark]' 'pyspark>=4.2'"
_JAVA_MIN: Final = 17
_SPARK_MIN: Final = (4, 2)


def demo(
    seconds: Annotated[
        float, typer.Option(help="How long orders come in and processes are killed; starting and counting add to it.")
    ] = 60.0,
    report: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("semel-demo.html"),
    seed: Annotated[int | None, typer.Option(help="For the same orders and kills again; a random one without.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the broker's data, checkpoints and Spark's log.")] = False,
) -> None:
    """Kill Spark's driver, its executor and the broker while one pipeline writes with a plain sink and with Semel's.

    Ends with 1 if Semel lost, repeated or tore anything, and with 2 if the plain sink had nothing to show.
    """
    console = Console()
    missing = what_is_missing()
    if missing is not None:
        typer.echo(missing, err=True)
        raise typer.Exit(1)
    from semel.demo.report import render
    from semel.demo.run import DemoRun, DemoSettings

    seed = random.randrange(1_000_000) if seed is None else seed
    folder = Path(tempfile.mkdtemp(prefix="semel-demo-"))
    console.print(f"[bold]semel demo --seconds {seconds:g} --seed {seed}[/bold]", highlight=False)
    try:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            result = DemoRun(DemoSettings(folder, seconds, seed), lambda progress: live.update(_view(progress))).run()
        report.write_text(render(result), encoding="utf-8")
    except SemelError as error:
        console.print(f"[red]Nothing was shown:[/red] {error}", highlight=False)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        console.print("Stopped; every process has ended.")
        raise typer.Exit(130) from None
    finally:
        if keep:
            console.print(f"Data, checkpoints and logs: {folder}", highlight=False, soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    _print(result, console)
    console.print(f"Page: {report.absolute()}", highlight=False, soft_wrap=True)
    raise typer.Exit(result.exit_code)


def what_is_missing() -> str | None:
    """One line with the command that installs it, or None."""
    if find_spec("pyspark") is None:
        return SPARK_MISSING
    from pyspark.version import __version__ as spark_version

    if tuple(int(part) for part in re.findall(r"\d+", spark_version)[:2]) < _SPARK_MIN:
        return SPARK_MISSING
    home = os.environ.get("JAVA_HOME")  # Spark looks there first
    java = str(Path(home) / "bin" / "java") if home else "java"
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    except OSError:
        return JAVA_MISSING
    version = re.search(r'version "(\d+)', said)
    return JAVA_MISSING if version is None or int(version[1]) < _JAVA_MIN else None


def _view(progress: Progress) -> Table:
    from semel.demo.kills import VICTIMS
    from semel.demo.pipelines import PIPELINES
    from semel.demo.report import TITLES

    view = Table.grid(padding=(0, 2))
    view.add_row(f"{progress.elapsed_s:.0f} s", progress.stage)
    view.add_row("orders sent", f"{progress.sent:,}")
    for pipeline in PIPELINES:
        repeated = progress.repeated[pipeline]
        told = f"[red]{repeated:,} twice[/red]" if repeated else "[green]none twice[/green]"
        view.add_row(TITLES[pipeline], f"{progress.done[pipeline]:,} orders done, {told}")
    view.add_row("kill -9", ", ".join(f"{victim} {progress.kills[victim]}x" for victim in VICTIMS))
    return view


def _print(result: Result, console: Console) -> None:
    from semel.demo.pipelines import PIPELINES
    from semel.demo.report import ROWS, TITLES, conclusion

    for one in result.kills:
        back = "" if one.back_at is None else f", back after {one.back_at - one.at:.1f} s"
        console.print(
            f"{one.at:5.1f} s  kill -9 {one.victim:8}  {one.note}{back}", highlight=False, style="dim", soft_wrap=True
        )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for pipeline in PIPELINES:
        table.add_column(TITLES[pipeline], justify="right")
    for name, field in ROWS:
        counts: list[int] = [getattr(result.tallies[pipeline], field) for pipeline in PIPELINES]
        table.add_row(name, *(f"{count:,}" if field == "orders" else _coloured(count) for count in counts))
    console.print(table)
    colour = "green" if result.exit_code == 0 else "red"
    console.print(f"\n[{colour}]{conclusion(result)}[/{colour}] It took {result.seconds:.0f} s.", highlight=False)


def _coloured(number: int) -> str:
    return f"[red]{number:,}[/red]" if number else f"[green]{number}[/green]"
