# SPDX-License-Identifier: Apache-2.0
"""What a user can get wrong: each ends with status 2, one clear error, and nothing written.

Real: the job, its command line, Ray, S3 (SeaweedFS). Where Ray must not be started, RAY_ADDRESS
names a port at which nothing listens: the error would be about that if Ray were tried first.
"""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
from job_process import Finished, JobRunner

from raydist.testing.s3_server import S3Server

_NO_RAY = {"RAY_ADDRESS": "127.0.0.1:1"}


def _assert_refused(done: Finished, error: str, *said: str) -> None:
    assert done.exit_code == 2, done
    first_line = done.stderr.splitlines()[0]
    assert first_line.startswith(f"{error}: "), done
    assert "Traceback" not in done.stderr, done
    for text in said:
        assert text in done.stderr, done


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file below a folder."""
    found = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        pytest.param(
            ("--scaling.workers", "3"), "BatchNotDivisibleError",
            ("global_batch_size=8", "micro_batch_size=2 x world_size=3 (=6)", "to 6 or 12"),
            id="batch-does-not-divide",
        ),
        pytest.param(
            ("lama_tiny",), "ConfigError", ("'lama_tiny'", "Did you mean llama_tiny?"),
            id="unknown-recipe",
        ),
        pytest.param(
            ("--scaling.gpus-per-worker", "2"), "ConfigError",
            ("scaling.gpus_per_worker=2", "scaling.workers=2"), id="two-gpus-a-worker",
        ),
        pytest.param(
            ("--storage", "gs://bucket/runs"), "ConfigError",
            ("'gs://bucket/runs'", "s3://bucket/prefix"), id="storage-scheme",
        ),
        pytest.param(("--num-steps", "0"), "ConfigError", ("num_steps=0",), id="no-steps"),
        pytest.param(
            ("--batch.global-batch-size", "1024"), "DataError",
            ("= 101 sequences", "batch.global_batch_size=1024"), id="corpus-too-small",
        ),
        pytest.param(
            ("--data.source", "/nowhere/at/all"), "DataError",
            ("data.source='/nowhere/at/all'", "python-stdlib"), id="no-corpus",
        ),
        pytest.param(
            ("--network.master-port", "80"), "ConfigError",
            ("network.master_port=80", "[1024, 65535]"), id="master-port-out-of-range",
        ),
        pytest.param(
            ("--resume", "must"), "ResumeError",
            ("--resume must", "no committed checkpoint", "--resume auto"), id="nothing-to-resume",
        ),
    ],
)  # fmt: skip
def test_request_that_cannot_be_is_refused_before_ray(
    jobs: JobRunner, arguments: tuple[str, ...], error: str, said: tuple[str, ...]
) -> None:
    _assert_refused(jobs.run(*arguments, env=_NO_RAY), error, *said)
    assert not jobs.storage.exists()


def test_unknown_flag_is_refused_with_the_nearest(jobs: JobRunner) -> None:
    done = jobs.run("--optimizer.learning-rat", "1", env=_NO_RAY)
    assert done.exit_code == 2, done
    assert "Unrecognized options: --optimizer.learning-rat" in done.stderr
    assert "--optimizer.learning-rate FLOAT" in done.stderr
    assert "Traceback" not in done.stderr
    assert not jobs.storage.exists()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", ("RAY_ADDRESS=127.0.0.1:1", "Connection refused", "unset RAY_ADDRESS")),
        ("head", ("RAY_ADDRESS=head is not host:port", "[1, 65535]")),
        ("head:70000", ("RAY_ADDRESS=head:70000 is not host:port", "[1, 65535]")),
        ("http://head:8265", ("RAY_ADDRESS=http://head:8265", "raydist submit")),
        ("ray://head:10001", ("ray://", "RAY_ADDRESS to host:port")),
    ],
)
def test_ray_address_that_cannot_be_used_is_refused(
    jobs: JobRunner, address: str, said: tuple[str, ...]
) -> None:
    _assert_refused(jobs.run(env={"RAY_ADDRESS": address}), "ClusterError", *said)
    assert not jobs.storage.exists()


def test_storage_below_a_file_is_refused(jobs: JobRunner) -> None:
    file = jobs.folder / "file"
    file.touch()
    done = jobs.run("--storage", str(file / "runs"), env=_NO_RAY)
    _assert_refused(done, "StorageUnusableError", f"{file}/runs", "A part of the path is a file")
    assert file.read_bytes() == b""


def test_s3_endpoint_where_nothing_listens_is_refused(jobs: JobRunner) -> None:
    env = {
        "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
    }  # fmt: skip
    done = jobs.run("--storage", "s3://bucket/runs", env=_NO_RAY | env)
    *retries, error, way_out = done.stderr.splitlines()
    assert all(line.startswith("storage: attempt ") for line in retries), done
    last = Finished(exit_code=done.exit_code, stdout="", stderr=f"{error}\n{way_out}")
    _assert_refused(last, "StorageUnusableError", "http://127.0.0.1:1", "AWS_ENDPOINT_URL_S3")
    assert not jobs.storage.exists()


@pytest.mark.timeout(240)
def test_s3_bucket_that_is_missing_is_refused(jobs: JobRunner, s3_server: S3Server) -> None:
    done = jobs.run("--storage", "s3://no-such-bucket/runs", env=_NO_RAY | s3_server.environment())
    _assert_refused(done, "StorageUnusableError", "no-such-bucket")
    assert not jobs.storage.exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> JobRunner:
    """A run called `done` of 4 steps, and one called `torn` that saved and never committed."""
    runner = JobRunner(tmp_path_factory.mktemp("trained"))
    done = runner.run("--name", "done", "--num-steps", "4", launcher="torchrun")
    assert done.exit_code == 0, done
    shutil.copytree(
        runner.storage / "done" / "checkpoints", runner.storage / "torn" / "checkpoints"
    )
    return runner


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(
            ("--name", "done", "--model.hidden-size", "128"),
            ("model.hidden_size: 64 -> 128", "weights of another model cannot be loaded"),
            id="another-model",
        ),
        pytest.param(
            ("--name", "done", "--model.hidden-size", "128", "--allow-config-change"),
            ("model.hidden_size: 64 -> 128", "Choose another --name"),
            id="another-model-allowed",
        ),
        pytest.param(
            ("--name", "done", "--optimizer.learning-rate", "0.001"),
            ("optimizer.learning_rate: 0.003 -> 0.001", "--allow-config-change"),
            id="another-learning-rate",
        ),
        pytest.param(
            ("--name", "done", "--resume", "never"),
            ("--resume never", "run done has a committed checkpoint at step 4"),
            id="never-over-a-committed-run",
        ),
        pytest.param(
            ("--name", "torn"),
            ("Run torn has checkpoint objects", "no journal", "--resume never"),
            id="objects-without-a-commit",
        ),
        pytest.param(
            ("--name", "torn", "--resume", "must"),
            ("run torn has no committed checkpoint",),
            id="must-without-a-commit",
        ),
    ],
)
def test_resume_that_does_not_fit_is_refused(
    trained: JobRunner, arguments: tuple[str, ...], said: tuple[str, ...]
) -> None:
    before = _files(trained.storage)
    done = trained.run(*arguments, "--num-steps", "4", env=_NO_RAY)
    _assert_refused(done, "ResumeError", *said)
    assert _files(trained.storage) == before


@pytest.mark.timeout(300)
def test_resume_with_another_learning_rate_works_when_allowed(
    trained: JobRunner, tmp_path: Path
) -> None:
    shutil.copytree(trained.storage, tmp_path / "runs")
    done = trained.run(
        "--name", "done", "--num-steps", "6", "--optimizer.decay-steps", "4",
        "--optimizer.learning-rate", "0.001", "--allow-config-change",
        "--storage", str(tmp_path / "runs"), launcher="torchrun",
    )  # fmt: skip
    assert done.exit_code == 0, done
    assert "resuming run done at step 4 of 6" in done.stdout
    assert "finished 6 steps" in done.stdout


@pytest.mark.timeout(300)
def test_master_port_that_is_taken_is_refused(jobs: JobRunner) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        done = jobs.run("--name", "port", "--network.master-port", str(port))
    _assert_refused(done, "ClusterError", f"port {port}", "network.master_port")
    assert not (jobs.storage / "port" / "journal").exists()


@pytest.mark.timeout(300)
def test_more_workers_than_the_cluster_can_have_are_refused(jobs: JobRunner) -> None:
    done = jobs.run("--scaling.workers", "512", "--batch.global-batch-size", "1024",
                    "--data.source", "python-stdlib")  # fmt: skip
    _assert_refused(done, "CapacityError", "asks for 512 CPU", "free", "could scale to")
    assert not jobs.storage.exists()


@pytest.mark.timeout(300)
def test_interface_that_does_not_exist_is_refused(jobs: JobRunner) -> None:
    done = jobs.run("--name", "interface", "--network.interface", "eth77")
    _assert_refused(done, "ClusterError", "eth77", "network.interface")
    assert not (jobs.storage / "interface" / "journal").exists()
