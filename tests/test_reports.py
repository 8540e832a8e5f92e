"""Figures written out while a loader runs: JSON lines, Prometheus text, the log."""

import json
import logging
import os
import re
from dataclasses import replace

import pytest

from omniload import Budget, ConfigError, DataLoader, Metrics, World
from omniload.loader.reports import prometheus_text
from omniload.loader.stats import SourceShare
from tests.loader_data import write_data

BUDGET = Budget(tokens=800, tiles=12)
NUM_ROWS = 12
SAMPLE = re.compile(r'(omniload_[a-z_]+)\{([a-z]+="(?:[^"\\]|\\.)*",?)+\} (-?[0-9.e+-]+|inf|nan)$')


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("reports") / "shards", num_rows=NUM_ROWS)


def parsed(text):
    """Read Prometheus text strictly: each name is described once, before its samples."""
    kinds, values = {}, {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in kinds
            kinds[name] = kind
            continue
        match = SAMPLE.match(line)
        assert match, line
        assert match[1] in kinds
        assert (kinds[match[1]] == "counter") == match[1].endswith("_total")
        values.setdefault(match[1], []).append(float(match[3]))
    assert text.endswith("\n")
    assert kinds.keys() == values.keys()
    return values


def test_each_batch_and_the_end_of_an_epoch_give_a_line(data, tmp_path):
    jsonl, prometheus = tmp_path / "m.jsonl", tmp_path / "m.prom"
    metrics = Metrics(jsonl=jsonl, prometheus=prometheus, every_s=0)
    loading = DataLoader(data, budget=BUDGET, world=World(), metrics=metrics)
    batches = list(loading)
    lines = [json.loads(line) for line in jsonl.read_text().splitlines()]
    assert len(lines) == len(batches) + 1
    assert [line["this_epoch"]["batches"] for line in lines[:-1]] == list(
        range(1, len(batches) + 1)
    )
    assert lines[-1]["since_start"]["samples"] == NUM_ROWS
    values = parsed(prometheus.read_text())
    assert values["omniload_samples_total"] == [NUM_ROWS]
    assert values["omniload_batches_total"] == [len(batches)]
    assert 0 <= values["omniload_wait_share"][0] <= 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.jsonl", "m.prom"]


def test_between_two_times_nothing_is_written(data, tmp_path):
    jsonl = tmp_path / "m.jsonl"
    metrics = Metrics(jsonl=jsonl, every_s=3600)
    list(DataLoader(data, budget=BUDGET, world=World(), metrics=metrics))
    assert len(jsonl.read_text().splitlines()) == 1  # that of the epoch's end


def test_each_rank_has_files_of_its_own_and_replicas_write_none(data, tmp_path):
    metrics = Metrics(jsonl=tmp_path / "m.jsonl", every_s=0)
    for replica in range(2):
        for rank in range(2):
            world = World(dp_rank=rank, dp_world_size=2, replica_rank=replica, replica_size=2)
            list(DataLoader(data, budget=BUDGET, world=world, metrics=metrics))
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["m.rank0.jsonl", "m.rank1.jsonl"]
        lines = (tmp_path / names[1]).read_text().splitlines()
        ranks = [json.loads(line)["rank"] for line in lines]
        assert set(ranks) == {1}
        if replica == 0:
            written = len(ranks)
        assert len(ranks) == written


def test_the_log_gets_a_line_if_asked(data, caplog):
    with caplog.at_level(logging.INFO, logger="omniload.loader.reports"):
        list(DataLoader(data, budget=BUDGET, world=World(), metrics=Metrics()))
        assert not caplog.messages
        list(DataLoader(data, budget=BUDGET, world=World(), metrics=Metrics(log_every_s=0)))
    assert re.match(r"rank 0, epoch 0, step 0: 1 batches, ", caplog.messages[0])


def test_a_file_that_cannot_be_written_is_told_of_once(data, tmp_path, caplog):
    metrics = Metrics(jsonl=tmp_path / "nowhere" / "m.jsonl", every_s=0)
    batches = list(DataLoader(data, budget=BUDGET, world=World(), metrics=metrics))
    assert len(batches) > 1
    told = [message for message in caplog.messages if "can't be written" in message]
    assert len(told) == 1


def test_a_line_cut_by_a_kill_spoils_no_other(data, tmp_path):
    jsonl = tmp_path / "m.jsonl"
    jsonl.write_text('{"time": 12')
    list(DataLoader(data, budget=BUDGET, world=World(), metrics=Metrics(jsonl=jsonl)))
    cut, whole = jsonl.read_text().splitlines()
    assert cut == '{"time": 12'
    assert json.loads(whole)["epoch"] == 0


def test_a_pipe_that_nobody_reads_is_not_waited_for(data, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    metrics = Metrics(jsonl=pipe, every_s=0)
    assert len(list(DataLoader(data, budget=BUDGET, world=World(), metrics=metrics))) > 1


def test_names_of_sets_are_escaped(data):
    loading = DataLoader(data, budget=BUDGET, world=World())
    list(loading)
    stats = loading.stats()
    share = SourceShare(
        samples=3,
        tokens=40,
        tiles=2,
        share_of_samples=1.0,
        share_of_tokens=1.0,
        share_of_tiles=1.0,
    )
    odd = {'a "b"\\\nc': share}
    text = prometheus_text(replace(stats, since_start=replace(stats.since_start, sources=odd)))
    assert r'source="a \"b\"\\\nc"' in text
    parsed(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"jsonl": 3}, "jsonl must be a path or None, got int"),
        ({"jsonl": "a\0b"}, "jsonl must name a file"),
        ({"jsonl": ""}, "jsonl must name a file"),
        ({"jsonl": "m", "prometheus": "./m"}, "must be two files, got 'm' for both"),
        ({"every_s": 10**400}, "every_s must be seconds, at least 0"),
        ({"every_s": -1}, "every_s must be seconds, at least 0, got -1"),
        ({"every_s": None}, "every_s must be seconds"),
        ({"log_every_s": True}, "log_every_s must be seconds"),
    ],
)
def test_wrong_settings_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Metrics(**arguments)


def test_metrics_must_be_metrics(data):
    with pytest.raises(ConfigError, match=r"metrics must be an omniload\.Metrics or None, got str"):
        DataLoader(data, budget=BUDGET, world=World(), metrics="m.jsonl")
