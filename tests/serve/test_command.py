"""`pale serve`: errors of its options, warnings, and the lines that it prints."""

import asyncio
import socket

import pytest

from pale.cli.main import main, parse
from pale.serve.hosts import allowed_hosts, exposure_warning
from pale.serve.run import bind
from pale.weights import zoo


def test_connections_send_small_packets_at_once():
    """With Nagle's algorithm, each response on a reused connection took 40 ms more."""

    async def accepted() -> int:
        found = asyncio.get_running_loop().create_future()

        async def note(reader, writer):
            name = socket.IPPROTO_TCP, socket.TCP_NODELAY
            found.set_result(writer.get_extra_info("socket").getsockopt(*name))
            writer.close()

        listening = bind("127.0.0.1", 0)
        async with await asyncio.start_server(note, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            option = await found
            writer.close()
        return option

    assert asyncio.run(accepted())


class TestCommand:
    def error(self, capsys, *words) -> str:
        assert main(["serve", *map(str, words)]) == 1
        return capsys.readouterr().err

    def test_without_weights_the_error_names_the_option(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setattr(zoo.index, "FOLDER", tmp_path)
        assert "--weights RUN" in self.error(capsys, "--port", 0)

    def test_two_models_of_one_name_are_an_error(self, made, capsys):
        twice = ["--weights", made["detection"]] * 2
        error = self.error(capsys, "--port", 0, *twice)
        assert "two models would have the name 'detection'" in error
        assert "--weights NAME=MODEL" in error

    @pytest.mark.parametrize("word", ["=x", "a/b=x", "a b=x", ".a=x", "a=", "a.tensor=x", "ä=x"])
    def test_an_invalid_name_of_a_model_is_an_error(self, capsys, word):
        assert "NAME=MODEL" in self.error(capsys, "--port", 0, "--weights", word)

    def test_a_port_in_use_is_reported_before_anything_is_loaded(self, capsys):
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            error = self.error(capsys, "--port", port, "--weights", "nowhere")
        assert f"cannot listen on 127.0.0.1 port {port}" in error
        assert "--port" in error

    @pytest.mark.parametrize(
        ("option", "value", "words"),
        [
            ("--batch", 0, "batch must be at least 1, got 0"),
            ("--queue", 0, "queue must be at least 1, got 0"),
            ("--wait-ms", -1, "wait_ms must be at least 0, got -1"),
            ("--timeout", 0, "timeout must be above 0, got 0"),
            ("--max-upload-mb", "nan", "max_upload_mb must be above 0, got nan"),
            ("--max-pixels", 0, "max_pixels must be at least 1, got 0"),
            ("--threads", 0, "--threads must be at least 1, got 0"),
            (
                "--memory-mb",
                100,
                "memory_mb must be at least 600 to receive files of 20 MB, got 100",
            ),
            ("--stop-delay", -1, "stop_delay must be from 0 to 3600, got -1"),
            ("--stop-delay", "nan", "stop_delay must be from 0 to 3600, got nan"),
            ("--token", "short", "the token must have at least 16 characters, got 5"),
            ("--token", "", "the token must have at least 16 characters, got 0"),
            ("--token", "with spaces in its middle", "printable ASCII without spaces"),
        ],
    )
    def test_invalid_limits_are_errors(self, capsys, option, value, words):
        assert words in self.error(capsys, option, value)

    def test_a_bad_token_in_the_environment_is_an_error(self, capsys, monkeypatch):
        monkeypatch.setenv("PALE_SERVE_TOKEN", "short")
        assert "at least 16 characters" in self.error(capsys, "--port", 0)

    @pytest.mark.parametrize(
        ("token", "words"),
        [
            (False, "no token is set: anyone who reaches it may use it"),
            (True, "without encryption"),
        ],
    )
    def test_an_address_that_others_reach_is_warned_about(self, token, words):
        assert allowed_hosts("0.0.0.0", []) == []
        warning = exposure_warning("0.0.0.0", token)
        assert warning.startswith("warning: 0.0.0.0 can be reached by others")
        assert words in warning
        assert "127.0.0.1" in allowed_hosts("127.0.0.1", [])
        assert exposure_warning("127.0.0.1", token) is None

    def test_names_of_models_are_escaped_on_the_terminal(self, capsys):
        about = {"detection": {"model": "\x1b]0;owned\x07\x1b[2Jnano\nfake line", "classes": 3}}
        parse(["serve"]).print_started("http://127.0.0.1:1", "cpu", about)
        printed = capsys.readouterr().out
        assert "\x1b" not in printed
        assert "\x07" not in printed
        assert printed.count("\n") == 2
