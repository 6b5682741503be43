"""One rank of ``shardwise train``, from start to end. Every rank runs this; only rank 0 prints and writes metrics."""

import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from shardwise.base.errors import DivergedError
from shardwise.cli.click_trainer import ClickTrainer
from shardwise.cli.evaluations import notes_on
from shardwise.cli.image_trainer import ImageTrainer
from shardwise.cli.profile import ProfileRequest, check_snapshot
from shardwise.cli.request import CommandRequest
from shardwise.cli.runs.run_folder import RunFolder, without_start
from shardwise.cli.stop import StopFlag
from shardwise.cli.text_trainer import TextTrainer
from shardwise.cli.trainer import Trainer
from shardwise.comm.world import join
from shardwise.config.auto import resolve
from shardwise.data import DataPolicy
from shardwise.data.clicks import ClickPolicy
from shardwise.data.images import ImagePolicy
from shardwise.engine.step.monitor import Monitor
from shardwise.launch.environment import is_in_job
from shardwise.launch.terminal import lasting_console
from shardwise.observe.lanes_picture import draw_picture as draw_lanes
from shardwise.observe.lanes_picture import draw_text as draw_lanes_text
from shardwise.observe.log import rank_log
from shardwise.observe.progress import ConsoleHandler, open_progress
from shardwise.observe.schedule_picture import draw_picture, draw_text
from shardwise.verify.passed import sentence_of_run

_TRAINERS: dict[type, type[Trainer]] = {
    ClickPolicy: ClickTrainer,
    ImagePolicy: ImageTrainer,
    DataPolicy: TextTrainer,
}
"""Trainer for each kind of data."""


def train(request: CommandRequest) -> int:
    """Train as one rank and return the exit code."""
    config = request.load()
    world = join(policy=config.comm)
    check_snapshot(request.memory_snapshot, world.device.type)
    folder = RunFolder(Path(config.output_dir))
    world.record_in(folder.flight)
    console = lasting_console(quiet=world.rank != 0)
    start = folder.start_from(request.resume, request.step)
    # Our launcher already copies rank 0's output into its log, except output to a terminal, which it does not read.
    # Copied lines therefore get the form of the log.
    is_copied = world.rank == 0 and is_in_job() and not console.is_terminal
    terminal = ConsoleHandler(console, 0 if is_copied else None) if world.rank == 0 else None
    held = folder.claimed() if world.rank == 0 else contextlib.nullcontext()
    with held, rank_log(world.rank, None if is_copied else folder.logs, terminal) as log:
        resolved = resolve(
            without_start(config) if start is not None else config, world.size, world.device.type
        )
        if world.rank == 0:
            for choice in resolved.choices:
                log.info("%s", choice)
        trainer: Trainer = _TRAINERS[type(resolved.config.data)](
            world, resolved, folder, ProfileRequest(request.profile_steps, request.memory_snapshot)
        )
        log.info("%s", trainer.description())
        if world.rank == 0 and world.size > 1:
            log.info("%s", sentence_of_run(config, world.size))
        if start is not None:
            trainer.go_on_from(start)
        if world.rank == 0:
            for note in (*notes_on(trainer.config), *trainer.notes()):
                log.warning("%s", note)
        if world.rank == 0:  # only now, so that a start that fails leaves the folder unchanged
            folder.keep_start(request.command(), world.size, [each for each in world.addresses if each])
            for change in folder.keep_config(config.to_yaml()):
                log.warning("since the last start of this run: %s", change)
        code = _train(trainer, console, request)
        world.close()
    return code


def _open_monitor(trainer: Trainer, console: Console) -> Monitor:
    monitor, first = trainer.engine.monitor, trainer.engine.step_count
    is_main = trainer.world.rank == 0
    best = trainer.best if isinstance(trainer, ClickTrainer) and is_main else None
    monitor.open(first, trainer.record_kind, None if best is None else best.auc)
    if is_main:
        policy = trainer.config.monitor
        steps = trainer.config.train.steps
        monitor.add(open_progress(console, steps, first, policy.print_every, policy.breakdown))
    return monitor


def _train(trainer: Trainer, console: Console, request: CommandRequest) -> int:
    """Run the training loop and release everything after it."""
    stop = StopFlag(trainer.engine.request_stop)
    is_over = is_done = False
    while not is_over:
        monitor = _open_monitor(trainer, console)
        try:
            with stop.listening():
                is_done = trainer.run(monitor)
            is_over = True
        except DivergedError as error:
            trainer.go_on_after(error)
        finally:
            monitor.close()
    engine = trainer.engine
    trainer.finish_saving()
    _show_schedule(trainer, console)
    _show_lanes(trainer, console)
    if trainer.config.monitor.picture:
        trainer.outlook.draw(trainer.folder.step)
    if not is_done:
        console.print(f"stopped after step {engine.step_count}, which is saved. Resume with:", style="bold")
        console.print(f"    {request.command()}", markup=False, highlight=False, soft_wrap=True)
        # A scheduler must not take a run that it interrupted for one that finished.
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if engine.agree(stop.signal == number):
                return 128 + number
        return 0
    _last_words(trainer, console)
    return 0


def _show_schedule(trainer: Trainer, console: Console) -> None:
    """Show the last step of a pipeline: a table, and a picture in the run folder."""
    if trainer.timelines is None or trainer.world.rank != 0:
        return
    predicted, measured = trainer.timelines
    pipeline = trainer.config.pipeline
    microbatches = trainer.config.batch.accumulation
    what = f"{pipeline.schedule}: {trainer.stages} stages × {microbatches} microbatches"
    idle = f"idle {predicted.idle_share:.0%} as predicted, {measured.idle_share:.0%} as measured"
    for line in (f"{what}, {idle}", *draw_text(predicted, row="pp").splitlines()):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    title = f"{what}, step {trainer.engine.step_count}"
    draw_picture({"predicted": predicted, "measured": measured}, trainer.folder.schedule, title, row="pp")


def _show_lanes(trainer: Trainer, console: Console) -> None:
    """Show reading, keys and compute of a few steps of a run over clicks, as a table and a picture.

    The picture is in the run folder, unless ``monitor.picture`` is false.
    """
    if not isinstance(trainer, ClickTrainer) or trainer.world.rank != 0:
        return
    lanes = trainer.lanes
    spans = lanes.window()
    for line in draw_lanes_text(lanes.figures(spans)).splitlines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if spans and trainer.config.monitor.picture:
        steps = "1 step" if lanes.depth == 1 else f"{lanes.depth} steps"
        rows = lanes.rows_text(spans)
        title = f"keys {steps} ahead" + (f"; {rows}" if rows else "")
        draw_lanes({"rank 0": spans}, trainer.folder.lanes, title)


def _last_words(trainer: Trainer, console: Console) -> None:
    """Print the results and the run folder."""
    said = trainer.close()
    if trainer.world.rank != 0:
        return
    if trainer.engine.config.compile.scope != "none":
        breaks = trainer.engine.graph_breaks
        why = "".join(f"; {reason}" for reason in breaks)
        said.append(f"compiled blocks: {sum(breaks.values())} graph breaks{why}")
    for text in (*said, f"run folder: {trainer.folder.root}"):
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def main(arguments: Sequence[str]) -> int:
    """Run a rank that the launcher started."""
    (text,) = arguments
    return train(CommandRequest.from_json(text))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
