"""`JobRequest`: a new job with every question about it answered, and the `JobSpec` that follows from it.

`resolve` answers them once, from the flags, the command, the context and this machine: the job's size, where its
workers are placed, what they run, what they cost, and where the job's state and its files are kept.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticctl.api.errors import UsageError
from elasticctl.api.goal import ON_DEMAND, PoolOrder, capacity_of
from elasticctl.api.gpu_types import GpuType, Placement, place
from elasticctl.api.observed.plan_text import goal_words
from elasticctl.api.spec import QUEUE_LABEL, USER_LABEL, JobSpec
from elasticctl.api.text import did_you_mean, join_and, plural, quote
from elasticctl.operations.job_names import check_name, name_from
from elasticctl.operations.observer import SILENT, Observer
from elasticctl.operations.option_values import Assignment
from elasticctl.operations.prices import plan_line, rate_of_nodes
from elasticctl.operations.selection import user_name
from elasticctl.operations.storage_urls import StorageChoice, choose_storage, needed_error
from elasticctl.operations.submit.goals import goal_of, order_of, priced_goal
from elasticctl.operations.submit.job_flags import VARIABLE, JobFlags
from elasticctl.operations.submit.job_size import JobSize, doubt_of, gpu_of, size_of
from elasticctl.settings.contexts import KUBERNETES, LOCAL, Context
from elasticctl_protocol import variables
from elasticctl_protocol.variables import OnNan

if TYPE_CHECKING:
    from elasticctl.api.observed.cost import Rate
    from elasticctl.operations.submit.training_command import TrainingCommand
    from elasticctl.operations.workspace.workspace import Workspace

_OWN_VARIABLES = {
    variables.STORAGE: "give --storage URL",
    variables.START_FROM: "use elasticctl rerun JOB --from-checkpoint STEP",
    variables.WORKSPACE: "give --workspace DIR",
    variables.WORKSPACE_FROM: "give --workspace DIR",
}
_LAUNCHER_NOTE = (
    "the command runs once, on the first worker, and starts what the others run: it handles checkpoints, hangs and"
    " lost ranks itself"
)


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A new job: all that its `JobSpec` is made from.

    `name_is_made`: the name was derived from the script's, and may change if it is taken. `gpu` and `rate` are None
    where they are not known, `pools` where something else chooses the pools. `spot`: workers may run on spot machines.
    `goal` is `spec.goal` with its prices.
    """

    name: str
    name_is_made: bool
    flags: JobFlags
    context: Context
    size: JobSize
    gpu: GpuType | None
    pools: PoolOrder | None
    spot: bool
    placement: Placement
    env: Mapping[str, str]
    goal: Mapping[str, Any]
    command: tuple[str, ...] = ()
    storage: StorageChoice = StorageChoice()
    workspace: Workspace | None = None
    rate: Rate | None = None

    @property
    def doubt(self) -> str:
        """Why the job is probably not what was meant; "" if nothing suggests that."""
        return doubt_of(self.size, self.flags)

    @property
    def hourly_usd(self) -> float | None:
        """The price of all workers, in US dollars an hour; None if it is not known."""
        if self.rate is None:
            return None
        return self.size.workers * (self.rate.spot_range[0] if self.spot else self.rate.low)

    def named(self, name: str) -> JobRequest:
        """The same job under another name, with its state in another place."""
        return dataclasses.replace(self, name=name)


def resolve(command: TrainingCommand, flags: JobFlags, context: Context, observer: Observer = SILENT) -> JobRequest:
    """Resolve a job that runs a command; reports remarks about its script. Raises UsageError for what cannot run."""
    flags = _with_translated(flags, command.options, command.env)
    request = request_of(flags, context, _machine_gpus(context), name=flags.name or name_from(command.named_after))
    size = request.size
    _check_secrets(flags, context)
    warnings = _check_script(command, flags, ranks=size.workers * size.ranks_per_worker)
    workspace = _plan_workspace(command, flags, context, observer)
    words = _words(command, context, workspace)
    _check_module(command, words, request, workspace)
    for note in (*command.notes, *warnings, "" if request.doubt else size.note, unused_note(flags, context)):
        if note:
            observer.report(note)
    rate = rate_of_nodes(context.provider, request.gpu, size.gpus_per_worker)
    goal = priced_goal(request.goal, rate, context)
    storage = choose_storage(flags.storage, context)
    return dataclasses.replace(request, command=words, workspace=workspace, rate=rate, goal=goal, storage=storage)


