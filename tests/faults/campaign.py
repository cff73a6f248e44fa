# ruff: noqa: E501 - tables of faults in words
"""Faults, put into real processes at seeded random moments: how many were survived with nothing lost?

    python tests/faults/campaign.py [--scale 0.1] [KIND ...]

Each kind starts real trainings of a freshly generated project, hurts them, types the same command again, and compares
what is left with a run of the same session that was never touched: all tensors, optimizer, schedules, best score,
metrics and MLflow points. Prints a row for each kind: how many were tried, in how many the fault really came, how many
survived; the whole campaign then repeats some with the guard taken out. Exits with 1 if one of the first was lost, or
none of the second.
"""

import argparse
import contextlib
import errno
import io
import json
import os
import random
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
import torch
from cookiecutter.main import cookiecutter

ROOT = Path(__file__).resolve().parents[2]
NAME = "my_lightning_project"
Row = tuple[str, int, int, int, str]

# Few and cheap steps: 5 of 256 digits an epoch. Resume points by the clock come at almost every batch.
FIT = ["fit", "--data.batch_size", "256", "--model.width", "4", "--trainer.max_epochs", "4", "--last.minutes", "0.0003"]
FIT += ["--trainer.enable_model_summary", "false", "--trainer.log_every_n_steps", "1", "--trainer.accelerator", "cpu"]
BARE = ["--onnx.enabled", "false", "--registry.enabled", "false", "--trainer.logger", "false"]
VARIANTS = {
    "plain": [],
    "workers": ["--data.num_workers", "2"],
    "accumulate": ["--trainer.accumulate_grad_batches", "2"],
    "ema": ["--ema.decay", "0.7"],
    "plateau": ["--model.schedule", "plateau"],
    "mixup": ["--data.mixup", "0.4"],
    "validation": ["--trainer.val_check_interval", "2"],
    "tracked": ["--trainer.logger", "true"],
}
HOOKS = (
    ["on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end"]
    + ["on_validation_start", "on_validation_batch_end", "on_validation_end", "on_save_checkpoint"]
    + ["on_train_end", "on_fit_end"]
)


