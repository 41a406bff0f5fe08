"""Runs that are killed, split over processes, starved of results and repeated a thousand times.

    python benchmarks/faults.py --json          (a quarter of an hour on one core)
    python benchmarks/faults.py --only kills --kills 4

Prints:
  kills, kills_exact: `kill -9` at random moments of rollouts, searches, updates and checkpoints; and after how many of
    them the resumed run ended with the metrics and final parameters of the unbroken run, bit for bit.
  two_process_max_loss_gap: two processes × 2 devices against one × 4: largest difference of a loss; null where the
    episodes differ.
  reshard_exact: a checkpoint restored from 4 devices onto 2 and back is the same.
  checkpoint_blocking_share: of the time of the embedded recipe's steps, saving after each.
  fault_lost_questions: questions not played exactly once in 200 steps with an index that fails, is late, answers
    nonsense, and is away for 30 s. fault_throughput_after: episodes a second after these faults over those before.
  warm_restart_over_cold: seconds to the first training step with compiled programs on disk over those without.
  soak_memory_growth: of the resident memory over the later nine tenths of 1,000 steps. soak_compiles: programs compiled
    in them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: The embedded run, small: twelve episodes a step.
SMALL = (
    str(ROOT / "configs/embedded/search_r1.yaml"),
    *("trainer.questions_per_step=3", "trainer.group_size=4", "trainer.checkpoint_every=1"),
    *("rollout.slots=12", "rollout.context=256", "rollout.append_buckets=[64]"),
    *("rollout.window_buckets=[256]", "algorithm.row_length=256", "algorithm.micro_rows=4"),
)
MOMENTS = ("rollout", "search", "update", "checkpoint", "clock")
#: What a metrics line may say differently about the same step: how long it took.
TIMED = ("seconds", "throughput", "tokens_per_second")


def main() -> None:
    """Run what was asked for and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000, help="of the soak")
    parser.add_argument(
        "--fault-steps", type=int, default=100, help="with faults; half as many before and after"
    )
    parser.add_argument("--away", type=float, default=30.0, help="seconds without any index")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--only", choices=sorted(PARTS), action="append")
    parser.add_argument("--index", default="runs/index", help="where the search index is kept")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="psearch-faults-") as scratch:
        for name in options.only or PARTS:
            began = time.monotonic()
            found = PARTS[name](Path(scratch), options)
            figures |= found
            took = f"{time.monotonic() - began:.0f} s"
            print(f"{name}: {found}, {took}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name}: {value}")


# -- processes of the command line


def arguments(directory: Path, steps: int, options: Any, *more: str) -> list[str]:
    """`psearch train` of the small embedded run."""
    places = [f"run_directory={directory}", f"compile_cache={directory.parent / 'compiled'}"]
    places.append(f"retrieval.directory={Path(options.index).absolute()}")
    return ["train", *SMALL, f"trainer.steps={steps}", *places, *more]


def start(
    command: Sequence[str], *, moment: str = "none", call: int = 0, devices: int = 1
) -> subprocess.Popen[str]:
    """The command in a process of its own, which kills itself at a call of a moment."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, __file__, "--child", moment, str(call), *command],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def finish(process: subprocess.Popen[str], *, killed: bool = False) -> float:
    """Wait for a process; SystemExit when it ended in another way than was expected."""
    began = time.monotonic()
    output, _ = process.communicate(timeout=600)
    if process.returncode != (-signal.SIGKILL if killed else 0):
        sys.exit(f"ended with {process.returncode}:\n{output}")
    return time.monotonic() - began


def child(moment: str, call: str, *command: str) -> int:
    """In the process of a run: die of SIGKILL at the given call of what happens at a moment."""
    from psearch_jax import checkpoints, cli, trainer
    from psearch_jax.learning import learner
    from psearch_jax.retrieval import searcher
    from psearch_jax.rollout import loop

    left = int(call)

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*given, **named)

        return wrapped

    def with_timer(run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            delay = int(call) / 1000
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return run(*given, **named)

        return wrapped

    if moment == "rollout":
        loop.Player._decode = deadly(loop.Player._decode)
    elif moment == "search":
        searcher.Searcher.search = deadly(searcher.Searcher.search)
    elif moment == "update":
        learner.place_batch = deadly(learner.place_batch)  # before a minibatch, after another
    elif moment == "checkpoint":
        checkpoints._digest = deadly(checkpoints._digest)  # the arrays are written, not the name
    elif moment == "clock":
        trainer.Trainer.run = with_timer(trainer.Trainer.run)
    return cli.main(command)


#: Calls of each moment in about two steps of the small run; `clock` in milliseconds.
CALLS = {"rollout": 40, "search": 12, "update": 4, "checkpoint": 40, "clock": 2500}


def metrics(directory: Path) -> list[dict[str, Any]]:
    """What a run has logged, less its times."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k not in TIMED} for x in lines]


def parameters(directory: Path) -> bytes:
    """The final policy as it was written."""
    return b"".join(p.read_bytes() for p in sorted((directory / "policy").glob("*.safetensors")))


