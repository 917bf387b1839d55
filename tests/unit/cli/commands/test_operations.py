"""Commands that look after a Temper: settings and their precedence, saved contexts, logs, processes, loads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cli.commands.operations.logs import Log
from cli.http.load.figures import figures
from cli.http.load.shape import Range, Shape
from cli.http.load.streams import Answer
from cli.local.model_directory import place_of, source_of
from cli.main import app
from cli.settings import CliSettings, UpSettings
from services.engine.settings import EngineSettings
from tests.unit.cli.server import Reply, Seen, serving, sse


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to work in, and no variables or contexts of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("TEMPER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def temper(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def shown(*words: str) -> Any:
    result = temper(*words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


class TestConfig:
    def test_an_option_wins_over_a_variable_that_over_the_file_and_that_over_the_default(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert EngineSettings().max_num_seqs == 0
        (home / "temper.toml").write_text('max_num_seqs = 3\nhttps_proxy = "http://p:1"\napi_keys_file = "none.json"\n')
        assert EngineSettings().max_num_seqs == 3
        assert EngineSettings().https_proxy.get_secret_value() == "http://p:1"
        monkeypatch.setenv("TEMPER_MAX_NUM_SEQS", "5")
        assert EngineSettings().max_num_seqs == 5
        # Options that have a variable, as those of `temper keys`.
        assert "none.json cannot be read" in temper("keys", "list").stderr
        monkeypatch.setenv("TEMPER_API_KEYS_FILE", "variable.json")
        assert "variable.json cannot be read" in temper("keys", "list").stderr
        assert "option.json cannot be read" in temper("keys", "list", "--file", "option.json").stderr

    def test_shows_what_was_changed_and_where_and_no_secret(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (home / "temper.toml").write_text('s3_secret_key = "abcdef"\nport = 8500\n')
        monkeypatch.setenv("TEMPER_PORT", "8600")
        found = {one["setting"]: (one["value"], one["from"]) for one in shown("config", "show")}
        assert found == {"s3_secret_key": ("…", "file"), "port": ("8600", "variable")}
        assert len(shown("config", "show", "--all")) > 100

    def test_a_saved_context_is_shown_without_its_key(self, home: Path) -> None:
        (home / "key").write_text("tp-secret")
        temper("context", "add", "mine", "http://mine:1", "--key-file", "key")
        for words in (("config", "show"), ("config", "show", "--all")):
            found = {one["setting"]: (one["value"], one["from"]) for one in shown(*words)}
            assert (found["url"], found["api_key"]) == (("http://mine:1", "context"), ("…", "context"))
            assert "tp-secret" not in temper(*words).output

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("max_num_seq = 3", "max_num_seq (is it max_num_seqs?) in temper.toml"),
            ("max_num_seqs = 'many'", "TEMPER_MAX_NUM_SEQS: "),
            ("port = ", "temper.toml is not TOML"),
        ],
    )
    def test_a_wrong_line_is_named(self, home: Path, text: str, words: str) -> None:
        (home / "temper.toml").write_text(text)
        result = temper("config", "check")
        assert result.exit_code == 2
        assert words in result.stderr

    @pytest.mark.parametrize("words", [("ps",), ("run", "--prompt", "x"), ("agent",), ("bench",)])
    def test_a_wrong_setting_ends_a_command_with_one_line(
        self, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
    ) -> None:
        monkeypatch.setenv("TEMPER_REQUEST_TIMEOUT", "-1")
        result = temper(*words, *(("--json",) if words[0] in ("ps", "run", "bench") else ()))
        assert result.exit_code == 2
        assert "TEMPER_REQUEST_TIMEOUT: Input should be greater than 0" in result.output
        if words[0] in ("ps", "run", "bench"):
            assert "TEMPER_REQUEST_TIMEOUT" in json.loads(result.stdout)["error"]["message"]

    def test_a_file_that_cannot_be_read_is_no_missing_one(self, home: Path) -> None:
        (home / "temper.toml").symlink_to("nowhere")
        result = temper("config", "check")
        assert result.exit_code == 2
        assert "temper.toml cannot be read: No such file" in result.stderr

    def test_a_named_file_that_is_missing_is_no_empty_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TEMPER_CONFIG", "nowhere.toml")
        result = temper("context", "list")
        assert result.exit_code == 2
        assert "nowhere.toml cannot be read" in result.stderr


class TestContexts:
    def test_a_saved_server_is_used_and_its_key_goes_to_it_alone(self, home: Path) -> None:
        (home / "key").write_text("tp-secret\n")
        with serving(lambda _: Reply({"data": []})) as (url, seen), serving(lambda _: Reply({"data": []})) as other:
            assert temper("context", "add", "mine", url, "--key-file", "key").exit_code == 0
            assert (home / "config" / "temper" / "contexts.json").stat().st_mode & 0o777 == 0o600
            temper("adapters", "list")
            temper("adapters", "list", "--url", other[0])
            temper("--url", other[0], "adapters", "list")
        assert [request.headers.get("authorization") for request in seen] == ["Bearer tp-secret"]
        assert [request.headers.get("authorization") for request in other[1]] == [None, None]

    def test_a_variable_wins_and_takes_no_key_along(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (home / "key").write_text("tp-secret")
        temper("context", "add", "mine", "http://mine:1", "--key-file", "key")
        assert CliSettings().url == "http://mine:1"
        monkeypatch.setenv("TEMPER_URL", "http://elsewhere:1")
        assert (CliSettings().url, CliSettings().api_key) == ("http://elsewhere:1", None)

    def test_a_key_does_not_go_where_a_file_that_nobody_named_says(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An agent may write in the directory that it works in, and so may whoever wrote what was cloned."""
        monkeypatch.setenv("TEMPER_API_KEY", "tp-secret")
        with serving(lambda _: Reply({"data": []})) as (url, seen):
            (home / "temper.toml").write_text(f'url = "{url}"\n')
            result = temper("adapters", "list")
            assert result.exit_code == 2
            assert "TEMPER_CONFIG" in result.stderr
            assert "tp-secret" not in result.stderr
            assert seen == []
            assert temper("adapters", "list", "--url", url).exit_code == 0
            monkeypatch.setenv("TEMPER_CONFIG", "temper.toml")
            assert temper("adapters", "list").exit_code == 0
            monkeypatch.delenv("TEMPER_CONFIG")
            (home / "temper.toml").write_text(f'url = "{url}"\napi_key = "tp-of-the-file"\n')
            monkeypatch.delenv("TEMPER_API_KEY")
            assert temper("adapters", "list").exit_code == 0
        keys = [request.headers.get("authorization") for request in seen]
        assert keys == ["Bearer tp-secret", "Bearer tp-secret", "Bearer tp-of-the-file"]

    @pytest.mark.parametrize(("host", "sent"), [("127.0.0.1", "Bearer tp-secret"), ("0.0.0.0", None)])
    def test_a_key_does_not_go_where_a_data_directory_says(
        self, home: Path, monkeypatch: pytest.MonkeyPatch, host: str, sent: str | None
    ) -> None:
        monkeypatch.setenv("TEMPER_API_KEY", "tp-secret")
        with serving(lambda _: Reply({"status": "ok", "engines": []})) as (url, seen):
            (home / ".temper").mkdir()
            state = {"url": url.replace("127.0.0.1", host), "pid": os.getpid(), "ports": {}, "pids": {}}
            (home / ".temper" / "state.json").write_text(json.dumps(state))
            temper("ps")
        assert {request.headers.get("authorization") for request in seen} == {sent}

    def test_one_is_chosen_and_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        temper("context", "add", "one", "http://one:1")
        temper("context", "add", "two", "http://two:1/")
        temper("context", "use", "one")
        assert CliSettings().url == "http://one:1"
        monkeypatch.setenv("TEMPER_CONTEXT", "two")
        assert CliSettings().url == "http://two:1"
        assert [one["current"] for one in shown("context", "list")] == [True, False]
        temper("context", "remove", "two")
        result = temper("adapters", "list")
        assert result.exit_code == 2
        assert "there is no context 'two'" in result.stderr
        # A URL that is said leaves nothing of a context to look for.
        monkeypatch.setenv("TEMPER_URL", "http://elsewhere:1")
        assert CliSettings().key_for("http://third:1") == ""

    def test_what_is_no_url_is_not_saved(self) -> None:
        assert temper("context", "add", "one", "localhost:8420").exit_code == 2
        assert shown("context", "list") == []