class Project:
    """A generated project, imported once; each command runs in a forked process of its own."""

    def __init__(self, folder: Path) -> None:
        self.template, self.count = folder / "template", 0
        self.unguard: Callable[[], None] = lambda: None  # takes a guard out of each command's process
        shutil.copytree(
            cookiecutter(str(ROOT), no_input=True, default_config=True, output_dir=folder / "made"), self.template
        )
        self.folder = folder
        sys.path.insert(0, str(self.template))
        from my_lightning_project import checkpoints, cli, speed

        self.cli, self.checkpoints = cli, checkpoints
        speed.SECONDS = 0.01
        torch.set_num_threads(1)

    def place(self) -> Path:
        """An empty folder for runs and store."""
        self.count += 1
        folder = self.folder / f"place{self.count}"
        folder.mkdir()
        return folder

    def start(self, place: Path, arguments: list[str], prepare: Callable[[], None] = lambda: None) -> int:
        """Fork, and run a command there; returns the process id. Output goes to `log` in the place."""
        sys.stdout.flush()
        if pid := os.fork():
            return pid
        code: Any = 70
        try:
            os.setsid()
            log = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            sys.stdout = sys.__stdout__
            for number in (1, 2):
                os.dup2(log, number)
            from filelock import FileLock
            from my_lightning_project import check, data, registry, runs, sources, store

            for module in (check, data, registry, runs, sources, store):
                module.ROOT = place
            runs.RUNS, store.STORE_LOCK = place / "runs", FileLock(place / ".mlflow.lock")
            sys.argv = ["project", *arguments]
            self.unguard()
            prepare()
            self.cli.run()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
            if isinstance(error.code, str):
                print(error.code, flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code if code is not None else 0)

    def run(self, place: Path, arguments: list[str], prepare: Callable[[], None] = lambda: None) -> int:
        """Exit code of a command, negative for a signal."""
        return wait(self.start(place, arguments, prepare))

    def at_hook(self, hook: str, number: int, act: Callable[[Any], None]) -> Callable[[], None]:
        """For `prepare`: act when a callback's hook is called for the nth time, the sanity check aside."""
        import lightning as L

        calls = 0

        def called(_: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal calls
            calls += not trainer.sanity_checking
            if calls == number and not trainer.sanity_checking:
                act(trainer)

        callback = type("AtHook", (L.Callback,), {hook: called})()
        make = self.cli.CLI._instantiate_trainer

        def prepare() -> None:
            self.cli.CLI._instantiate_trainer = lambda cli, config, others: make(cli, config, [*others, callback])

        return prepare


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def tail(place: Path) -> str:
    """The end of a place's log, in one line."""
    lines = [line for line in (place / "log").read_text().splitlines() if line.strip()]
    return " / ".join(lines[-6:])[-700:]


def only_run(place: Path) -> Path:
    (folder,) = (path for path in (place / "runs").iterdir() if path.name != "check")
    return folder


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from flat(item, f"{path}/{number}")
    else:
        yield path, value


def outcome(folder: Path) -> dict[str, Any]:
    """Whatever a run is to end with, without names of folders and moments in time."""
    found: dict[str, Any] = {}
    for name in ("best", "last"):
        content = torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)
        kept = {
            key: content[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step")
        }
        kept["callbacks"] = content["callbacks"]
        for key in ("current_model_state", "averaging_state", "train_metrics"):
            kept[key] = content.get(key)
        found |= {f"{name}{path}": value for path, value in flat(kept)}
    found |= dict(flat(json.loads((folder / "metrics.json").read_text()), "metrics"))
    note = folder / "mlflow_run_id"
    if note.exists():
        with sqlite3.connect(folder.parents[1] / "mlflow.db") as store:
            rows = store.execute(
                "select key, step, value from metrics where run_uuid = ? and key != 'epoch' order by key, step",
                [note.read_text()],
            ).fetchall()
            (status,) = store.execute("select status from runs where run_uuid = ?", [note.read_text()]).fetchone()
        found |= {"points": [tuple(row) for row in rows], "status": status}
    return {
        key.replace(str(folder), ""): value
        for key, value in found.items()
        if not (isinstance(value, str) and "/" in value) and "sha256" not in key and "dirpath" not in key
    }


def difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The first thing in which two outcomes differ; empty if none."""
    for key in sorted(one.keys() | other.keys()):
        if key not in one or key not in other:
            return f"{key} is there once"
        first, second = one[key], other[key]
        same = torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second
        if not same and not (isinstance(first, float) and first != first and second != second):
            return f"{key} {sorted({*first} ^ {*second})[:4]}" if key == "points" else key
    return ""


def references(project: Project, variants: list[str]) -> dict[str, dict[str, Any]]:
    """Outcomes of runs that nothing happens to, and how long these take."""
    found = {}
    for name in variants:
        place, start = project.place(), time.monotonic()
        assert project.run(place, [*FIT, *BARE, *VARIANTS[name]]) == 0, (place / "log").read_text()[-2000:]
        found[name] = outcome(only_run(place)) | {"seconds": time.monotonic() - start}
    return found


def compare(folder: Path, reference: dict[str, Any]) -> str:
    return difference(outcome(folder), {key: value for key, value in reference.items() if key != "seconds"})


def kills(
    project: Project, count: int, draw: random.Random, signum: int = signal.SIGKILL
) -> tuple[int, int, list[str]]:
    """Chains of one to four kills, each followed by the same command; returns chains, kills that came, losses."""
    names = list(VARIANTS)
    known, chains, fired, losses = references(project, names), 0, 0, []
    while fired < count:
        name, place = names[chains % len(names)], project.place()
        chains += 1
        arguments, code = [*FIT, *BARE, *VARIANTS[name]], None
        for _ in range(draw.randint(1, 4)):
            if draw.random() < 0.6:
                hook = draw.choice(HOOKS)
                number = draw.randint(1, 20 if "batch" in hook or "step" in hook or "save" in hook else 4)
                code = project.run(
                    place, arguments, project.at_hook(hook, number, lambda _: os.kill(os.getpid(), signum))
                )
            else:
                pid = project.start(place, arguments)
                time.sleep(draw.uniform(0.3, 1.1) * known[name]["seconds"])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
                code = wait(pid)
            fired += code in (-signum, 128 + signum)
            if code == 0:
                break
            if code not in (-signum, 128 + signum):
                losses.append(f"{name}: exit code {code}, {tail(place)}")
                break
        code = code if code == 0 else project.run(place, arguments)
        runs = [
            path for path in (place / "runs").iterdir() if path.name != "check" and (path / "metrics.json").exists()
        ]
        if code != 0 or len(runs) != 1:
            losses.append(f"{name}: exit code {code}, {len(runs)} finished runs, {tail(place)}")
        elif lost := compare(runs[0], known[name]):
            losses.append(f"{name}: {lost} differs, {tail(place)}")
        else:
            shutil.rmtree(place)
    return chains, fired, losses


def kill(project: Project, count: int, draw: random.Random) -> Row:
    chains, fired, losses = kills(project, count, draw)
    return row("SIGKILL", fired, fired, losses, f"{chains} chains")


def terminate(project: Project, count: int, draw: random.Random) -> Row:
    """SIGTERM and Ctrl+C by turns: exit code, no process left behind, and the same end."""
    losses, fired, chains = [], 0, 0
    for signum in (signal.SIGTERM, signal.SIGINT):
        more, came, lost = kills(project, count // 2, draw, signum)
        chains, fired, losses = chains + more, fired + came, losses + lost
    return row("SIGTERM, SIGINT", fired, fired, losses, f"{chains} chains")


def devices(project: Project, count: int, draw: random.Random) -> Row:
    """Training in two processes, as torchrun starts them: a signal to one of them or to both. Each must end by itself,
    within two minutes; the same command then goes on to the same end, metrics of the epoch in which it stopped included.
    One that waits for another to appear, which was killed before, is ended, as torchrun does it."""
    arguments = [*FIT, *BARE, "--data.batch_size", "128", "--trainer.devices", "2", "--trainer.strategy", "ddp"]
    arguments += ["--trainer.logger", "true"]

    def pair(
        place: Path, act: Callable[[int], Callable[[], None]], delay: float = 0, told: tuple[int, ...] = ()
    ) -> Any:
        """Exit codes of both. `act` is what each process is prepared with; after the delay some are told to stop."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pids = []
        for rank in range(2):

            def prepare(rank: int = rank) -> None:
                names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
                names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "faults"}
                os.environ.update({name: str(value) for name, value in names.items()})
                act(rank)()

            pids.append(project.start(place, arguments, prepare))
        codes: dict[int, Any] = {}
        start, sent = time.monotonic(), not told
        while len(codes) < 2 and time.monotonic() - start < 120:
            for rank, pid in enumerate(pids):
                if rank not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(ended[1])
            if len(codes) == 1 and "All distributed processes registered" not in (place / "log").read_text():
                os.kill(pids[1 - min(codes)], signal.SIGKILL)
            if not sent and time.monotonic() - start > delay:
                sent = True
                for rank in told:
                    if rank not in codes:
                        os.kill(pids[rank], signum)
            time.sleep(0.02)
        for rank, pid in enumerate(pids):
            if rank not in codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return codes

    def idle(rank: int) -> Callable[[], None]:
        return lambda: None

    place, start = project.place(), time.monotonic()
    assert pair(place, idle) == {0: 0, 1: 0}, tail(place)
    seconds, known = time.monotonic() - start, outcome(only_run(place))
    losses, fired, chains = [], 0, 0
    while fired < count:
        place, chains = project.place(), chains + 1
        signum = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[chains % 3]
        told = draw.choice([(0,), (1,), (0, 1)])
        if draw.random() < 0.6:
            hook = draw.choice(HOOKS)
            number = draw.randint(1, 20 if "batch" in hook or "step" in hook or "save" in hook else 4)
            words = f"{signum.name} to {told} at {hook} {number}"
            at = project.at_hook(hook, number, lambda _, signum=signum: os.kill(os.getpid(), signum))
            codes = pair(place, lambda rank, at=at, told=told: at if rank in told else lambda: None)
        else:
            delay = draw.uniform(0.3, 1.0) * seconds
            words = f"{signum.name} to {told} after {delay:.1f} s of {seconds:.1f}"
            codes = pair(place, idle, delay, told)
        if codes == {0: 0, 1: 0}:  # the moment never came
            continue
        fired += 1
        if len(codes) < 2:
            losses.append(f"{words}: {codes}, the other did not end, {tail(place)}")
            continue
        if any(codes[rank] not in (-signum, 128 + signum) for rank in told):
            losses.append(f"{words}: exit codes {codes}, {tail(place)}")
        codes = pair(place, idle)
        runs = [path for path in (place / "runs").iterdir() if (path / "metrics.json").exists()]
        if codes != {0: 0, 1: 0} or len(runs) != 1:
            losses.append(f"{words}, then {codes}: {len(runs)} finished runs, {tail(place)}")
        elif lost := difference(outcome(runs[0]), known):
            losses.append(f"{words}: {lost} differs, {tail(place)}")
        else:
            shutil.rmtree(place)
    return row("signals to one of two processes, or both", fired, fired, losses, f"{chains} runs")


