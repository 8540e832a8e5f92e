"""Servers that stall, cut, lie and send us elsewhere: the right rows, or a clear error."""

import shutil
import ssl
import subprocess
import urllib.request

import pytest

from omniload.cache import Cache, Storage
from omniload.cache.download import fetch_bytes
from omniload.cache.http import HttpTransport, _Redirects
from omniload.errors import ShardError
from omniload.shards import open_shards
from tests.http_server import (
    FaultyServer,
    answer,
    change_etag,
    drip,
    endless_redirect,
    flip,
    redirect,
    reset,
    slow,
    stall,
    status,
    truncate,
)
from tests.shard_makers import assert_all_the_same, assert_same, make_shards

COUNT = 90
QUICK = Storage(timeout_s=0.4, retries=2, backoff_s=0.01)
PATIENT = Storage(timeout_s=0.4, retries=5, backoff_s=0.01)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of several shards, and its records."""
    folder = tmp_path_factory.mktemp("data") / "set"
    return folder, make_shards(folder, COUNT, max_bytes=30_000)


@pytest.fixture
def server(data):
    with FaultyServer(data[0]) as running:
        yield running


@pytest.fixture
def cache(tmp_path):
    return Cache(folder=tmp_path / "cache")


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([status(503), status(429)], id="busy"),
        pytest.param([truncate(900), truncate(700), truncate(100)], id="truncated"),
        pytest.param([stall(800), stall(0)], id="stalled"),
        pytest.param([reset(1000), reset(0)], id="reset"),
        pytest.param([truncate(900), change_etag("b")], id="etag changed in the middle"),
        pytest.param([flip(40)], id="a wrong bit"),
        pytest.param([truncate(1200), flip(1)], id="a wrong bit after a part"),
        pytest.param([truncate(1000), status(503), reset(20), stall(5), truncate(9)], id="all"),
    ],
)
def test_what_comes_over_a_bad_connection_is_right(server, data, cache, faults):
    server.faults = list(faults)
    assert_all_the_same(open_shards(server.url, cache=cache, storage=PATIENT), data[1])
    assert server.faults == []


def test_a_download_goes_on_where_it_was_cut(server, cache):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    server.requests.clear()
    server.faults = [truncate(5000), truncate(3000)]
    shards.read(0)
    etag = server.etag((server.folder / shards.shard_names[0]).read_bytes())
    name = shards.shard_names[0]
    assert server.requests == [
        (name, None, None),
        (name, "bytes=5000-", etag),
        (name, "bytes=8000-", etag),
    ]


def test_a_file_that_changes_in_the_middle_is_fetched_from_its_beginning(server, cache):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    server.requests.clear()
    server.faults = [truncate(5000), change_etag("other"), truncate(6000)]
    shards.read(0)
    assert [wanted for _, wanted, _ in server.requests] == [None, "bytes=5000-"]
    server.requests.clear()
    server.faults = [truncate(5000), truncate(10)]
    shards.read(COUNT - 1)
    assert [wanted for _, wanted, _ in server.requests] == [None, "bytes=5000-", "bytes=5010-"]


@pytest.mark.parametrize("options", [{"with_ranges": False}, {"with_etag": False}])
def test_servers_without_ranges_or_etags_will_do(data, cache, options):
    with FaultyServer(data[0], **options) as server:
        server.faults = [truncate(2000), status(503), truncate(4000)]
        assert_all_the_same(open_shards(server.url, cache=cache, storage=QUICK), data[1])


def test_a_server_that_never_gets_further_ends_with_the_numbers_and_a_remedy(server, cache):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    server.faults = [truncate(5000), *[stall(0)] * 20]
    name = shards.shard_names[0]
    with pytest.raises(
        ShardError,
        match=rf"{server.url}/{name} could not be fetched: no byte came in time. 5000 bytes of "
        r"it came, at \d+\.\d bytes/s, and less than 65536 more in each of 3 tries with a time "
        r"limit of 0.4 s.*raise timeout_s",
    ):
        shards.read(0)
    server.faults = []
    assert shards.read(0).row == 0  # and goes on when the server does


def test_a_server_that_starts_over_each_time_is_given_up(data, cache):
    with FaultyServer(data[0], with_ranges=False) as server:
        shards = open_shards(server.url, cache=cache, storage=QUICK)
        server.faults = [truncate(5000)] * 20
        with pytest.raises(ShardError, match="5000 bytes of it came"):
            shards.read(0)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(
            drip(1, 0.05), r"only \d+ bytes came in [\d.]+ s, of at least 1024", id="bytes"
        ),
        pytest.param(drip(1, 0, head_s=0.05), r"only \d+ bytes, of headers", id="headers"),
        pytest.param(drip(1, 0, most=1), "the connection ended", id="a byte a connection"),
    ],
)
def test_a_server_that_drips_is_given_up_with_its_rate(server, cache, fault, reason):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    server.requests.clear()
    server.faults = [fault] * 20
    with pytest.raises(
        ShardError,
        match=rf"{server.url}/{shards.shard_names[0]} could not be fetched: {reason}.*\. \d+ bytes "
        r"of it came, at \d+\.\d bytes/s, .* 3 tries .*raise timeout_s",
    ):
        shards.read(0)
    assert len(server.requests) == 3
    server.faults = []
    assert shards.read(0).row == 0


@pytest.mark.parametrize("fault", [drip(1, 0.05), drip(1, 0, head_s=0.05)])
def test_a_manifest_that_drips_is_given_up(data, cache, fault):
    with FaultyServer(data[0], only=".json") as server:
        server.faults = [fault] * 20
        with pytest.raises(ShardError, match=r"manifest.json could not be fetched: only \d+ bytes"):
            open_shards(server.url, cache=cache, storage=QUICK)
        assert len(server.requests) == 3


def test_tries_that_bring_much_of_a_file_are_not_counted(tmp_path, cache):
    records = make_shards(tmp_path / "set", COUNT, max_bytes=10_000_000)
    with FaultyServer(tmp_path / "set") as server:
        shards = open_shards(server.url, cache=cache, storage=Storage(retries=0, backoff_s=0.01))
        size = shards.manifest.shards[0].num_bytes
        assert size > 2 << 16
        server.faults = [truncate(1 << 16), truncate(1 << 16)]
        assert_same(shards.read(0), records[0])
        assert server.faults == []


@pytest.mark.parametrize(
    "target", ["", "ftp://127.0.0.1:9/x", "file:///etc/hostname", "data:text/plain,x"]
)
def test_redirects_that_lead_nowhere_end_with_the_url(server, cache, target):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    server.faults = [redirect(target)] * 50
    with pytest.raises(ShardError, match=rf"{shards.shard_names[0]} can't be had: 302 .*Check the"):
        shards.read(0)
    assert len(server.faults) > 30


def test_a_file_that_is_always_wrong_is_named_and_never_trusted(server, data, cache):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    server.faults = [flip(500), flip(500)]
    with pytest.raises(ShardError, match=r"is not the file that its manifest names.*Upload"):
        shards.read(0)
    assert_same(shards.read(0), data[1][0])


def test_a_file_of_another_size_is_refused_before_it_comes(data, tmp_path, cache):
    folder = tmp_path / "copy"
    make_shards(folder, COUNT, max_bytes=30_000)
    with FaultyServer(folder) as server:
        shards = open_shards(server.url, cache=cache, storage=QUICK)
        path = folder / shards.shard_names[0]
        path.write_bytes(path.read_bytes() + b"more")
        with pytest.raises(ShardError, match=r"is not the file .* got \d+ bytes there"):
            shards.read(0)


def test_a_missing_file_is_named_at_once(data, tmp_path, cache):
    folder = tmp_path / "copy"
    make_shards(folder, COUNT, max_bytes=30_000)
    with FaultyServer(folder) as server:
        shards = open_shards(server.url, cache=cache, storage=QUICK)
        (folder / shards.shard_names[0]).unlink()
        server.requests.clear()
        with pytest.raises(ShardError, match=rf"{shards.shard_names[0]} can't be had: 404"):
            shards.read(0)
        assert len(server.requests) == 1
        (folder / "manifest.json").unlink()
        with pytest.raises(ShardError, match=r"nowhere/manifest.json can't be had: 404"):
            open_shards(f"{server.url}/nowhere", cache=cache, storage=QUICK)


def test_a_manifest_is_checked_wherever_it_comes_from(tmp_path, cache):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "manifest.json").write_text("[1]")
    with (
        FaultyServer(tmp_path / "src") as server,
        pytest.raises(ShardError, match=rf"{server.url}/manifest.json is not a manifest"),
    ):
        open_shards(server.url, cache=cache)


def test_a_manifest_is_asked_for_again_too(data, cache):
    with FaultyServer(data[0], only=".json") as server:
        server.faults = [status(503), truncate(50)]
        assert len(open_shards(server.url, cache=cache, storage=QUICK)) == COUNT
        assert server.faults == []


def test_slow_servers_are_waited_for(server, data, cache):
    server.faults = [slow(400, 0.01)]
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    assert len(shards) == COUNT


@pytest.mark.parametrize(
    "target",
    ["http://[x/", "http://127.0.0.1:no/", "http://h\xe9/", "http://a..b/", "http://a\0b/"],
)
def test_a_redirect_to_what_is_no_url_is_an_error_of_ours(server, cache, target):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    server.requests.clear()
    server.faults = [redirect(target)]
    with pytest.raises(ShardError, match=rf"{shards.shard_names[0]} can't be had: .* is no URL: "):
        shards.read(0)
    assert len(server.requests) == 1


def test_of_a_redirect_no_more_than_its_headers_is_read(server, data, cache):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    sent = [0]
    server.faults = [endless_redirect(f"{server.url}/{shards.shard_names[0]}", sent)]
    assert_same(shards.read(0), data[1][0])
    assert sent[0] < 32 << 20  # what fits the buffers of both ends


def test_a_key_goes_to_no_other_server_and_never_out_of_https():
    follow = _Redirects().redirect_request
    headers = {"Authorization": "Bearer x", "Range": "bytes=5-"}
    asked = urllib.request.Request("https://host/a", headers=headers)
    for url, kept in (
        ("https://host/b", {"Authorization", "Range"}),
        ("http://host/b", {"Range"}),
        ("https://host:8443/b", {"Range"}),
        ("https://other/b", {"Range"}),
    ):
        assert set(follow(asked, None, 302, "Found", {}, url).headers) == kept


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param(
            answer(206, {"Content-Range": f"bytes 0-{'9' * 5000}/{'9' * 5000}"}, b"x"),
            "could not be fetched: the server sent a part with Content-Range 'bytes 0-9+'",
            id="huge range",
        ),
        pytest.param(
            answer(200, {"Content-Encoding": "gzip"}, b"x"),
            r"arrow is sent with Content-Encoding 'gzip'.* Switch compression off",
            id="gzip",
        ),
        pytest.param(answer(200, {}), r"could not be fetched: the connection ended", id="empty"),
        pytest.param(
            answer(200, {"Content-Length": "0"}), r"is not the file .* got 0 bytes", id="no bytes"
        ),
        pytest.param(
            answer(418, {}), r"can't be had: 418 I'm a Teapot\. Check the URL and", id="a teapot"
        ),
    ],
)
def test_odd_answers_are_named(server, cache, fault, message):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    server.faults = [fault] * 3
    with pytest.raises(ShardError, match=message):
        shards.read(0)


def test_a_length_of_more_digits_than_any_file_has_is_taken_for_none(server, data, cache):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    body = (server.folder / shards.shard_names[0]).read_bytes()
    server.faults = [answer(200, {"Content-Length": "9" * 5000}, body)]
    assert_same(shards.read(0), data[1][0])


def test_a_description_must_come_from_its_beginning(data, cache):
    with FaultyServer(data[0], only=".json") as server:
        server.faults = [answer(206, {"Content-Range": "bytes 2-9/*"}, b"[1, 2, 3")] * 3
        with pytest.raises(ShardError, match="sent bytes from 2, asked for all"):
            open_shards(server.url, cache=cache, storage=QUICK)


def test_a_busy_server_says_when_to_come_again_but_not_for_longer_than_the_time_limit(server):
    url, waits = f"{server.url}/index.arrow", []
    busy = [answer(503, {"Retry-After": after}) for after in ("3", "100000", "never", "")]
    server.faults = list(busy)
    storage = Storage(timeout_s=8.0, backoff_s=0.0)
    data = fetch_bytes(
        HttpTransport(storage), url, most=1 << 20, storage=storage, sleep=waits.append
    )
    assert data == (server.folder / "index.arrow").read_bytes()
    assert waits == [3.0, 8.0, 0.0, 0.0]


def test_a_server_that_nobody_vouches_for_is_named_at_once(tmp_path, cache):
    key = tmp_path / "key.pem"
    made = shutil.which("openssl") and subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1",
         "-keyout", key, "-out", tmp_path / "certificate.pem"], capture_output=True
    )  # fmt: skip
    if not made or made.returncode:
        pytest.skip("needs openssl to make a certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate.pem", key)
    with FaultyServer(tmp_path, tls=context) as server:
        url = server.url.replace("http:", "https:")
        with pytest.raises(ShardError, match=r"not trusted: self.signed certificate.*SSL_CERT_FI"):
            open_shards(url, cache=cache, storage=Storage(backoff_s=1000.0))
