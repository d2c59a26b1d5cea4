"""The templates under launch/: right by the real tools where they are, and run with stand-ins."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.elastic.rendezvous import utils

from dist_ckpt.launcher._names import UNMET_STATUS
from dist_ckpt.launcher._options import parse_options

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "launch" / "systemd" / "train.service"
BATCH = ROOT / "launch" / "slurm" / "train.sbatch"
MANIFESTS = [ROOT / "launch" / "kubernetes" / name for name in ("train.yaml", "several-pods.yaml")]


def _unit(text: str) -> dict[str, list[str]]:
    """Return the keys of a unit's [Service], each with its values in order."""
    found: dict[str, list[str]] = {}
    section = text[text.index("[Service]") : text.index("[Install]")]
    for line in section.splitlines()[1:]:
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def _environment(pairs: list[str]) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in pairs)


# systemd ----------------------------------------------------------------------------------------


def test_the_unit_passes_systemd_analyze_once_its_marked_lines_are_changed(
    tmp_path: Path,
) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze isn't installed")
    program = tmp_path / "dist-ckpt"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    text = UNIT.read_text().replace("/srv/train/.venv/bin/dist-ckpt", str(program))
    text = text.replace("User=train", f"User={os.getuid()}").replace("/srv/train", str(tmp_path))
    unit = tmp_path / "train.service"
    unit.write_text(text)
    found = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, check=False)
    # It looks at all units that this one draws in: what it says of others isn't ours.
    assert [line for line in found.stderr.splitlines() if "train.service" in line] == []
    assert found.returncode == 0, found.stderr
    unit.write_text(text.replace("KillMode=mixed", "KilMode=mixed"))
    found = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, check=False)
    assert "KilMode" in found.stderr  # it does look


def test_the_times_of_the_unit_fit_into_each_other() -> None:
    unit = _unit(UNIT.read_text())
    command = shlex.split(unit["ExecStart"][0])
    options = parse_options(command[2:])
    deadline = float(_environment(unit["Environment"])["DIST_CKPT_DEADLINE_SECS"])
    assert deadline < options.grace_secs < float(unit["TimeoutStopSec"][0])
    assert options.script_args[0] == "train.py"
    assert unit["KillMode"] == ["mixed"]
    assert unit["Type"] == ["notify"]
    assert unit["ExecReload"][0].endswith("dist-ckpt save ${RUN}")


# Slurm ------------------------------------------------------------------------------------------

STAND_INS = {
    # Answers as scontrol does, and notes what it was asked to do.
    "scontrol": """
case $1 in
    show) printf 'node7\\nnode8\\n' ;;
    *) echo "scontrol $*" >>"$TOLD" ;;
esac
""",
    # Writes a time as the environment wants it.
    "squeue": """
case ${SLURM_TIME_FORMAT:-standard} in
    standard) echo "$SQUEUE_SAYS" ;;
    *) date --date "$SQUEUE_SAYS" "+$SLURM_TIME_FORMAT" | tee -a "$TOLD" ;;
esac
""",
    # Runs one task; what it doesn't know of are its own options.
    "srun": """
echo "srun $1 $2" >>"$TOLD"
shift 2
exec "$@"
""",
    # Notes what it was told by arguments and environment.
    "dist-ckpt": """
printf '%s\\n' "$*" "deadline $DIST_CKPT_DEADLINE_SECS" "end $DIST_CKPT_END_TIME" >>"$TOLD"
exit $((ENDS_WITH == STOPPED ? DIST_CKPT_STOP_EXIT_CODE : ENDS_WITH))
""",
}
STOPPED = 1000