def request_of(flags: JobFlags, context: Context, machine_gpus: int, *, name: str) -> JobRequest:
    """The request as far as it follows from the flags: without command, storage and prices. Raises UsageError.

    `machine_gpus`, the number of this machine's GPUs, counts in the local context only.
    """
    size, gpu, pools = size_of(flags, context, machine_gpus), gpu_of(flags, context), order_of(flags, context)
    spot = flags.spot if pools is None else any(capacity_of(pool) != ON_DEMAND for pool in pools.order)
    placement = place(context.provider, gpu, size.gpus_per_worker, spot=spot)
    _check_flags(flags, context)
    return JobRequest(
        name=check_name(name),
        name_is_made=not flags.name,
        flags=flags,
        context=context,
        size=size,
        gpu=gpu,
        pools=pools,
        spot=spot,
        placement=placement,
        env=_environment(flags),
        goal=goal_of(flags, spot=flags.spot),
    )


def job_spec(request: JobRequest) -> JobSpec:
    """The job as its template renders it."""
    flags, context, size = request.flags, request.context, request.size
    local, own_labels, workspace = context.provider == LOCAL, dict(flags.labels), request.workspace
    placement = request.placement
    return JobSpec(
        name=request.name,
        namespace=context.namespace,
        command=request.command,
        workers=size.workers,
        min_workers=size.min_workers,
        max_workers=size.max_workers,
        automatic=size.automatic,
        goal=request.goal,
        pools=request.pools.as_spec() if request.pools is not None else {},
        priority=flags.priority,
        labels={**_user_label(), **own_labels, **({QUEUE_LABEL: flags.queue} if flags.queue else {})},
        pod_labels=own_labels,
        annotations=dict(flags.annotations),
        node_selector={} if local else dict(flags.node_selector),
        cpus="" if local else flags.cpus,
        memory="" if local else flags.memory,
        shm="" if local else flags.shm,
        suspend=bool(flags.queue),
        ranks_per_worker=size.ranks_per_worker,
        launcher=flags.launcher,
        gpus_per_worker=size.gpus_per_worker,
        gpu_type=request.gpu.name if request.gpu else "",
        spot=request.spot,
        provider=context.provider,
        image=flags.image or context.image,
        service_account=flags.service_account or context.service_account,
        working_dir=os.getcwd() if local else "",
        env=request.env,
        secrets=tuple(dict.fromkeys(ref.name for ref in flags.secrets if not ref.key)),
        secret_env={ref.variable: (ref.name, ref.key) for ref in flags.secrets if ref.key},
        mounts={mount.claim: mount.path for mount in flags.mounts},
        storage=request.storage.url_for(request.name),
        workspace=workspace.reference if workspace is not None else "",
        workspace_from=str(workspace.folder) if workspace is not None else "",
        node_terms=placement.terms,
        tolerations=() if local else (*placement.tolerations, *(one.to_manifest() for one in flags.tolerations)),
        restart_policy=flags.restart_policy,
        backoff_limit=flags.backoff_limit,
        deadline_s=flags.deadline,
        ttl_s=flags.ttl,
        hang_timeout_s=flags.hang_timeout,
        on_nan=flags.on_nan,
    )


def plan_lines(request: JobRequest) -> tuple[str, ...]:
    """The plan: what will run where, where its state is stored, and what it costs."""
    summary = plan_summary(job_spec(request), request.context)
    return (summary,) if request.rate is None else (summary, plan_line(request.rate, request.size.workers))


def plan_summary(spec: JobSpec, context: Context) -> str:
    """The plan in one line: what will run where, and where its state is stored."""
    each = plural(spec.ranks_per_worker, "CPU rank")
    if spec.gpus_per_worker:
        each = plural(spec.gpus_per_worker, f"{spec.gpu_type} GPU".strip())
    bounds = f"{spec.min_workers} to {'any number' if spec.max_workers is None else spec.max_workers}"
    market = "" if context.provider in (LOCAL, KUBERNETES) else (", spot" if spec.spot else ", on demand")
    order = PoolOrder.from_spec(spec.pools)
    market = f", {order.words}" if order is not None else market
    size = f"{plural(spec.workers, 'worker')} with {each} each ({bounds})"
    if spec.goal:
        market = ""
        size = f"{bounds} workers with {each} each, as its goal needs them ({goal_words(spec.goal)})"
    elif spec.automatic:
        size = f"{bounds} workers with {each} each, as many as fit"
    rank = f", priority {spec.priority}" if spec.priority else ""
    return f"{spec.name}: {size}{rank}, context {context.name}{market}, state in {spec.storage}"


