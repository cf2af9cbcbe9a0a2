"""What `--help` and the shells' completion say."""

from __future__ import annotations

import pytest

from elasticctl.cli.framework.command import verb_meant
from elasticctl.cli.main import main
from tests.support.cli import Done, Run
from tests.support.verbs import FAMILIES, VERBS


def lines(text: str, width: int = 80) -> list[str]:
    found = text.splitlines()
    assert all(len(line) <= width for line in found)
    return found


@pytest.mark.parametrize("args", [(), ("-h",), ("--help",)])
@pytest.mark.parametrize("columns", ["80", "200"])
def test_all_verbs_are_listed(run: Run, args: tuple[str, ...], columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    done = run(*args)
    assert done.code == 0
    assert done.err == ""
    text = lines(done.out)
    assert text[0] == "Usage: elasticctl [OPTIONS] VERB [ARGS]..."
    assert {"submit", "status", "config", "version"} < set(VERBS)
    assert [line.split()[0] for line in text if line.strip() and line.split()[0] in VERBS] == VERBS
    assert "\x1b" not in done.out


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_explains_itself(run: Run, name: str) -> None:
    done = run(name, "--help")
    assert (done.code, done.err) == (0, "")
    text = lines(done.out)
    assert text[0].startswith(f"Usage: elasticctl {name} [OPTIONS]")
    assert text[2].startswith("  ")
    assert "  -h, --help" in done.out
    for inner in FAMILIES.get(name, []):
        assert f"\n  {inner} " in done.out
        assert lines(run(name, inner, "-h").out)[0].startswith(f"Usage: elasticctl {name} {inner} [OPTIONS]")


def test_submit_teaches_by_example(run: Run) -> None:
    text = run("submit", "--help").out
    assert text.startswith("Usage: elasticctl submit [OPTIONS] [SCRIPT] [-- ARGS...]\n")
    assert "\n    elasticctl submit train.py -- --epochs 90\n" in text
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == [
        "Size:",
        "Deadline and budget:",
        "Script, files and storage:",
        "Nodes and labels:",
        "Time limits and retries:",
        "After submission:",
        "Options:",
    ]
    assert "--spot / --on-demand" in text
    assert "[default: spot]" in text


@pytest.mark.parametrize(
    ("verb", "listed", "unlisted"),
    [("list", "--phase", "--status"), ("sweep", "--priority", "--queue"), ("cancel", "--label", "--yes")],
)
def test_refused_obsolete_and_ineffective_options_are_not_listed(
    run: Run, verb: str, listed: str, unlisted: str
) -> None:
    text = run(verb, "--help").out
    assert listed in text
    assert unlisted not in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("status --foo x", "status has no option --foo. See `elasticctl status --help`."),
        (
            "list --status fine",
            "Invalid value for '--phase' / '--status': \"fine\" is not pending, running, restarting, suspended, ",
        ),
        ("sumbit", 'there is no verb "sumbit" (did you mean "submit"?). See `elasticctl --help`.'),
        ("pause", 'there is no verb "pause" (did you mean "suspend"?). See `elasticctl --help`.'),
        ("stop x", 'there is no verb "stop" (did you mean "suspend", or "cancel" to end it for good?).'),
        ("kill x", 'there is no verb "kill" (did you mean "cancel"?). See'),
        ("rm x", 'there is no verb "rm" (did you mean "delete"?). See'),
        ("run train.py", 'there is no verb "run" (did you mean "submit"?). See'),
        *(
            (word, f'there is no verb "{word}" (did you mean "list"?). See `elasticctl --help`.\n')
            for word in ("ps", "get", "jobs", "ls", "squeue")
        ),
        ("usage", 'there is no verb "usage" (did you mean "top"?). See'),
        ("delet x", 'there is no verb "delet" (did you mean "delete"?). See'),
        ("config get", 'there is no verb "get" (did you mean "get-contexts"?). See'),
        ("local stop", 'there is no verb "stop" (did you mean "down"?). See'),
        ("--context local version", "version has no option --context. See"),
        ("help nothing", 'there is no verb "nothing". See'),
        ("config vew", 'there is no verb "vew" (did you mean "view"?). See `elasticctl config --help`.'),
        ("list --wath", 'list has no option --wath (did you mean "--watch"?). See `elasticctl list --help`.'),
        ("list -x", "list has no option -x. See `elasticctl list --help`."),
        ("--wath", "elasticctl has no option --wath. See `elasticctl --help`."),
        ("completion", "Missing argument 'SHELL'. Choose from: bash, zsh, fish. See `elasticctl completion --help`."),
        ("list -n My_Team", "\"My_Team\" is not a namespace. FIX: use lower-case letters, digits and '-', 63 at most"),
        ("logs x --worker", "Option '--worker' requires an argument."),
        ("list all", "Got unexpected extra argument(s) (all). See `elasticctl list --help`."),
        ("scale x --to -1", "Invalid value for '--to': \"-1\" is not a whole number of at least 1."),
        (
            "submit a.py --gpu-tpe t4",
            'submit has no option --gpu-tpe (did you mean "--gpu-type"?); the script\'s own arguments come after `--`.',
        ),
        (
            "prune --status active",
            "Invalid value for '--phase' / '--status': \"active\" is not succeeded, failed or cancelled.",
        ),
        ("submit train.py --deadline 0s", "Invalid value for '--deadline': \"0s\" is too short: the least is 1s."),
    ],
)
def test_near_misses(run: Run, line: str, message: str) -> None:
    done = run(*line.split())
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {message}")
    assert done.err.count("\n") == 1