@pytest.fixture
def submit(tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Run the batch script with stand-ins; return its status and what they were told."""
    for name, body in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}")
        path.chmod(0o700)
    told = tmp_path / "told"

    def run(ends_with: int, *, left_secs: float | None, **more: str) -> tuple[int, list[str]]:
        told.write_text("")
        end = "N/A"
        if left_secs is not None:
            local = time.localtime(time.time() + left_secs)
            end = time.strftime("%Y-%m-%dT%H:%M:%S", local)
        environ = {
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "TOLD": str(told),
            "SQUEUE_SAYS": end,
            "ENDS_WITH": str(ends_with),
            "STOPPED": str(STOPPED),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_PER_TASK": "16",
            **more,
        }
        script = tmp_path / "slurm_script"  # Slurm runs a copy
        script.write_text(BATCH.read_text())
        found = subprocess.run(
            ["/bin/bash", script],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert found.stderr == ""
        return found.returncode, told.read_text().splitlines()

    return run


REQUEUE = "scontrol requeue 4711"


def test_a_job_that_slurm_stopped_near_its_end_is_queued_again_and_any_other_is_not(
    submit: Callable[..., tuple[int, list[str]]],
) -> None:
    status, told = submit(STOPPED, left_secs=280)
    assert (status, told[-1]) == (0, REQUEUE)
    for ends_with, left_secs, expected in (
        (0, 280, 0),  # the training has come to its end
        (STOPPED, 5000, 0),  # somebody meant it to stop
        (STOPPED, None, 0),  # a job without an end
        (1, 280, 1),  # a crash isn't tried for ever
    ):
        status, told = submit(ends_with, left_secs=left_secs)
        assert status == expected
        assert REQUEUE not in told


def test_the_batch_script_tells_the_launcher_rendezvous_attempt_deadline_and_end(
    submit: Callable[..., tuple[int, list[str]]],
) -> None:
    status, told = submit(0, left_secs=10_000, SLURM_RESTART_COUNT="2")
    assert status == 0
    command = shlex.split(told[1])
    assert command[0] == "run"
    options = parse_options(command[1:])
    given = dict(zip(options.torchrun_args[::2], options.torchrun_args[1::2], strict=True))
    assert given["--nnodes"] == "2"
    assert given["--rdzv-endpoint"] == f"node7:{20000 + 4711}"
    assert given["--rdzv-id"] == "4711-2"
    assert options.script_args == ("train.py", "--run-dir", "/scratch/runs/first")
    lead = int(re.findall(r"#SBATCH --signal=TERM@(\d+)", BATCH.read_text())[0])
    assert told[2] == f"deadline {lead - 60}"
    assert lead - 60 < options.grace_secs < lead
    assert abs(int(told[3].split()[1]) - time.time() - 10_000) < 30
    told = submit(0, left_secs=None, SLURM_JOB_END_TIME="1234567890")[1]
    assert told[3] == "end 1234567890"


@pytest.mark.parametrize("taste", ["%d.%m. %H:%M", "%d/%m/%Y %T", "%s"])
def test_how_a_user_likes_to_read_times_changes_nothing(
    submit: Callable[..., tuple[int, list[str]]], tmp_path: Path, taste: str
) -> None:
    squeue = tmp_path / "bin" / "squeue"
    plain = "2030-01-02T03:04:05"
    environ = {"SQUEUE_SAYS": plain, "TOLD": "/dev/null", "SLURM_TIME_FORMAT": taste}
    said = subprocess.check_output([squeue], env={**os.environ, **environ}, text=True)
    assert said.strip() != plain  # it does heed it
    status, told = submit(STOPPED, left_secs=10_000, SLURM_TIME_FORMAT=taste)
    assert (status, REQUEUE in told) == (0, False)
    assert abs(int(told[3].split()[1]) - time.time() - 10_000) < 30
    status, told = submit(STOPPED, left_secs=280, SLURM_TIME_FORMAT=taste)
    assert (status, told[-1]) == (0, REQUEUE)


@pytest.mark.parametrize("answer", ["30.11. 22:45", "2026-13-45T99:99:99", "05/12", "Unknown"])
def test_an_end_that_can_not_be_read_is_taken_from_the_environment(
    submit: Callable[..., tuple[int, list[str]]], answer: str
) -> None:
    status, told = submit(0, left_secs=None, SQUEUE_SAYS=answer, SLURM_JOB_END_TIME="1234567890")
    assert (status, told[3]) == (0, "end 1234567890")
    assert submit(0, left_secs=None, SQUEUE_SAYS=answer)[1][3] == "end "


def test_the_batch_script_is_right_for_shellcheck_where_that_is_installed() -> None:
    subprocess.run(["/bin/bash", "-n", BATCH], check=True)
    if (shellcheck := shutil.which("shellcheck")) is None:
        pytest.skip("shellcheck isn't installed")
    subprocess.run([shellcheck, BATCH], check=True)


# Kubernetes -------------------------------------------------------------------------------------


def _job(path: Path) -> dict[str, Any]:
    documents = list(yaml.safe_load_all(path.read_text()))
    (job,) = [document for document in documents if document["kind"] == "Job"]
    found: dict[str, Any] = job
    return found


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_manifest_has_times_and_statuses_that_fit_into_each_other(path: Path) -> None:
    job = _job(path)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = parse_options([*container["command"][2:], *container["args"]])
    environ = {item["name"]: item.get("value") for item in container["env"]}
    deadline = float(environ["DIST_CKPT_DEADLINE_SECS"])
    assert deadline < options.grace_secs < pod["terminationGracePeriodSeconds"]
    assert container["command"][:2] == ["dist-ckpt", "run"]
    assert options.script_args == ("/app/train.py", "--run-dir", "/runs/first")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    ignored = [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule]
    stopped = int(environ["DIST_CKPT_STOP_EXIT_CODE"])
    # In their order, without which Kubernetes refuses them.
    assert ignored == [[UNMET_STATUS, stopped] if "completions" in job["spec"] else [stopped]]
    assert ignored == [sorted(values) for values in ignored]
    assert pod["restartPolicy"] == "Never"  # what podFailurePolicy asks for
    mounts = {item["name"] for item in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    given = dict(option.split("=", 1) for option in options.torchrun_args)
    assert given["--nproc-per-node"] == "gpu"  # as many ranks as the limits have GPUs
    if "completions" in job["spec"]:
        num_pods = job["spec"]["completions"]
        assert given["--nnodes"] == str(num_pods)
        assert job["spec"]["parallelism"] == num_pods
        # As /etc/hosts of a pod has it, for the namespace that Kubernetes puts in there.
        host = f"{job['metadata']['name']}-0.{pod['subdomain']}.$(NAMESPACE).svc.cluster.local"
        assert given["--rdzv-endpoint"].partition(":")[0] == host
        (named,) = [item for item in container["env"] if item["name"] == "NAMESPACE"]
        assert named["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"


def test_the_first_pod_knows_that_it_hosts_the_rendezvous_without_dns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = "train-0.train.ns.svc.cluster.local"

    def ask_hosts_file(host: str, *_: object, **__: object) -> list[tuple[Any, ...]]:
        if host not in ("train-0", full):  # all that it has: `10.0.0.7 FULL train-0`
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, full, ("10.0.0.7", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", ask_hosts_file)
    monkeypatch.setattr(socket, "gethostname", lambda: "train-0")
    (container,) = _job(MANIFESTS[1])["spec"]["template"]["spec"]["containers"]
    (endpoint,) = [word for word in container["command"] if "--rdzv-endpoint" in word]
    host = endpoint.partition("=")[2].partition(":")[0].replace("$(NAMESPACE)", "ns")
    assert utils._matches_machine_hostname(host)
    assert not utils._matches_machine_hostname("train-0.train")  # only DNS could tell


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_probes_let_live_what_trains_and_what_can_not_save(path: Path, tmp_path: Path) -> None:
    (container,) = _job(path)["spec"]["template"]["spec"]["containers"]
    start, live = (container[name]["exec"]["command"] for name in ("startupProbe", "livenessProbe"))
    stand_in = tmp_path / "dist-ckpt"
    stand_in.write_text('#!/bin/sh\necho "$*" >>"$TOLD"; echo "$SAYS"; exit "$STATUS"\n')
    stand_in.chmod(0o700)
    told = tmp_path / "told"

    def ask(command: list[str], says: dict[str, Any], status: int) -> int:
        environ = {
            "PATH": f"{tmp_path}:/bin:/usr/bin",
            "TOLD": str(told),
            "SAYS": json.dumps({"alive": True, **says}),
            "STATUS": str(status),
        }
        return subprocess.run(command, env=environ, check=False, capture_output=True).returncode

    for command in (start, live):
        assert ask(command, {"saves_failing": None}, 0) == 0
        for state in ("running", "suspended", "unknown"):
            assert ask(command, {"saves_failing": None, "state": state}, 1) == 1
        assert ask(command, {}, 2) != 0
        assert ask(command, {"saves_failing": None, "state": "ended"}, 1) == 0
    # An earlier pod was drained: that this one hangs before it trains is to be seen.
    assert ask(start, {"saves_failing": None, "state": "stopped"}, 1) == 1
    assert ask(live, {"saves_failing": None, "state": "stopped"}, 1) == 0
    # A rank has crashed: the launcher starts a new attempt, or waits for other pods with it.
    for state in ("dead", "failed"):
        assert ask(start, {"saves_failing": None, "state": state}, 1) == 1
        assert ask(live, {"saves_failing": None, "state": state}, 1) == 0
    assert ask(live, {"saves_failing": {"num_failed": 2}}, 1) == 0
    for line in set(told.read_text().splitlines()):
        found = subprocess.run(
            [sys.executable, "-m", "dist_ckpt", *line.split()[:-1], tmp_path / "none"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert found.returncode == 2
        assert "Usage" not in found.stdout + found.stderr
        assert line.endswith(" /runs/first")
    for name in ("startupProbe", "livenessProbe"):
        assert container[name]["timeoutSeconds"] >= 10  # Python starts, on busy cores