def unused_note(flags: JobFlags, context: Context) -> str:
    """A note about flags without a meaning on this machine; "" for none, and for clusters."""
    given: dict[str, object] = {
        "--cpus": flags.cpus and not flags.launcher,
        "--memory": flags.memory,
        "--shm": flags.shm,
    }
    given |= {"--pools": flags.pools}
    given |= {"--node-selector": flags.node_selector, "--toleration": flags.tolerations}
    unused = [name for name, value in given.items() if value]
    if context.provider != LOCAL or not unused:
        return ""
    return f"{join_and(unused)}: not used on this machine, whose workers share all of it"


def _check_flags(flags: JobFlags, context: Context) -> None:
    """Raise UsageError for flags that contradict one another or the context."""
    _check_references(flags, context)
    if context.provider == LOCAL:
        if flags.queue:
            raise UsageError("--queue is for clusters with Kueue; `elasticctl local sharing on` shares this machine")
    elif not (flags.image or context.image):  # on this machine, a job runs in elasticctl's own environment
        raise needed_error("--image", context)


def _check_references(flags: JobFlags, context: Context) -> None:
    """Refuse duplicate variables, claims and paths, and volumes on this machine, which has none."""
    if flags.mounts and context.provider == LOCAL:
        raise UsageError("--mount is for clusters: on this machine a job sees every folder where it is")
    env_names = [name for name, _ in flags.env] + [ref.variable for ref in flags.secrets if ref.key]
    for flag, names in (
        ("--secret", env_names if flags.secrets else []),
        ("--mount", [mount.claim for mount in flags.mounts]),
        ("--mount", [mount.path for mount in flags.mounts]),
    ):
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"{flag}: {quote(twice)} is given twice")


def _environment(flags: JobFlags) -> dict[str, str]:
    """The job's variables, of the file, the command line and the set-up. Raises UsageError."""
    env = {**(read_env_file(flags.env_file) if flags.env_file else {}), **dict(flags.env)}
    _check_variables(env)
    return {**env, variables.SETUP: flags.setup} if flags.setup else env


def _check_variables(env: Mapping[str, str]) -> None:
    """Refuse variables that options set: the two values could contradict each other."""
    for name, fix in _OWN_VARIABLES.items():
        if name in env:
            raise UsageError(f"--env {name}: elasticctl sets this variable itself. FIX: {fix}")


