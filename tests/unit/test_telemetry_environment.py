import json
import re
import subprocess

import pytest

from windlass.telemetry import environment
from windlass.telemetry.environment import (
    describe_job,
    describe_launch,
    describe_places,
    describe_rank,
    scrub_command,
    write_environment,
)
from windlass.variables import scrub

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "command",
    [
        "train q --api-key <abc> optim.lr=1e-3",
        "--token=<abc> tracker.password=<abc> db_passwd=<1> HF_TOKEN=<abc>",
        "data.source=https://<me:pw>@host/x",
        "s3://b/f?sig=<a>&X-Amz-Signature=<b>&n=1",
        "https://<me:p@w>@host/x?n=1;pass=<a>#access_token=<b>",
        'data.source=["https://<me:pw>@h/a?token=<b>","c.txt"]',
        "PGPASSWORD=<a> OPENAI_KEY=<b> SSHPASS=<c> GITHUB_PAT=<d> AWS_SECRET_ACCESS_KEY=<e>",
        "--openai-key <a> --db-pass <b>",
        '--set={"password":"<a>","n":1}',
        f"<hf_{'a' * 30}> x=<sk-{'b' * 30}>",
        # what only looks like it
        "--token --dry-run data.tokenizer=gpt2 data.text_key=text eval.sample_tokens=64",
        "data.max_tokens=5 train.tokens_per_parameter=20 me@host",
        "https://host/x?mail=me@host compass=1 data.tokenizer_vocab=5",
    ],
)
def test_a_command_line_without_its_secrets(command):
    """They are in angle brackets."""
    shown = scrub_command(re.sub("[<>]", "", command).split(), {})
    assert shown == re.sub("<.*?>", "***", command).split()


def test_the_values_of_secret_variables_are_hidden_wherever_they_turn_up():
    """The shell's directories are not secrets."""
    environ = {"WANDB_API_KEY": KEY, "SHORT_TOKEN": "abc", "DB_PWD": "open sesame"}
    environ |= {"HOME": "/home/somebody", "PWD": "/home/somebody/work", "OLDPWD": "/home/somebody"}
    assert scrub_command(["run.dir=/home/somebody/work/x"], environ)[0].endswith("work/x")
    shown = scrub(f"got {KEY} in /home/somebody, abc, open sesame", environ)
    assert shown == "got *** in /home/somebody, abc, ***"


def test_secrets_are_hidden_at_any_depth_and_under_any_name_of_one():
    """Also lists of lists; what only has a similar name (the package tiktoken) stays."""
    given = {
        "data.source": ["s3://me:pw@b/x", "s3://b/y?access_token=abc"],
        "options": {"api_key": ["one", 7], "pat": None},
        "packages": {"tiktoken": "0.9.0", "tokenizers": "0.21"},
        "https://me:pw@h": [[{"token": "two", "n": 1.5}]],
    }
    assert scrub(given, {}) == {
        "data.source": ["s3://***@b/x", "s3://b/y?access_token=***"],
        "options": {"api_key": ["***", "***"], "pat": None},
        "packages": {"tiktoken": "0.9.0", "tokenizers": "0.21"},
        "https://***@h": [[{"token": "***", "n": 1.5}]],
    }


def test_the_environment_is_a_list_of_what_may_be_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("MY_SECRET_PLAN", "world peace")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("sys.orig_argv", ["windlass", "train", f"x={KEY}"])
    source = ["https://me:open-sesame@h/x", {"url": f"https://h/x?key={KEY}"}]
    ranks = [describe_rank(0), describe_rank(1, coordinates="dp 0, tp 1")]
    write_environment(tmp_path, ranks, origin="there", sources=source)
    write_environment(tmp_path / "missing", [])  # a missing place to write does not stop the run
    text = (tmp_path / "environment.json").read_text()
    about = json.loads(text)
    assert not [word for word in (KEY, "world peace", "open-sesame") if word in text]
    assert about["origin"] == "there"
    assert about["variables"]["OMP_NUM_THREADS"] == "1"
    assert about["command"] == ["windlass", "train", "x=***"]
    assert about["packages"]["torch"] and about["machine"]["memory_mb"] > 100
    assert [rank["rank"] for rank in about["ranks"]] == [0, 1]
    assert [rank.get("coordinates") for rank in about["ranks"]] == [None, "dp 0, tp 1"]


def test_the_commit_of_a_checkout_and_whether_it_was_changed(tmp_path):
    def git(*arguments):
        identity = "-c user.name=t -c user.email=t@example.org -c commit.gpgsign=false".split()
        subprocess.check_output(["git", "-C", tmp_path, *identity, *arguments])

    assert environment.commit(tmp_path) is None
    git("init", "-q")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    state = environment.commit(tmp_path)
    assert len(state["hash"]) == 40 and state["changed"] is False
    (tmp_path / "code.py").write_text("2")
    assert environment.commit(tmp_path)["changed"] is True


def test_hosts_and_places_of_ranks():
    ranks = [
        {"rank": r, "local_rank": r % 2, "node": r // 2, "host": f"n{r // 2}", "name": "H200"}
        | {"device": f"cuda:{r % 2}"}
        for r in range(3)
    ]
    assert describe_places(ranks) == [
        "[cuda:0][rank=0/2][local_rank=0/1][node=0/1] n0",
        "[cuda:1][rank=1/2][local_rank=1/1][node=0/1] n0",
        "[cuda:0][rank=2/2][local_rank=0/0][node=1/1] n1",
    ]
    placed = [ranks[0] | {"coordinates": "dp 0, tp 1"}, *ranks[1:]]
    assert describe_places(placed)[0] == describe_places(ranks)[0] + " (dp 0, tp 1)"
    launch = {"launcher": "slurm", "world": 3, "nodes": 2, "strategy": "ddp", "backend": "nccl"}
    job = {"scheduler": "SLURM", "job": "8", "machine": "alps"}
    assert describe_launch(launch | job, ranks) == {
        "job": "SLURM job 8 on alps",
        "launch": "3 ranks on 2 hosts, started by slurm; nccl between ranks",
        "hosts": "n0: ranks 0-1, 2 x H200\nn1: rank 2, 1 x H200",
    }
    assert "job" not in describe_launch(launch, ranks)
    slurm = {"SLURM_JOB_ID": "8", "SLURM_CLUSTER_NAME": "alps"}
    assert describe_job(slurm) == job
    assert describe_job({"PBS_JOBID": "7.s"}) == {"scheduler": "PBS", "job": "7.s"}
    assert describe_job({}) == {}