def save(project: Project, count: int, draw: random.Random) -> Row:
    """SIGKILL while a checkpoint of 8 MB is written again and again, TMPDIR on another file system."""
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    other = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else project.folder))

    def campaign(writer: Any, tries: int) -> tuple[int, list[str]]:
        place, bad, came = project.place(), [], 0
        path = place / "last.ckpt"
        writer.save_checkpoint({"state_dict": {"weights": torch.zeros(2_000_000)}}, path)
        for number in range(tries):
            ready, told = os.pipe()
            if not (pid := os.fork()):
                tempfile.tempdir = str(other)
                os.write(told, b"x")
                value = 0
                while True:
                    value += 1
                    writer.save_checkpoint({"state_dict": {"weights": torch.full((2_000_000,), float(value))}}, path)
            os.read(ready, 1)
            os.close(ready)
            os.close(told)
            time.sleep(draw.uniform(0, 0.1))
            os.kill(pid, signal.SIGKILL)
            came += wait(pid) == -signal.SIGKILL
            left = [item for item in place.iterdir() if item != path]
            try:
                weights = torch.load(path, weights_only=True)["state_dict"]["weights"]
                if not bool((weights == weights[0]).all()) or len(left) > 1:
                    bad.append(f"try {number}: a mixture, or {len(left)} parts left")
            except Exception as error:
                bad.append(f"try {number}: {type(error).__name__}: the only file is destroyed")
                writer.save_checkpoint({"state_dict": {"weights": torch.zeros(2_000_000)}}, path)
        return came, bad

    fired, losses = campaign(project.checkpoints.DurableIO(), count)
    tries = max(2, count // 5)
    unguarded = len(campaign(TorchCheckpointIO(), tries)[1])
    shutil.rmtree(other)
    return row("SIGKILL while saving", count, fired, losses, f"Lightning's own saving loses {unguarded} of {tries}")


def disk(project: Project, count: int, draw: random.Random) -> Row:
    """A disk, or the size of a file, that does not suffice: one line, nothing good lost; and the end once there is room."""
    known = references(project, ["plain"])["plain"]
    losses, fired = [], 0
    arguments = [*FIT, *BARE]
    for number in range(count):
        place = project.place()
        runs = place / "runs"
        runs.mkdir()
        size = draw.randint(40, 320) * 1024  # all that a run leaves takes more
        mounted = number % 2 == 0 and os.system(f"mount -t tmpfs -o size={size} tmpfs {runs} 2>/dev/null") == 0

        def limit(size: int = size) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 8, resource.RLIM_INFINITY))

        code, log = project.run(place, arguments, (lambda: None) if mounted else limit), (place / "log").read_text()
        fired += code == 1 and any(os.strerror(number) in log for number in (errno.ENOSPC, errno.EFBIG))
        points = [path for path in runs.rglob("*.ckpt") if not path.name.startswith(".")]
        broken = [path.name for path in points if not zipfile.is_zipfile(path) or zipfile.ZipFile(path).testzip()]
        errors = [line for line in log.splitlines() if line.startswith("error: ")]
        if len(errors) != 1 or "Traceback" in log or broken:
            losses.append(f"{size} bytes: {errors or log[-400:]}, broken: {broken}")
        if mounted:
            os.system(f"mount -o remount,size=100m {runs}")
        code = project.run(place, arguments)
        finished = [path for path in runs.iterdir() if (path / "metrics.json").exists()]
        lost = compare(finished[0], known) if len(finished) == 1 else f"{len(finished)} finished runs"
        if code != 0 or lost:
            losses.append(f"{size} bytes, then room: exit code {code}, {lost}")
        if mounted:
            os.system(f"umount {runs}")
    return row("disk full, file too large", count, fired, losses, "afterwards the same command goes on")


