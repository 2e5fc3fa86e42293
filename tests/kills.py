"""kill -9 of a whole run of train/distill.py at random moments, and whether it ends as if nothing had been.

    python tests/kills.py [--kills N] [--seed N] [--folder FOLDER]

A small recipe with real engines, on a CPU, in ten to twenty minutes: once undisturbed, then with all of its
processes, or one of them, killed at moments drawn over that run's time; the same command goes on each time.
tests/test_loop_kills.py kills a loop without engines, between any two changes of its folder.
"""

import random
import shutil
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer
from killed_run import POLL_S, SETTINGS, Aftermath, Command, Run, name_of, prepare, tell_phase
from loop_lives import Identity, find_leftovers, optimizer_tensors, prompt_ids, whole_shards
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from data.shard_plan import make_plan
from train.checkpoint import load_published
from train.resume import RunFolders

WEIGHT_TOLERANCE = 1e-6
MOST_FOLD = 6.0  # of the undisturbed run's time: a life that takes longer hangs
MISTAKE = 2
SHORTER = 0.5


# The undisturbed run


@dataclass(frozen=True)
class Timeline:
    """Of the undisturbed run."""

    marks_s: list[float]
    """When its first, second, ... mark was there."""
    trained_s: float
    """When its last checkpoint was: then it is measured."""
    seconds: float

    def place(self, moment_s: float) -> tuple[int, float]:
        """(Marks before the moment, seconds since the last of them)."""
        marks = bisect_right(self.marks_s, moment_s)
        return marks, moment_s - (self.marks_s[marks - 1] if marks else 0.0)


def run_undisturbed(run: Run) -> Timeline:
    command, marks_s, trained_s = Command(run), [], 0.0
    while command.code is None:
        command.look()
        marks_s += [command.seconds] * (run.count_marks() - len(marks_s))
        trained_s = trained_s or (command.seconds if run.step == SETTINGS["train.steps"] else 0.0)
        time.sleep(POLL_S)
    if command.code:
        raise SystemExit(f"the undisturbed run ended with code {command.code}, see {run.log}")
    return Timeline(marks_s, trained_s, command.seconds)


@dataclass(frozen=True)
class Kill:
    """What was killed, and when."""

    moment_s: float
    """Of the undisturbed run's time."""
    phase: str
    victim: str
    whole: dict[Path, Identity]
    """Shards that were whole then."""
    step: int
    """Of the newest checkpoint then."""
    aftermath: Aftermath