def seconds(directory: Path, part: str) -> list[float]:
    """Seconds of a part of each step."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["seconds"][part] for line in lines]


def kills(scratch: Path, options: Any) -> dict[str, Any]:
    """Runs that are killed four times each, against one that is not."""
    steps, draw = 8, random.Random(options.seed)
    finish(start(arguments(scratch / "unbroken", steps, options)))
    wanted = metrics(scratch / "unbroken"), parameters(scratch / "unbroken")
    assert len(wanted[0]) == steps and wanted[1]
    done = exact = 0
    while done < options.kills:
        directory = scratch / f"killed-{done}"
        here = min(4, options.kills - done)
        for i in range(here):
            moment = MOMENTS[(done + i) % len(MOMENTS)]
            call = draw.randint(1, CALLS[moment])
            process = start(arguments(directory, steps, options), moment=moment, call=call)
            finish(process, killed=True)
        finish(start(arguments(directory, steps, options)))
        done += here
        same = (metrics(directory), parameters(directory)) == wanted
        exact += here * same
        print(f"kills {done}, exact {exact}", file=sys.stderr, flush=True)
        if same:
            shutil.rmtree(directory)
    return {"kills": done, "kills_exact": exact}


def two_processes(scratch: Path, options: Any) -> dict[str, Any]:
    """Two processes with two devices each, against one with four."""
    mesh = ("mesh.data=2", "mesh.fsdp=2")
    one, two = scratch / "one", scratch / "two"
    finish(start(arguments(one, 3, options, *mesh), devices=4))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    together = [
        start(
            [
                *arguments(two, 3, options, *mesh),
                f"--coordinator=localhost:{port}",
                *("--processes=2", f"--process={i}"),
            ],
            devices=2,
        )
        for i in range(2)
    ]
    for process in together:
        finish(process)
    pairs = list(zip(metrics(one), metrics(two), strict=True))
    played = ("em", "turns", "lengths", "kinds", "subqueries")
    same = all(a[name] == b[name] for a, b in pairs for name in played)
    gap = max(abs(a["loss"] - b["loss"]) for a, b in pairs)
    return {"two_process_max_loss_gap": gap if same else None}


def restart(scratch: Path, options: Any) -> dict[str, Any]:
    """The embedded recipe with and without compiled programs, and what saving after each step costs it."""

    def first_step(directory: Path, steps: int, *, stop: bool) -> float:
        command = ["train", SMALL[0], f"run_directory={directory}", f"trainer.steps={steps}"]
        command += ["trainer.checkpoint_every=1", "optimizer.schedule=constant"]
        command += [f"compile_cache={scratch / 'recipe'}"]
        command += [f"retrieval.directory={Path(options.index).absolute()}"]
        began, file = time.monotonic(), directory / "metrics.jsonl"
        process = start(command)
        while process.poll() is None and not (file.exists() and file.stat().st_size):
            time.sleep(0.1)
        taken = time.monotonic() - began
        if stop:
            process.kill()
        finish(process, killed=stop)
        return taken

    cold = first_step(scratch / "cold", 4, stop=True)
    warm = first_step(scratch / "warm", 4, stop=False)
    # What a save costs is told with the step after it.
    saving, steps = (seconds(scratch / "warm", part)[1:] for part in ("checkpoint", "total"))
    print(f"cold {cold:.1f} s, warm {warm:.1f} s, saving {saving}", file=sys.stderr, flush=True)
    return {
        "warm_restart_over_cold": warm / cold,
        "checkpoint_blocking_share": sum(saving) / sum(steps),
    }


# -- a toy policy in this process


def toy(
    directory: Path, backend: Any = None, *, axes: Any = None, warm: bool = True, **settings: Any
) -> Any:
    """A trainer of the tests' toy policy, which takes a fraction of a second a step."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "rollout")]
    import jax
    import toys

    from psearch_jax import config as sections
    from psearch_jax.mesh import make_mesh
    from psearch_jax.questions.question import Question
    from psearch_jax.rollout.engine import Engine
    from psearch_jax.trainer import Trainer

    tokenizer = toys.make_tokenizer("whole")
    follows = [("\n", "<search> <answer>"), ("<search> ##", "b c"), ("b c", "</search> ##")]
    follows += [("<answer>", "1 2"), ("1 2", "</answer>")]
    model, graphdef, params = toys.make_policy(tokenizer, follows)
    axes = axes or {"data": 1}
    mesh = make_mesh(sections.MeshConfig(**axes), jax.devices()[: math.prod(axes.values())])
    texts = ("a b", "b c", "c a", "b b", "a c", "c c", "a a")
    questions = [Question(id=t, text=t, golden_answers=("1",), kind="single") for t in texts]
    recipe = sections.Config(
        run_directory=str(directory),
        protocol=toys.PROTOCOL,
        rollout=toys.ROLLOUT,
        algorithm=sections.AlgorithmConfig(row_length=96, micro_rows=4, logprob_chunk=64),
        trainer=sections.TrainerConfig(questions_per_step=3, group_size=4, **settings),
    )
    backend = backend or toys.Corpus()
    engine = Engine(graphdef, model, tokenizer, recipe.protocol, backend, recipe.rollout, mesh=mesh)
    if warm:
        engine.warm_up(params)
    return Trainer(recipe, engine, params, questions, mesh=mesh)


