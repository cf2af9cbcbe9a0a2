"""Which GPUs there are, and who gets which."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticctl.cluster.local.capacity import choose_gpus, discover_gpus, parse_gpu_list

LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-1c0a6b0e-0000-1111-2222-333344445555)
  MIG 1g.18gb     Device  0: (UUID: MIG-7c0a6b0e-0000-1111-2222-333344445555)
GPU 1: Tesla T4 (UUID: GPU-2c0a6b0e-0000-1111-2222-333344445555)
"""


def program(folder: Path, script: str) -> dict[str, str]:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return {"PATH": str(folder)}


def test_gpus_are_known_by_their_uuid() -> None:
    assert parse_gpu_list(LISTING) == (
        "GPU-1c0a6b0e-0000-1111-2222-333344445555",
        "GPU-2c0a6b0e-0000-1111-2222-333344445555",
    )


@pytest.mark.slow  # it starts a program
def test_they_are_asked_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", program(tmp_path, f"printf '%s' '{LISTING}'")["PATH"])
    assert len(discover_gpus({})) == 2


@pytest.mark.slow  # it starts a program
def test_a_machine_without_the_program_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert discover_gpus({}) == ()


@pytest.mark.slow  # it starts a program
def test_a_failing_program_is_reported_and_means_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", program(tmp_path, "echo no driver; exit 9")["PATH"])
    assert discover_gpus({}) == ()
    assert "nvidia-smi failed: no driver" in caplog.text


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("", ()),
        ("2, 3", ("2", "3")),
        ("GPU-a,MIG-b", ("GPU-a", "MIG-b")),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("1,1,-1,2", ("1",)),
    ],
)
def test_the_users_own_choice_is_respected(visible: str, found: tuple[str, ...]) -> None:
    assert discover_gpus({"CUDA_VISIBLE_DEVICES": visible}) == found


@pytest.mark.parametrize(
    ("taken", "wanted", "chosen"),
    [((), 0, ()), ((), 2, ("a", "b")), (("a",), 1, ("b",)), (("a", "c"), 2, None), (("a", "b", "c"), 0, ())],
)
def test_gpus_in_use_are_not_given_out(taken: tuple[str, ...], wanted: int, chosen: tuple[str, ...] | None) -> None:
    assert choose_gpus(("a", "b", "c"), taken, wanted) == chosen