class TestLogs:
    def test_the_ends_of_all_or_one(self, home: Path) -> None:
        logs = home / ".temper" / "logs"
        logs.mkdir(parents=True)
        (logs / "engine.log").write_text("one\ntwo\n")
        (logs / "gateway.log").write_text("three\n")
        assert temper("logs", "-n", "1").stdout == "engine  | two\ngateway | three\n"
        assert temper("logs", "engine").stdout == "one\ntwo\n"
        assert "there are engine, gateway" in temper("logs", "other").stderr

    def test_of_a_server(self) -> None:
        line = {"time": 1e9, "level": "error", "process": "card-0", "message": "hot", "request_id": None}
        lines = [{**line, "id": f"a-{n}", "fields": {"celsius": 90}, "exception": "Traceback"} for n in range(2)]
        streams = iter([lines[:1], lines])

        def answer(request: Seen) -> Reply:
            if "process=card-9" in request.path:
                return Reply({"error": {"message": "there is no process 'card-9'"}}, 404)
            if "follow=true" not in request.path:
                return Reply({"data": lines, "processes": ["gateway"], "unreachable": ["card-1"]})
            found = next(streams, None)
            if found is None:
                return Reply({"error": {"message": "the scope admin is needed"}}, 403)
            return sse(*((str(one["id"]), "log", one) for one in found))

        with serving(answer) as (url, seen):
            told = temper("logs", "--url", url, "--level", "error", "-n", "5", "--text", "hot")
            assert told.stdout.count("error   hot celsius=90\nTraceback\n") == 2
            assert "card-1 does not answer" in told.stderr
            assert seen[0].path == "/v1/logs?limit=5&level=error&text=hot"
            assert temper("logs", "card-9", "--url", url).exit_code == 1
            # The connection is lost, and the server tells the first line again.
            followed = temper("logs", "--url", url, "--follow", "--json")
            assert [json.loads(line).get("id") for line in followed.stdout.splitlines()][:2] == ["a-0", "a-1"]
            assert followed.exit_code == 1
            assert seen[-1].path == "/v1/logs?limit=1000&since=999999997.0&follow=true"
        assert "these logs are files" in temper("logs", "--level", "error").stderr

    def test_follows_whole_lines_into_a_file_that_took_the_place(self, home: Path) -> None:
        file = home / "engine.log"
        file.write_text("old\n")
        log = Log(file)
        with file.open("a") as writer:
            writer.write("new\nhal")
        assert list(log.new()) == ["new"]
        with file.open("a") as writer:
            writer.write("f\n")
        assert list(log.new()) == ["half"]
        with file.open("a") as writer:
            writer.write("last\n")
        file.rename(home / "engine.1.log")
        assert list(log.new()) == ["last"]
        file.write_text("next\n")
        assert list(log.new()) == ["next"]
        file.write_text("cut\n")
        assert list(log.new()) == ["cut"]