def read_env_file(path: str) -> dict[str, str]:
    """The variables of a file: NAME=VALUE lines, blank ones, comments, `export`, quotes around values.

    Raises UsageError with the first other line.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except OSError as e:
        raise UsageError(f"--env-file: cannot read {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"--env-file: {path} is not UTF-8 text") from e
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip().removeprefix("export ").strip()
        if not words or words.startswith("#"):
            continue
        name, mark, value = words.partition("=")
        if not mark or not VARIABLE.fullmatch(name.strip()):
            raise UsageError(f"--env-file: {path}:{number} is not of the form NAME=VALUE")
        found[name.strip()] = _unquoted(value.strip())
    return found


def _unquoted(value: str) -> str:
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value.partition(" #")[0].rstrip()


def _user_label() -> dict[str, str]:
    """The label with the submitting user: $ELASTICCTL_USER, or the login name; none if unknown."""
    name = user_name()
    return {USER_LABEL: name} if name else {}


def _with_translated(flags: JobFlags, options: Mapping[str, Any], env: tuple[tuple[str, str], ...]) -> JobFlags:
    """The flags, completed by those of a translated command line."""
    blank = JobFlags()
    sizes = flags.gpus is not None or flags.workers is not None
    asked = {
        name: value
        for name, value in options.items()
        if getattr(flags, name) == getattr(blank, name) and not (sizes and name in ("workers", "gpus_per_node"))
    }
    return dataclasses.replace(flags, **asked, env=(*(Assignment(*pair) for pair in env), *flags.env))


def _machine_gpus(context: Context) -> int:
    if context.provider != LOCAL:
        return 0
    from elasticctl.cluster.local.capacity import discover_gpus

    return len(discover_gpus(os.environ))


def _check_secrets(flags: JobFlags, context: Context) -> None:
    """Raise UsageError for a secret that this machine lacks; a cluster checks its own."""
    wanted = dict.fromkeys((ref.name, ref.key) for ref in flags.secrets)
    if context.provider != LOCAL or not wanted:
        return
    from elasticctl.cluster.local.paths import local_paths
    from elasticctl.cluster.local.secrets import Secrets

    kept = Secrets(local_paths())
    for name, key in wanted:
        values = kept.read(context.namespace, name)
        if values is None or (key and key not in values):
            lacks = f"the secret {name} has no key {quote(key)}" if values is not None else f"there is no secret {name}"
            raise UsageError(f"--secret: {lacks}. FIX: elasticctl secret set {name} {key or 'KEY'}")


def _check_script(command: TrainingCommand, flags: JobFlags, *, ranks: int) -> tuple[str, ...]:
    """Warnings about a script that is to run on several ranks. Raises UsageError for one that cannot."""
    from elasticctl.operations.submit.script_checks import (
        lines_of_bad_syntax,
        lines_of_lone_ranks,
        lines_without_checkpoints,
    )
    from elasticctl.operations.submit.training_command import refuse_notebook, refuse_other_groups

    refuse_notebook(command)
    if flags.launcher:
        _check_launcher(flags)
        return (_LAUNCHER_NOTE,)
    refuse_other_groups(command)
    return lines_of_bad_syntax(command) or lines_of_lone_ranks(command, ranks) or lines_without_checkpoints(command)


def _check_launcher(flags: JobFlags) -> None:
    """Raise UsageError for options about ranks in the launcher role, where elasticctl starts none."""
    asked = {
        "--hang-timeout": flags.hang_timeout is not None,
        "--on-nan": flags.on_nan is not OnNan.WARN,
        "a deadline or a budget to plan for": flags.has_goal,
    }
    refused = [what for what, is_asked in asked.items() if is_asked]
    if refused:
        raise UsageError(
            f"--launcher: your program starts the ranks, and elasticctl does not see their steps, so"
            f" {join_and(refused)} cannot be used. FIX: leave {'it' if len(refused) == 1 else 'them'} out"
        )


def _plan_workspace(
    command: TrainingCommand, flags: JobFlags, context: Context, observer: Observer
) -> Workspace | None:
    """The workspace of the job; None if it has none."""
    if not flags.no_workspace:
        from elasticctl.operations.workspace.workspace import (
            plan_workspace,  # the rules of ignoring, and more that other verbs need not
        )

        path = _existing_script(command.script) if command.script else Path.cwd()
        return plan_workspace(path, flags, context, observer)
    if flags.workspace:
        raise UsageError("--workspace and --no-workspace cannot be used together. FIX: give one of them")
    return None


def _check_module(
    command: TrainingCommand, words: tuple[str, ...], request: JobRequest, workspace: Workspace | None
) -> None:
    """Raise UsageError for a module that is missing where the job runs, as far as this machine can see that."""
    from elasticctl.operations.submit.script_checks import check_module

    local = request.context.provider == LOCAL
    if not command.script and "PYTHONPATH" not in request.env and (workspace is not None or local):
        folder = workspace.folder if workspace is not None else Path.cwd()
        check_module(words, folder, on_this_python=local and not request.flags.setup)


def _words(command: TrainingCommand, context: Context, workspace: Workspace | None) -> tuple[str, ...]:
    """The command that the launcher starts; on this machine, with this Python, and a script or program that exists."""
    from elasticctl.operations.submit.training_command import interpreter_of

    local, args = context.provider == LOCAL, command.args
    if not command.script:
        return _program_here(args, workspace) if local else args
    if not local and workspace is None:
        return ("python", command.script, *args)
    path = _existing_script(command.script)
    named = str(path) if local else workspace.within(path) if workspace is not None else command.script
    if _is_program(path):
        return (named if local else f"./{named}", *args)
    interpreter = interpreter_of(path)
    if interpreter and workspace is not None:  # in the copy, whose files it names by their relative paths
        return (*interpreter, workspace.within(path), *args)
    return (*(interpreter or (sys.executable if local else "python",)), named, *args)


def _program_here(words: tuple[str, ...], workspace: Workspace | None) -> tuple[str, ...]:
    """A command with the path of its program on this machine. Raises UsageError if it does not exist."""
    if words[0] in ("python", "python3"):
        return (sys.executable, *words[1:])
    if shutil.which(words[0]) is None:
        where = f" in {workspace.folder}" if workspace is not None and os.sep in words[0] else ""
        raise UsageError(f"there is no program {quote(words[0])}{where}. FIX: give a script, or a command after `--`")
    return words


def _existing_script(script: str) -> Path:
    """The script's absolute path. Raises UsageError if it does not exist."""
    path = Path(os.path.abspath(script))
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        near = did_you_mean(path.name, (found.name for found in path.parent.glob("*.py")))
        raise UsageError(f"the script {quote(script)} {what}{near or '. FIX: correct its path'}")
    return path


def _is_program(path: Path) -> bool:
    """True if it is started directly, without Python."""
    return path.suffix != ".py" and os.access(path, os.X_OK)