def test_destructive_verbs_are_suggested_only_for_typos() -> None:
    for word in ("pause", "prone", "purge", "dele", "cancer", "remote", "empty"):
        meant = verb_meant(word, VERBS)
        assert not [verb for verb in ("prune", "delete", "cancel", "move", "preempt") if verb in meant], word
    assert verb_meant("mote", ["move", "note"]) == ' (did you mean "note"?)'


def test_help_and_version_as_elsewhere(run: Run) -> None:
    assert run("help").out == run("--help").out
    assert run("help", "submit").out == run("submit", "--help").out
    assert run("help", "checkpoints", "list").out == run("checkpoints", "list", "--help").out
    assert run("--version") == run("version")


@pytest.mark.usefixtures("private_home")
@pytest.mark.parametrize("words", [("--context", "prod"), ("--context=prod", "-n", "team")])
def test_the_place_may_come_before_the_verb(run: Run, words: tuple[str, ...]) -> None:
    said = 'error: no context "prod". FIX: see `elasticctl config get-contexts`\n'
    for verb in (("list",), ("checkpoints", "list", "digits"), ("status", "digits")):
        assert run(*words, *verb) == Done(3, "", said)
    assert "Team" in run("-n", "Team", "list").err
    assert "no context" not in run(*words, "logs", "--context", "local", "-n", "Team", "digits").err  # the last counts


@pytest.mark.parametrize(
    "shell", [pytest.param("bash", marks=[pytest.mark.needs("bash"), pytest.mark.slow]), "zsh", "fish"]
)
def test_completion_scripts(run: Run, shell: str) -> None:
    """What the shells make of them is in test_completion. Of bash, the version is asked for."""
    done = run("completion", shell)
    assert (done.code, done.err) == (0, "")
    assert "_ELASTICCTL_COMPLETE=complete_" + shell in done.out


@pytest.mark.usefixtures("private_home")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("elasticctl ", VERBS),
        ("elasticctl s", [verb for verb in VERBS if verb.startswith("s")]),
        ("elasticctl sumbit ", VERBS),
        ("elasticctl config ", FAMILIES["config"]),
        ("elasticctl config use-context ", ["local"]),
        ("elasticctl list --context l", ["local"]),
        ("elasticctl list -o ", ["table", "wide", "json", "yaml", "name"]),
        ("elasticctl list --w", ["--watch"]),
        ("elasticctl completion ", ["bash", "zsh", "fish"]),
        ("elasticctl submit --restart-policy O", ["OnFailure"]),
        ("elasticctl submit --gpu-type a1", ["a10g", "a100"]),
        ("elasticctl status ", []),
        ("elasticctl logs digits --worker ", []),
    ],
)
def test_completions(
    words: str, found: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_ELASTICCTL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    done = capsys.readouterr()
    assert done.out.split() == found
    assert done.err == ""
