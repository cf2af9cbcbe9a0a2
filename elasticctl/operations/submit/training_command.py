"""The command to run: a script, `python -m pkg.train`, a shell script, or a command line of torchrun or accelerate.

elasticctl starts the ranks and forms the group. Command lines of other launchers are therefore translated: the script
and its arguments stay, sizes become options of `submit`, and the rendezvous is dropped.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticctl.api.errors import UsageError
from elasticctl.api.text import join_and, quote

_PYTHON = re.compile(r"python([23](\.\d+)?)?$")
_ASSIGNED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_TORCH_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_OTHER_LAUNCHERS = ("deepspeed", "mpirun", "mpiexec", "srun", "horovodrun", "ray", "composer")
_STARTS_RANKS = re.compile(
    r"(?:^|[\s;&|(])(?:\S*/)?(torchrun|accelerate\s+launch|deepspeed|mpirun|mpiexec|horovodrun"
    r"|-m\s+torch\.distributed\.(?:run|launch)|-m\s+accelerate\.commands\.launch)(?=\s|$)"
)
_MAX_SCRIPT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TrainingCommand:
    """What the ranks run: `script` (a path) with `args`; where `script` is "", the words of `args` themselves.

    `options`: the fields of JobFlags set by a translated line; `env`: variables; `notes`: remarks on the translation.
    """

    script: str
    args: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    env: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def named_after(self) -> str:
        """What the job is named after: the script, the module, or the program."""
        words = self.args
        if self.script:
            return self.script
        if "-m" in words[:-1] and _is_python(words[0]):
            return words[words.index("-m") + 1].rpartition(".")[2]
        inner = next((word for word in words[1:] if word.endswith((".py", ".sh"))), words[0])
        return inner


def of_words(words: Sequence[str], *, starts_ranks: bool = False) -> TrainingCommand:
    """Read a typed command. Raises UsageError for a launcher that cannot be translated.

    `starts_ranks`: it is run unchanged, as the job is in the launcher role.
    """
    env = []
    rest = list(words)
    while rest and _ASSIGNED.match(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        env.append((name, value))
    if not rest:
        raise UsageError("nothing to run. FIX: give a script, or a command after `--`")
    made = TrainingCommand("", tuple(rest)) if starts_ranks else _translated(rest)
    return TrainingCommand(made.script, made.args, made.options, (*env, *made.env), made.notes)


def _translated(words: list[str]) -> TrainingCommand:
    program = os.path.basename(words[0])
    if program == "torchrun":
        return _from_launcher(words[1:], "torchrun", _TORCHRUN, _torchrun_sizes)
    if program == "accelerate":
        if words[1:2] != ["launch"]:
            raise UsageError(f"accelerate {' '.join(words[1:2])} does not train. FIX: give accelerate launch SCRIPT")
        return _from_launcher(words[2:], "accelerate launch", _ACCELERATE, _accelerate_sizes)
    if program in _OTHER_LAUNCHERS:
        raise UsageError(
            f"{program} starts its own ranks, so each worker would train alone. FIX: give the script that it"
            " starts, and sizes with --workers or --gpus; or have it run once, over all workers, with --launcher"
        )
    if not _is_python(words[0]):
        return TrainingCommand("", tuple(words))
    if words[1:2] == ["-m"] and words[2:3] and words[2] in _TORCH_MODULES:
        return _from_launcher(words[3:], f"python -m {words[2]}", _TORCHRUN, _torchrun_sizes)
    if words[1:3] == ["-m", "accelerate.commands.launch"]:
        return _from_launcher(words[3:], "accelerate launch", _ACCELERATE, _accelerate_sizes)
    if words[0] in ("python", "python3") and words[1:] and words[1].endswith(".py"):
        return TrainingCommand(words[1], tuple(words[2:]))
    return TrainingCommand("", tuple(words))


def _is_python(word: str) -> bool:
    return _PYTHON.fullmatch(os.path.basename(word)) is not None


# Option -> whether it takes a value; those that are not here are not known.
_TORCHRUN = {
    **dict.fromkeys(
        ("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts",
         "monitor_interval", "start_method", "role", "log_dir", "r", "redirects", "t", "tee", "node_rank",
         "master_addr", "master_port", "local_addr", "logs_specs", "local_ranks_filter", "duplicate_stdout_filters",
         "duplicate_stderr_filters", "event_log_handler", "numa_binding", "signals_to_handle"), True),
    **dict.fromkeys(("standalone", "m", "module", "no_python", "run_path", "use_env"), False),
}  # fmt: skip
_ACCELERATE = {
    **dict.fromkeys(
        ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "mixed_precision",
         "gradient_accumulation_steps", "num_cpu_threads_per_process", "dynamo_backend", "rdzv_backend", "rdzv_conf",
         "same_network", "max_restarts", "monitor_interval", "gpu_ids", "log_dir", "role", "tee"), True),
    **dict.fromkeys(("multi_gpu", "cpu", "m", "module", "quiet", "q", "debug", "use_cpu"), False),
}  # fmt: skip
_OURS = ("m", "module", "nnodes", "nproc_per_node", "max_restarts", "num_processes", "num_machines", "mixed_precision",
         "gradient_accumulation_steps", "num_cpu_threads_per_process", "multi_gpu", "cpu", "use_cpu", "quiet", "q",
         "use_env")  # fmt: skip


def _from_launcher(
    words: list[str], launcher: str, known: Mapping[str, bool], sizes: Callable[[dict[str, str]], dict[str, Any]]
) -> TrainingCommand:
    given: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        name, mark, value = rest.pop(0).lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name not in known:
            raise UsageError(
                f"{launcher}: --{name} cannot be translated. FIX: give the script itself, and say the same with"
                " options of `elasticctl submit` and --env"
            )
        if known[name] and not mark:
            if not rest:
                raise UsageError(f"{launcher}: --{name} needs a value")
            value = rest.pop(0)
        given[name] = value
    rest = rest[1:] if rest[:1] == ["--"] else rest
    if not rest:
        raise UsageError(f"{launcher} names no script. FIX: give it after {launcher}'s options")
    needless = [f"--{name}" for name in given if name not in _OURS]
    note = f"{launcher}: elasticctl starts the ranks itself and forms the group"
    note += f"; {join_and(needless)} {'is' if len(needless) == 1 else 'are'} not needed" if needless else ""
    env = tuple((variable, given[name]) for name, variable in _ACCELERATE_VARIABLES.items() if name in given)
    options = sizes(given)
    if {"m", "module"} & {*given}:
        return TrainingCommand("", ("python", "-m", *rest), options, env, (note,))
    if "no_python" in given:
        return TrainingCommand("", tuple(rest), options, env, (note,))
    return TrainingCommand(rest[0], tuple(rest[1:]), options, env, (note,))


_ACCELERATE_VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "num_cpu_threads_per_process": "OMP_NUM_THREADS",
}


def _torchrun_sizes(given: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if "nnodes" in given:
        low, _, high = given["nnodes"].partition(":")
        options["workers"] = _number(high or low, "--nnodes")
        if high:
            options |= {"min_workers": _number(low, "--nnodes"), "max_workers": options["workers"]}
    if given.get("nproc_per_node") not in (None, "auto", "gpu", "cpu", "xpu"):
        options["gpus_per_node"] = _number(given["nproc_per_node"], "--nproc-per-node")
    if "max_restarts" in given:
        options["backoff_limit"] = _number(given["max_restarts"], "--max-restarts", low=0)
    return options


def _accelerate_sizes(given: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    machines = _number(given.get("num_machines", "1"), "--num_machines")
    if "num_machines" in given:
        options["workers"] = machines
    if "num_processes" in given:
        ranks = _number(given["num_processes"], "--num_processes")
        if ranks % machines:
            raise UsageError(f"--num_processes {ranks} cannot be shared evenly by --num_machines {machines}")
        options["gpus_per_node"] = ranks // machines
    return options


def _number(text: str, option: str, low: int = 1) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < low:
        raise UsageError(f"{option} {quote(text)} is not a whole number of at least {low}")
    return int(text)


def interpreter_of(path: Path) -> tuple[str, ...]:
    """The interpreter of a script that is not executable, from its first line, or a shell for `.sh`; () for Python."""
    if path.suffix == ".py":
        return ()
    with path.open("rb") as file:
        first = file.readline(256)
    if first.startswith(b"#!"):
        words = first[2:].decode("utf-8", "replace").split()
        if words and os.path.basename(words[0]) == "env":
            words = [word for word in words[1:] if word != "-S"]
        if words and not _is_python(words[0]):
            return (os.path.basename(words[0]), *words[1:])
        if words:
            return ()
    return ("bash",) if path.suffix in (".sh", ".bash") else ()


def launcher_inside(path: Path) -> str:
    """The line of a shell script, with continuations joined, that starts ranks itself; "" for none, and for Python."""
    try:
        if path.suffix == ".py" or path.stat().st_size > _MAX_SCRIPT_BYTES:
            return ""
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    if _is_python_text(text):
        return ""
    for line in text.replace("\\\n", " ").splitlines():
        code = line.strip()
        if not code.startswith("#") and _STARTS_RANKS.search(code.partition(" #")[0]):
            return " ".join(code.split())
    return ""


def _is_python_text(text: str) -> bool:
    first = text.partition("\n")[0]
    return first.startswith("#!") and "python" in first


def refuse_notebook(command: TrainingCommand) -> None:
    """Raise UsageError for a notebook, whose cells may contain more than Python, in any order."""
    if command.script.lower().endswith(".ipynb"):
        script = f"{command.script[: -len('.ipynb')]}.py"
        convert = f"jupyter nbconvert --to script {shlex.quote(command.script)}"
        raise UsageError(
            f"{command.script} is a notebook, and ranks run scripts. FIX: `{convert}`, check that the result trains"
            f" when run by itself, and submit {script}"
        )


def refuse_other_groups(command: TrainingCommand) -> None:
    """Raise UsageError for a shell script or command line that would start a group of its own in each rank."""
    for word in [command.script] if command.script else command.args:
        if " " in word and _STARTS_RANKS.search(word):
            _refuse(command.args[0], word)
        path = Path(word)
        if path.is_file() and (command.script or path.suffix in (".sh", ".bash", "")):
            line = launcher_inside(path)
            if line:
                _refuse(path.name, line)


def _refuse(name: str, line: str) -> None:
    try:
        of_words(shlex.split(line.removeprefix("exec ")))
        fix = f"elasticctl submit -- {line.removeprefix('exec ')}"
    except (UsageError, ValueError):
        fix = "give the Python script that it starts"
    raise UsageError(
        f"{name} starts its own ranks ({quote(line)}), so each worker would train alone, unnoticed. FIX: {fix}"
    )