class Killing:
    """The run that is disturbed, life after life."""

    def __init__(self, run: Run, timeline: Timeline, seed: int) -> None:
        self._run, self._timeline, self._random = run, timeline, random.Random(seed)
        self._command: Command | None = None
        self.faults: list[str] = []
        self.lives = 0

    def draw_moments(self, count: int) -> list[float]:
        """One in each part of the time; measuring, half of it, begins anew each time and gets a fifth."""
        late, line = count // 5, self._timeline
        return [
            *self._draw_in_parts(0, line.trained_s, count - late),
            *self._draw_in_parts(line.trained_s, line.seconds, late),
        ]

    def _draw_in_parts(self, start_s: float, end_s: float, count: int) -> list[float]:
        part_s = (end_s - start_s) / max(1, count)
        return [start_s + part_s * (number + self._random.random()) for number in range(count)]

    def kill_at(self, moment_s: float) -> Kill:
        command = self._live_until(*self._timeline.place(moment_s))
        phase = tell_phase(command.read_stacks())
        kill = self._kill_one if self._random.random() < 0.5 else self._kill_all
        victim, aftermath = kill(command)
        return Kill(moment_s, phase, victim, whole_shards(self._run.output_dir), self._run.step, aftermath)

    def finish(self) -> None:
        """As often as it takes: a killed engine may end the command that is running."""
        for _ in range(2):
            command = self._command or self._start()
            while command.code is None:
                self._watch(command)
            if self._end(command) == 0:
                return
        self.faults.append(f"the last life ended with code {command.code}, see {self._run.log}")

    def _start(self) -> Command:
        self.lives += 1
        self._command = Command(self._run)
        return self._command

    def _live_until(self, marks: int, offset_s: float) -> Command:
        """The command so long after so many marks were there; where they had been, after it began to work.

        Sooner where lives end before: cores were perhaps fought over while the undisturbed run had them.
        """
        command, since = self._command or self._start(), None
        while since is None or time.monotonic() - since < offset_s:
            self._watch(command)
            if command.code is not None:
                self._end(command)
                command, since, offset_s = self._start(), None, SHORTER * offset_s
            if since is None and self._run.count_marks() >= marks and (not marks or command.is_at_work()):
                since = time.monotonic()
        return command

    def _watch(self, command: Command) -> None:
        command.look()
        if command.seconds > MOST_FOLD * self._timeline.seconds:
            command.kill_all()
            raise SystemExit(f"a life did not end in {command.seconds:.0f} s, see {self._run.log}")
        time.sleep(POLL_S)

    def _end(self, command: Command) -> int | None:
        """The code of a life that ended by itself."""
        orphans = command.wait_for_end_of(command.alive()).orphans
        if orphans:
            self.faults.append(f"the command ended, and left {', '.join(orphans)}")
        if command.code == MISTAKE:
            self.faults.append(f"a life was refused as a user's mistake, see {self._run.log}")
        self._command = None
        return command.code

    def _kill_all(self, command: Command) -> tuple[str, Aftermath]:
        processes = command.alive()
        command.kill_all()
        self._command = None
        return f"all {len(processes)}", command.wait_for_end_of(processes)

    def _kill_one(self, command: Command) -> tuple[str, Aftermath]:
        """Those that it started must follow it."""
        candidates = [each for each in command.alive() if name_of(each) != "resource tracker"]
        victim = self._random.choice(sorted(candidates, key=lambda each: each.pid))
        try:
            name, followers = name_of(victim), victim.children(recursive=True)
            victim.kill()
        except psutil.NoSuchProcess:  # it ended by itself just now
            return self._kill_all(command)
        return name, command.wait_for_end_of([victim, *followers])


# What must hold


def find_faults(run: Run, kills: Sequence[Kill], folder: Path) -> Iterator[str]:
    for number, kill in enumerate(kills, start=1):
        if kill.aftermath.orphans:
            yield f"kill {number} of {kill.victim} left {', '.join(kill.aftermath.orphans)} alive"
    yield from find_remade(run, kills)
    if leftovers := find_leftovers(run.output_dir):
        yield f"left behind: {', '.join(str(path.relative_to(run.output_dir)) for path in leftovers)}"
    yield from find_lost_prompts(run)
    if not (run.output_dir / "report.json").is_file():
        yield "there is no report.json"
    yield from find_other_weights(run, folder)


def find_remade(run: Run, kills: Sequence[Kill]) -> Iterator[str]:
    now = whole_shards(run.output_dir)
    for number, kill in enumerate(kills, start=1):
        made_again = [path.name for path, identity in kill.whole.items() if now.get(path) != identity]
        if made_again:
            yield f"whole at kill {number}, and made again: {', '.join(made_again)}"


def find_lost_prompts(run: Run) -> Iterator[str]:
    ids, plan = prompt_ids(run.output_dir), make_plan(run.recipe)
    planned = {prompt.id for group in plan.groups for prompt in group}
    if len(set(ids)) != len(ids):
        yield f"{len(ids) - len(set(ids))} prompts have two sequences"
    if set(ids) - planned:
        yield f"{len(set(ids) - planned)} sequences are of prompts that were not asked for"
    left_out = sum(count for reason, count in plan.count_dropped().items() if reason != "prompt_too_long")
    if len(planned - set(ids)) != left_out:
        yield f"{len(planned - set(ids))} prompts have no sequence, the manifest says {left_out}"