def test_ps_shows_processes_with_their_memory_and_the_server(home: Path) -> None:
    engine = {"address": "127.0.0.1:1", "ready": True, "running": 2, "waiting": 0, "attached_adapter": "polite@3"}
    health = {"status": "ok", "model": "qwen3.5", "engines": [engine], "redis": "ok", "object_store": "ok"}
    with serving(lambda seen: Reply(health if seen.path == "/healthz" else {"version": "0.1.0"})) as (url, _):
        (home / ".temper").mkdir()
        state = {"url": url, "pid": os.getpid(), "ports": {"engine": 1}, "pids": {"engine": os.getpid()}}
        (home / ".temper" / "state.json").write_text(json.dumps(state))
        found = shown("ps")
        assert "polite@3" in temper("ps").stdout
    assert [(one["process"], one["pid"], one["memory"] > 2**20) for one in found["processes"]] == [
        ("up", os.getpid(), True),
        ("engine", os.getpid(), True),
    ]
    assert found["server"]["version"] == "0.1.0"


def test_ps_names_what_is_no_temper(home: Path) -> None:
    with serving(lambda _: Reply({"hello": "world"})) as (url, _):
        result = temper("ps", "--url", url)
        assert (result.exit_code, f"what answers at {url} is no Temper" in result.stderr) == (3, True)
        for words in (("chat", "hello"), ("run", "--prompt", "hello", "--no-tools"), ("bench",)):
            result = temper(*words, "--url", url)
            assert (result.exit_code, "has not OpenAI's API" in result.stderr) == (3, True)
    (home / ".temper").mkdir()
    for text in ("[]", "{}", '{"pid": "x"}', "{"):
        (home / ".temper" / "state.json").write_text(text)
        result = temper("ps")
        assert (result.exit_code, "is not what `temper up` writes" in result.stderr) == (2, True)