def checkpoint(project: Project, count: int, draw: random.Random) -> Row:
    """Resume points that are cut, flipped or crafted."""
    known, place = references(project, ["plain"])["plain"], project.place()
    arguments = [*FIT, *BARE]
    hook = project.at_hook("on_train_batch_end", 12, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    assert project.run(place, arguments, hook) == -signal.SIGKILL
    losses, fired, kinds = [], 0, {"cut": 0, "flip": 0, "crafted": 0}
    for number in range(count):
        kind, copy = ("cut", "flip", "crafted")[number % 3], project.place()
        shutil.copytree(place / "runs", copy / "runs")
        path = only_run(copy) / "checkpoints" / "last.ckpt"
        content = path.read_bytes()
        if kind == "cut":
            content = content[: draw.randrange(len(content))]
        elif kind == "flip":
            at = draw.randrange(len(content))
            content = content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]
        path.write_bytes(content)
        if kind == "crafted":
            torch.save(craft(torch.load(io.BytesIO(content), weights_only=True), number // 3, copy / "ran"), path)
        code, log = project.run(copy, arguments), (copy / "log").read_text()
        named = "last.ckpt" in "".join(line for line in log.splitlines() if "can't be read" in line)
        kinds[kind] += 1
        fired += 1
        if (copy / "ran").exists():
            losses.append(f"{kind}: code was run, {tail(copy)}")
        elif code == 0:
            if kind == "crafted" and number // 3 % 4 < 2 or (lost := compare(only_run(copy), known)):
                losses.append(f"{kind}: accepted, or another end: {lost}, {tail(copy)}")
        elif kind != "crafted" or not [line for line in log.splitlines() if line.startswith("error: ")]:
            losses.append(f"{kind}: exit code {code}, named {named}, {tail(copy)}")
    return row("bad checkpoints", count, fired, losses, ", ".join(f"{number} {kind}" for kind, number in kinds.items()))


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def craft(content: dict[str, Any], number: int, path: Path) -> dict[str, Any]:
    """A checkpoint with something in it that asks to be run."""
    attacks: list[Callable[[], Any]] = [
        lambda: content.update(state_dict=Touch(path)),
        lambda: content.update(extra=Touch(path)),
        lambda: content["hyper_parameters"].update(_instantiator=f"pathlib.Path.touch {path}"),
        lambda: content["hyper_parameters"].update(_class_path="os.system", init_args={"command": f"touch {path}"}),
    ]
    attacks[number % len(attacks)]()
    return content


def first_runs(project: Project, count: int, draw: random.Random) -> Row:
    """Eight first runs at once on one new store, three of them killed; then the same command for each that was killed."""
    losses, fired = [], 0
    arguments = [*FIT, *BARE, "--trainer.logger", "true", "--trainer.max_epochs", "2"]
    for number in range(count):
        place = project.place()
        pids = [project.start(place, [*arguments, "--seed_everything", str(seed)]) for seed in range(8)]
        doomed = draw.sample(range(8), 3)
        time.sleep(draw.uniform(3, 8))
        for seed in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[seed], signal.SIGKILL)
        codes = [wait(pid) for pid in pids]
        fired += any(code == -signal.SIGKILL for code in codes)
        again = [project.run(place, [*arguments, "--seed_everything", str(seed)]) for seed in doomed if codes[seed]]
        with contextlib.closing(sqlite3.connect(place / "mlflow.db")) as store:
            sound = store.execute("pragma integrity_check").fetchone() == ("ok",)
            rows = store.execute("select status, count(*) from runs group by status").fetchall()
            points = store.execute(
                "select count(*) from metrics join runs using (run_uuid) where key = 'val_loss' and status = 'FINISHED' "
                "group by run_uuid"
            ).fetchall()
        statuses = dict(rows)
        whole = statuses.get("FINISHED") == 8 and not statuses.get("RUNNING") and points == [(2,)] * 8
        if not (sound and whole) or any(codes[seed] for seed in range(8) if seed not in doomed) or any(again):
            losses.append(f"round {number}: codes {codes}, {again}; {statuses}, points {points}, {tail(place)}")
    return row("rounds of 8 first runs, 3 killed", count, fired, losses, "all points there, none RUNNING")


def non_finite(project: Project, count: int, draw: random.Random) -> Row:
    """NaN or infinity in inputs, loss, gradients or weights."""
    losses, fired = [], 0

    def spoil(trainer: Any, where: str, value: float) -> None:
        task = trainer.lightning_module
        if where == "weights":
            next(task.network.parameters()).data.view(-1)[0] = value
        elif where == "gradients":
            parameter = next(task.network.parameters())
            parameter.register_hook(lambda gradient: torch.full_like(gradient, value))
        elif where == "normalisation":
            task.network.normalize.channel_std.fill_(value)
        else:
            loss = task.loss
            task.loss = lambda logits, targets: loss(logits, targets) * value

    for number in range(count):
        place, where = project.place(), ("weights", "gradients", "normalisation", "loss")[number % 4]
        value, step = draw.choice([float("nan"), float("inf")]), draw.randint(1, 18)
        hook = project.at_hook(
            "on_train_batch_start", step, lambda trainer, where=where, value=value: spoil(trainer, where, value)
        )
        arguments = [*FIT, "--trainer.logger", "true", "--onnx.batch_sizes", "[1]"]
        code, log = project.run(place, arguments, hook), (place / "log").read_text()
        errors = [line for line in log.splitlines() if line.startswith("error: ")]
        fired += len(errors) == 1
        written = [torch.load(path, weights_only=True)["state_dict"] for path in (place / "runs").rglob("*.ckpt")]
        finite = all(bool(torch.isfinite(value).all()) for state in written for value in state.values())
        exported = list((place / "runs").rglob("model.onnx"))
        if code != 1 or "Traceback" in log or not finite or exported:
            losses.append(
                f"{value} in {where} at {step}: exit code {code}, {finite=}, {exported}, {errors}, {tail(place)}"
            )
    return row("NaN and infinity", count, fired, losses, "nothing of it on disk, exported or registered")


@contextlib.contextmanager
def server(place: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """An MLflow server with a store of its own, once it answers."""
    store = [
        "--backend-store-uri",
        f"sqlite:///{place / 'server.db'}",
        "--artifacts-destination",
        str(place / "artifacts"),
    ]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        *store,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    with (place / "server.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=place, stdout=log, stderr=log, start_new_session=True)
    try:
        for _ in range(240):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            time.sleep(0.25)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def outage(project: Project, count: int, draw: random.Random) -> Row:
    """A real MLflow server that is away at the start, dies, or hangs, and is there again for `sync` or the next run."""
    losses, fired, longest, epochs = [], 0, 0.0, 60
    for number in range(count):
        place, fault = project.place(), ("away", "dies", "hangs")[number % 3]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        def prepare(port: int = port) -> None:
            os.environ["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{port}"

        arguments = [*FIT, *BARE, "--trainer.logger", "true", "--early_stopping.patience", "1000"]
        with contextlib.nullcontext() if fault == "away" else server(place, port) as process:
            pid = project.start(place, [*arguments, "--trainer.max_epochs", str(epochs)], prepare)
            while not (list((place / "runs").glob("*/checkpoints/last.ckpt")) or os.waitpid(pid, os.WNOHANG)[0]):
                time.sleep(0.05)
            if fault != "away":
                time.sleep(draw.uniform(0, 1.5))
                os.killpg(process.pid, signal.SIGKILL if fault == "dies" else signal.SIGSTOP)
            folder, gap, seen = only_run(place), 0.0, time.monotonic()
            while not (ended := os.waitpid(pid, os.WNOHANG))[0]:  # how long does training stand still?
                stamp = (folder / "checkpoints" / "last.ckpt").stat().st_mtime_ns
                time.sleep(0.05)
                if (folder / "checkpoints" / "last.ckpt").stat().st_mtime_ns != stamp:
                    gap, seen = max(gap, time.monotonic() - seen), time.monotonic()
            code, log = os.waitstatus_to_exitcode(ended[1]), (place / "log").read_text()
            fired += "warning: MLflow at" in log
            longest = max(longest, gap)
            if fault == "hangs":
                os.killpg(process.pid, signal.SIGCONT)
        kept = (folder / "unsent.json").exists()
        with server(place, port):
            next_command = ["sync"] if draw.random() < 0.5 else [*arguments, "--trainer.max_epochs", "1"]
            again = project.run(place, next_command, prepare)
        with contextlib.closing(sqlite3.connect(place / "server.db")) as store:
            found = store.execute("select run_uuid, status from runs where name = ?", [folder.name]).fetchall()
            steps = store.execute(
                "select step from metrics join runs using (run_uuid) where name = ? and key = 'val_loss'", [folder.name]
            ).fetchall()
        right = sorted(steps) == [(5 * epoch + 4,) for epoch in range(epochs)]
        if (code, again, [status for _, status in found]) != (0, 0, ["FINISHED"]) or not right:
            losses.append(f"{fault}: {code}, {again}, {found}, {kept=}, {len(steps)} of {epochs} points, {tail(place)}")
        elif gap > 15:
            losses.append(f"{fault}: training stood still for {gap:.0f} s")
    words = f"training stood still for {longest:.0f} s at most"
    return row("tracking server away at the start, dies or hangs", count, fired, losses, words)


# What is done after training, and how often it is called before that.
STEPS = [("export.write_onnx", 1), ("export.verify", 1), ("export.measure_latency", 1), ("runs.evaluate", 0)]
STEPS += [("registry.mlflow.onnx.log_model", 0), ("registry.mlflow.log_input", 0), ("registry.mlflow.log_metrics", 0)]
STEPS += [("registry.mlflow.log_artifacts", 0), ("registry.mlflow.register_model", 0), ("registry.Registry.promote", 0)]
STEPS += [("registry.mlflow.MlflowClient.set_model_version_tag", 0), ("runs.summary", 0)]
STEPS += [("registry.mlflow.MlflowClient.set_registered_model_alias", number) for number in (0, 1)]
STEPS += [("registry.mlflow.MlflowClient.set_terminated", number) for number in (0, 1)]


def ending(project: Project, count: int, draw: random.Random) -> Row:
    """SIGKILL just before or after a step of export, evaluation, registration or promotion; then the same command."""
    import mlflow
    from my_lightning_project import registry

    registry.mlflow = mlflow  # type: ignore[attr-defined] # which it imports where it is needed
    dir(mlflow.onnx)  # loaded, so that a step of it can be replaced
    arguments = [*FIT, "--onnx.batch_sizes", "[1]", "--trainer.max_epochs", "2"]
    losses, fired = [], 0

    def at_step(step: str, before: int, after: bool) -> Callable[[], None]:
        calls = 0

        def prepare() -> None:
            owner: Any = sys.modules["my_lightning_project"]
            *path, name = step.split(".")
            for part in path:
                owner = getattr(owner, part)
            method = getattr(owner, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                result = method(*args, **kwargs) if calls <= before or after else None
                if calls > before:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            setattr(owner, name, call)

        return prepare

    def left(place: Path) -> dict[str, Any]:
        folder = only_run(place)
        found = {key: value for key, value in outcome(folder).items() if key != "points"}
        with contextlib.closing(sqlite3.connect(place / "mlflow.db")) as store:
            found["points"] = store.execute(
                "select key, step, case when key like 'onnx_%' then 0 else value end from metrics "
                "where key != 'epoch' order by key, step"
            ).fetchall()
            for name, question in {
                "runs": "select status from runs",
                "versions": "select version from model_versions",
                "aliases": "select alias, version from registered_model_aliases order by alias",
                "models": "select status from logged_models where lifecycle_stage = 'active'",
            }.items():
                found[name] = store.execute(question).fetchall()
        contract = json.loads((folder / "export" / "contract.json").read_text())
        found["export"] = contract["onnx_sha256"]
        found["names"] = sorted(path.name for path in folder.iterdir() if not path.name.startswith("recipe-resumed"))
        return found

    place = project.place()
    assert project.run(place, arguments) == 0, tail(place)
    known = left(place)
    for number in range(count):
        place, (step, before), after = project.place(), STEPS[number % len(STEPS)], draw.random() < 0.5
        code = project.run(place, arguments, at_step(step, before, after))
        fired += code == -signal.SIGKILL
        again = project.run(place, arguments)
        runs = [path for path in (place / "runs").iterdir() if path.name != "check"]
        lost = f"{len(runs)} runs, {tail(place)}" if again or len(runs) > 1 else difference(left(place), known)
        if again or lost:
            losses.append(f"{step} {before} {after=}: exit codes {code}, {again}; {lost}")
    return row(
        "SIGKILL in export, registration, promotion", count, fired, losses, f"{len(STEPS)} steps, before or after"
    )


KINDS: dict[str, tuple[Callable[[Project, int, random.Random], Row], int]] = {
    "kill": (kill, 200),
    "terminate": (terminate, 40),
    "devices": (devices, 40),
    "save": (save, 300),
    "disk": (disk, 20),
    "checkpoint": (checkpoint, 60),
    "first_runs": (first_runs, 20),
    "non_finite": (non_finite, 30),
    "outage": (outage, 20),
    "ending": (ending, 40),
}


class Unguarded:
    """What each kind of fault does once the guard against it is taken out, in the process of a command."""

    @staticmethod
    def draws() -> None:
        """As tutorials do it: a generator with a seed, which a new process draws from anew."""
        from my_lightning_project import loader
        from torch.utils.data import RandomSampler

        def order(split: Any, options: Any, *_: Any) -> Any:
            sampler = RandomSampler(split, generator=torch.Generator().manual_seed(options["seed"]))
            sampler.set_epoch = lambda epoch: None  # type: ignore[attr-defined] # which `check` calls
            return sampler

        loader.seed_batch, loader.training_order = lambda *_: None, order

    @staticmethod
    def devices() -> None:
        from my_lightning_project.resume import ResumePoint

        Unguarded.draws()
        ResumePoint.on_fit_start = lambda *_: None

    @staticmethod
    def writing() -> None:
        from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
        from my_lightning_project import cli

        cli.DurableIO = TorchCheckpointIO

    @staticmethod
    def reading() -> None:
        from my_lightning_project import cli, stopped

        cli.load_checkpoint = stopped.load_checkpoint = lambda path: torch.load(path, weights_only=False)

    @staticmethod
    def lock() -> None:
        from my_lightning_project import store

        store.STORE_LOCK = contextlib.nullcontext()
        store.embedded_store = lambda: f"sqlite:///{store.ROOT / 'mlflow.db'}"

    @staticmethod
    def looks() -> None:
        import math

        torch.isfinite = lambda value: torch.ones_like(value, dtype=torch.bool)
        math.isfinite = lambda value: True

    @staticmethod
    def outbox() -> None:
        from my_lightning_project.tracking import MLflowRun

        MLflowRun.keep = lambda self: None

    @staticmethod
    def going_on() -> None:
        from my_lightning_project import cli

        cli.stopped_run = lambda own: None


# Kind -> what is taken out, in words; how; and how many tries show what it does. `save` has an arm of its own.
UNGUARDED: dict[str, tuple[str, Callable[[], None], int]] = {
    "kill": ("order and draws by epoch and position", Unguarded.draws, 8),
    "terminate": ("order and draws by epoch and position", Unguarded.draws, 8),
    "devices": ("the agreement to stop, and order by position", Unguarded.devices, 6),
    "disk": ("writing beside the target", Unguarded.writing, 4),
    "checkpoint": ("reading plain data alone", Unguarded.reading, 6),
    "first_runs": ("the store's lock", Unguarded.lock, 2),
    "non_finite": ("the looks at loss and weights", Unguarded.looks, 4),
    "outage": ("the outbox on disk", Unguarded.outbox, 3),
    "ending": ("going on", Unguarded.going_on, 4),
}


def row(kind: str, tried: int, fired: int, losses: list[str], words: str) -> Row:
    for loss in losses:
        print(f"    lost: {loss}", flush=True)
    return kind, tried, fired, tried - len(losses), words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="all of them if none is named")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the whole campaign")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lost = False
    with tempfile.TemporaryDirectory() as name:
        project = Project(Path(name))
        print("| kind | tried | came | survived | |\n|---|---|---|---|---|", flush=True)
        for kind, (campaign, count) in KINDS.items():
            if not options.kinds or kind in options.kinds:
                start = time.monotonic()
                words, tried, fired, survived, note = campaign(
                    project, max(2, round(count * options.scale)), random.Random(options.seed)
                )
                print(
                    f"| {words} | {tried} | {fired} | {survived} | {note}; {time.monotonic() - start:.0f} s |",
                    flush=True,
                )
                lost |= survived < tried or fired < tried
                if kind in UNGUARDED and options.scale >= 1:
                    words, project.unguard, count = UNGUARDED[kind]
                    with contextlib.redirect_stdout(io.StringIO()) as shown:
                        _, tried, _, survived, _ = campaign(project, count, random.Random(options.seed))
                    project.unguard = lambda: None
                    print(f"| the same without {words} | {tried} | | {survived} | |", flush=True)
                    if survived == tried:
                        print(f"    the guard is not needed: {shown.getvalue()}", flush=True)
                    lost |= survived == tried
    return int(lost)


if __name__ == "__main__":
    sys.exit(main())