def find_other_weights(run: Run, folder: Path) -> Iterator[str]:
    """Against a training on the same shards that nobody disturbs."""
    again = RunFolders(folder / "again")
    for name in ("shards", "rounds"):
        shutil.copytree(run.output_dir / name, again.output_dir / name)
    recipe = folder / "again.json"
    recipe.write_text(run.recipe.model_copy(update={"output_dir": again.output_dir}).model_dump_json())
    script = str(Path(__file__).with_name("train_only.py"))
    with (folder / "again.log").open("wb") as log:
        code = subprocess.run(
            [sys.executable, script, str(recipe)], stdout=log, stderr=log, env=run.environment, check=False
        ).returncode
    if code:
        yield f"training on the same shards ended with code {code}, see {folder / 'again.log'}"
        return
    gap = max(find_gaps(run.output_dir, again.output_dir))
    if not gap <= WEIGHT_TOLERANCE:
        yield f"training on the same shards gives weights or moments that differ by {gap:g}"


def find_gaps(one: Path, other: Path) -> Iterator[float]:
    """Of published weights, fp32 masters and moments."""
    published = [load_published(each / "checkpoints" / "latest").state_dict() for each in (one, other)]
    pairs = [(published[0][name], published[1][name]) for name in published[0]]
    pairs += zip(optimizer_tensors(one), optimizer_tensors(other), strict=True)
    for first, second in pairs:
        yield (
            float((first.detach().double() - second.detach().double()).abs().max()) if first.numel() else 0.0
        )


# What people see


@contextmanager
def show_kills(count: int) -> Iterator[Callable[[str, int], None]]:
    """Yields what takes a line about the newest kill, and how many there were."""
    columns = (
        TextColumn("kills"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True, highlight=False)) as progress:
        task, since = progress.add_task("undisturbed run", total=count), time.monotonic()

        def tell(line: str, done: int) -> None:
            progress.update(task, completed=done, description=line)
            if not progress.console.is_terminal:
                progress.console.print(f"{time.monotonic() - since:6.0f} s  {done} of {count}: {line}")

        yield tell


def show(kills: Sequence[Kill], console: Console) -> None:
    table = Table("kill", "at", "phase", "killed", "all gone after", "whole shards", "step", box=SIMPLE_HEAD)
    for number, kill in enumerate(kills, start=1):
        gone = "never" if kill.aftermath.orphans else f"{kill.aftermath.seconds:.1f} s"
        columns = (f"{kill.moment_s:.0f} s", kill.phase, kill.victim, gone)
        table.add_row(f"{number}", *columns, f"{len(kill.whole)}", f"{kill.step}")
    console.print(table)


def count_equal_shards(one: Run, other: Run) -> str:
    pairs = zip(sorted(whole_shards(one.output_dir)), sorted(whole_shards(other.output_dir)), strict=True)
    equal = [first.read_bytes() == second.read_bytes() for first, second in pairs]
    return f"{sum(equal)} of {len(equal)}"


def main(
    kills: Annotated[int, typer.Option(min=1, help="How often it is killed.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the moments and the processes.")] = 0,
    folder: Annotated[Path | None, typer.Option(help="New; kept. Left out: a temporary one.")] = None,
) -> None:
    """Kill a run of the loop again and again; fails if that leaves a trace."""
    console, since = Console(highlight=False), time.monotonic()
    base = folder or Path(tempfile.mkdtemp(prefix="kills-"))
    straight, disturbed = prepare(base / "straight"), prepare(base / "disturbed")
    with show_kills(kills) as tell:
        timeline = run_undisturbed(straight)
        tell(f"undisturbed it takes {timeline.seconds:.0f} s", 0)
        killing, done = Killing(disturbed, timeline, seed), []
        for moment_s in killing.draw_moments(kills):
            done.append(killing.kill_at(moment_s))
            tell(f"{done[-1].phase}, killed {done[-1].victim}", len(done))
        killing.finish()
        tell("checks", len(done))
    faults = [*killing.faults, *find_faults(disturbed, done, base)]
    show(done, console)
    console.print(
        f"{len(done)} kills in {killing.lives} lives, {time.monotonic() - since:.0f} s in all; undisturbed"
        f" {timeline.seconds:.0f} s; shards equal to its: {count_equal_shards(disturbed, straight)}",
        soft_wrap=True,
    )
    for fault in faults:
        console.print(f"[red bold]fault:[/] {fault}", soft_wrap=True)
    if folder is None and not faults:
        shutil.rmtree(base)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