def test_ps_does_not_advise_to_start_what_runs(home: Path) -> None:
    (home / ".temper").mkdir()
    state = {"url": "http://127.0.0.1:1", "pid": os.getpid(), "ports": {}, "pids": {"gateway": os.getpid()}}
    (home / ".temper" / "state.json").write_text(json.dumps(state))
    told = temper("ps")
    assert told.exit_code == 0
    assert "gateway" in told.stdout
    assert "`temper logs gateway`" in told.stderr
    assert "temper up" not in told.stderr


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("temper adap", ["adapters"]),
        ("temper up --dev", ["--device"]),
        ("temper up --device ", ["auto", "cpu", "cuda"]),
        ("temper logs eng", ["engine"]),
        ("temper context use ", ["one", "two"]),
    ],
)
def test_the_shell_completes_commands_options_and_names(home: Path, line: str, found: list[str]) -> None:
    temper("context", "add", "one", "http://one:1")
    temper("context", "add", "two", "http://two:1")
    words = str(len(line.split()) - (not line.endswith(" ")))
    variables = {"_TEMPER_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": words}
    result = CliRunner().invoke(app, [], prog_name="temper", env=variables)
    assert result.stdout.split() == found


def test_serve_needs_stores(home: Path) -> None:
    result = temper("serve")
    assert result.exit_code == 2
    assert "TEMPER_REDIS_URL and TEMPER_S3_ENDPOINT is not set" in result.stderr


class TestModels:
    @pytest.mark.parametrize(
        ("text", "source"),
        [
            ("Qwen/Qwen3.5-4B", "hf://Qwen/Qwen3.5-4B"),
            ("Qwen/Qwen3.5-4B@main", "hf://Qwen/Qwen3.5-4B@main"),
            ("s3://models/a/b", "s3://models/a/b"),
            ("here/model", None),
            ("./Qwen/model", None),
            ("/models/tiny", None),
            ("a/b/c", None),
        ],
    )
    def test_a_directory_is_told_from_a_repository(self, home: Path, text: str, source: str | None) -> None:
        (home / "here" / "model").mkdir(parents=True)
        assert source_of(text) == source

    def test_each_source_has_a_place_in_the_cache(self) -> None:
        places = {place_of(source) for source in ("hf://a/b", "hf://a/b@c", "s3://a/b")}
        assert len(places) == 3
        assert all(place.parent == UpSettings().cache_dir.expanduser() / "models" for place in places)