def reshard(scratch: Path, options: Any) -> dict[str, Any]:
    """A checkpoint of four devices, onto two and back."""
    import jax
    import numpy as np

    from psearch_jax.config import MeshConfig
    from psearch_jax.mesh import make_mesh, param_shardings

    trainer = toy(scratch / "four", warm=False, axes={"data": 1, "fsdp": 4})
    # Moments that are not all zero.
    trainer.learner.state = jax.tree.map(lambda x: x + x.size % 7, trainer.state)
    trainer.save()
    wanted = jax.device_get(trainer.state)
    state = trainer.checkpoints.restore_latest(trainer.state).state
    for count in (2, 4):
        mesh = make_mesh(MeshConfig(fsdp=count), jax.devices()[:count])
        shardings = param_shardings(mesh, state)
        like = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            state,
            shardings,
        )
        state = trainer.checkpoints.restore_latest(like).state
        trainer.checkpoints.save(trainer.done + count, state)
    pairs = zip(jax.tree.leaves(wanted), jax.tree.leaves(jax.device_get(state)), strict=True)
    return {"reshard_exact": all(np.array_equal(a, b) for a, b in pairs)}


class Faulty:
    """A backend that fails, is late, answers nonsense, and is away, while `share` is above 0."""

    def __init__(self, backend: Any, seed: int) -> None:
        self.backend, self.draw = backend, random.Random(seed)
        self.bad, self.away_until = False, 0.0

    def search(self, queries: Sequence[str], k: int) -> Any:
        if time.monotonic() < self.away_until:
            raise ConnectionRefusedError("the retriever is away")
        luck = self.draw.random() if self.bad else 1.0
        if luck < 0.10:
            raise TimeoutError("an injected failure")
        if luck < 0.15:
            time.sleep(2.0)
        if luck < 0.20:
            return [["nonsense"]] * len(queries)
        return self.backend.search(queries, k)


def faults(scratch: Path, options: Any) -> dict[str, Any]:
    """Two hundred steps and more; the hundred in the middle with every fault, and 30 s without any index."""
    from collections import Counter
    from statistics import median

    import psearch_jax.trainer as room

    backend = Faulty(None, options.seed)
    trainer = toy(scratch / "faulty", backend, steps=10**6)
    backend.backend = sys.modules["toys"].Corpus()
    lost, failed, rollout = 0, 0, trainer.engine.rollout

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal lost
        episodes = rollout(*given, **named)
        count, wanted = len(trainer.questions), trainer.config.trainer.questions_per_step
        order = room.question_order(count, trainer.config.data.seed, trainer.position, wanted)
        due = Counter(trainer.questions[i].id for i in order for _ in range(4))
        got = Counter(e.question.id for e in episodes if e.turns)
        lost += sum(((due - got) + (got - due)).values())
        return episodes

    trainer.engine.rollout = counted
    times: dict[str, list[float]] = {"before": [], "amid": [], "after": []}
    many, few = options.fault_steps, options.fault_steps // 2
    for part, steps in (("before", few), ("amid", many), ("after", few)):
        backend.bad = part == "amid"
        backend.away_until = time.monotonic() + (options.away if backend.bad else 0)
        while len(times[part]) < steps or time.monotonic() < backend.away_until:
            told = trainer.step()
            failed += told["failed_searches"]
            times[part].append(told["seconds"]["total"])
    assert failed  # there were faults
    # The first steps compile the update.
    before, after = median(times["before"][few // 10 :]), median(times["after"])
    return {"fault_lost_questions": lost, "fault_throughput_after": before / after}


def soak(scratch: Path, options: Any) -> dict[str, Any]:
    """A thousand steps; what they keep of memory, and what they compile after the first ten."""
    import jax
    import psutil

    last = options.steps
    trainer = toy(scratch / "soak", steps=last, checkpoint_every=max(1, last // 20))
    memory: dict[int, int] = {}
    compiled = 0

    def count(event: str, *_: Any, **__: Any) -> None:
        nonlocal compiled
        compiled += event == "/jax/core/compile/backend_compile_duration" and last // 100 in memory

    jax.monitoring.register_event_duration_secs_listener(count)

    def note(step: int, _: Any) -> None:
        if step in (last // 100, last // 10, last):
            memory[step] = psutil.Process().memory_info().rss

    trainer.run(note)
    return {"soak_memory_growth": memory[last] / memory[last // 10] - 1, "soak_compiles": compiled}


PARTS = {
    "kills": kills,
    "two_processes": two_processes,
    "restart": restart,
    "reshard": reshard,
    "faults": faults,
    "soak": soak,
}
if __name__ == "__main__":
    # The toy needs four devices; the processes of the command line are told their own number.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    if sys.argv[1:2] == ["--child"]:
        sys.exit(child(*sys.argv[2:]))
    main()