class TestLoads:
    def test_a_load_is_sent_and_its_figures_are_told(self, home: Path) -> None:
        def answer(seen: Seen) -> Reply:
            if seen.method == "GET":
                return Reply({"data": [{"id": "m"}]})
            assert seen.json["model"] == "m"
            count = seen.json["max_tokens"]
            events = [("", "message", {"choices": [{"text": "a"}]})] * count
            return sse(*events, ("", "message", {"choices": [], "usage": {"completion_tokens": count}}), done=True)

        with serving(answer) as (url, seen):
            words = ("--url", url, "-n", "6", "-c", "2", "--prompt-tokens", "8", "--max-tokens", "3", "--warm-up", "1")
            found = shown("bench", *words)
            assert (found["requests"], found["failed"], found["output_tokens"]) == (6, 0, 18)
            assert found["first_token_ms"]["p50"] > 0
            assert len([request for request in seen if request.method == "POST"]) == 7
            assert len({request.body for request in seen if request.method == "POST"}) == 7
            assert (
                found["requests"]
                == shown("bench", *words[:4], "--rate", "100", "--chat", "--plot", "load.png")["requests"]
            )
            assert "tokens/s" in temper("bench", *words).stdout
        assert (home / "load.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        ("plot", "words"), [("load.jpg", "ends in .png"), ("none/load.png", "there is no directory")]
    )
    def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_sent(self, plot: str, words: str) -> None:
        with serving(lambda _: Reply({"data": [{"id": "m"}]})) as (url, seen):
            result = temper("bench", "--url", url, "--plot", plot)
        assert result.exit_code == 2
        assert words in result.stderr
        assert not seen

    def test_failures_are_counted_and_told(self) -> None:
        def answer(seen: Seen) -> Reply:
            return (
                Reply({"data": [{"id": "m"}]})
                if seen.method == "GET"
                else Reply({"error": {"message": "it is\nfull"}}, 503)
            )

        with serving(answer) as (url, _):
            result = temper("bench", "--url", url, "-n", "2", "--warm-up", "0")
        assert result.exit_code == 1
        assert result.stderr.count("503 Service Unavailable: it is full") == result.stderr.count("failed ") == 1

    def test_a_stream_that_ends_with_an_error_has_failed(self) -> None:
        """Whether or not [DONE] follows, and where the connection stays open."""

        def answer(seen: Seen) -> Reply:
            if seen.method == "GET":
                return Reply({"data": [{"id": "m"}]})
            text = ("", "message", {"choices": [{"text": "a"}]})
            return sse(text, ("", "message", {"error": {"message": "out of [/memory]"}}), done=True)

        with serving(answer) as (url, _):
            result = temper("bench", "--url", url, "-n", "2", "--warm-up", "0")
        assert result.exit_code == 1
        assert "out of [/memory]" in result.stderr

    def test_figures_are_those_of_the_answers(self) -> None:
        answers = [Answer(0.0, [0.1, 0.2, 0.4], 3, ""), Answer(1.0, [1.5], 1, ""), Answer(0.5, [], 0, "refused")]
        found = figures(answers)
        assert (found["requests"], found["failed"], found["failures"]) == (3, 1, {"refused": 1})
        assert (found["seconds"], found["output_tokens_per_second"]) == (1.5, round(4 / 1.5, 1))
        assert found["first_token_ms"] == {"mean": 300.0, "p50": 500.0, "p90": 500.0, "p99": 500.0, "max": 500.0}
        assert found["between_tokens_ms"]["max"] == 200.0

    def test_a_load_is_the_same_for_its_seed(self) -> None:
        sizes = {"requests": 40, "prompt_tokens": Range(low=8, high=16), "max_tokens": Range.parse("4")}
        load = Shape(**sizes, rate=10.0, shared_prefix=5)
        bodies = list(load.bodies("m"))
        assert bodies == list(load.bodies("m"))
        assert len({tuple(body["prompt"][:5]) for body in bodies}) == 1
        assert {len(body["prompt"]) for body in bodies} <= set(range(8, 17))
        assert load.starts() == sorted(load.starts())
        assert 2.0 < load.starts()[-1] < 8.0
        with pytest.raises(ValueError, match="either a concurrency"):
            Shape(**sizes, rate=1.0, concurrency=1)
